"""Settings of the `megatron` backend, and the checked way through to Megatron's own TransformerConfig."""

import ast
import difflib
import functools
from importlib import metadata
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from relax.config.base import Settings

_SIZES = "it follows from actor.tensor_parallel and its kin"
_MODEL = "it follows from the model's config.json"
_FIELD = "set actor.megatron.{} instead"
_SCHEDULE = "the backend drives the schedule itself"

OWNED: dict[str, str] = {
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "pipeline_model_parallel_layout",
        ),
        _SIZES,
    ),
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "layernorm_epsilon",
            "layernorm_zero_centered_gamma",
            "qk_layernorm",
            "add_bias_linear",
            "add_qkv_bias",
            "gated_linear_unit",
            "activation_func",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_layer_freq",
            "moe_router_score_function",
            "moe_router_pre_softmax",
            "rotary_interleaved",
            "mrope_section",
            "window_size",
        ),
        _MODEL,
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "fp16", "bf16"), "it follows from model.dtype"),
    **dict.fromkeys(
        (
            "finalize_model_grads_func",
            "grad_scale_func",
            "moe_grad_scale_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
            "calculate_per_token_loss",
            "variable_seq_lengths",
            "overlap_p2p_comm",
            "batch_p2p_comm",
            "timers",
        ),
        _SCHEDULE,
    ),
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout"),
        "a policy is trained without dropout: an importance ratio compares two distributions",
    ),
    "sequence_parallel": _FIELD.format("sequence_parallel"),
    "recompute_granularity": _FIELD.format("recompute"),
    "recompute_method": _FIELD.format("recompute"),
    "recompute_num_layers": _FIELD.format("recompute_layers"),
    "moe_token_dispatcher_type": _FIELD.format("token_dispatcher"),
    "moe_aux_loss_coeff": _FIELD.format("aux_loss"),
    "moe_router_load_balancing_type": _FIELD.format("aux_loss_kind"),
    "moe_z_loss_coeff": _FIELD.format("z_loss"),
    "moe_enable_routing_replay": "it follows from the routes that a batch carries",
    "transformer_impl": _FIELD.format("transformer_engine"),
    "perform_initialization": "weights come from the model folder",
}
"""Fields of TransformerConfig that are not passed through, each with what to do instead."""


class MegatronSettings(Settings):
    """How `actor.backend=megatron` trains. Sizes of the split are beside it, as `actor.tensor_parallel`."""

    sequence_parallel: bool = False
    """Split what lies between the matrices along the sequence over the tensor-parallel ranks: less memory."""
    distributed_optimizer: bool = False
    """Split optimizer state (and masters) over the data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Compute activations again in the backward: `selective` those of attention, `full` whole layers."""
    recompute_layers: int = Field(default=1, ge=1)
    """Layers that `full` recomputes together from one stored activation."""
    vocabulary_divisor: int = Field(default=128, ge=1)
    """The vocabulary is padded to a multiple of this times `actor.tensor_parallel`; padding is never said."""
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the ranks of their experts."""
    aux_loss: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts, against the mean loss of the policy."""
    aux_loss_kind: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = "aux_loss"
    """What is balanced: a micro-batch, each of its positions, or all replicas since the last step."""
    z_loss: float | None = Field(default=None, gt=0)
    """Weight of the router's z-loss, which keeps its logits small."""
    share_encoding: bool = True
    """Tensor- and context-parallel ranks share the images and sounds of a micro-batch among them, each of
    which has all of the encoders. Without, every rank encodes all: no rows are exchanged.
    """
    transformer_engine: bool | None = None
    """Layers of Transformer Engine; by default on a GPU where it is installed."""
    transformer_config: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig, passed through by their own names."""

    @field_validator("transformer_config")
    @classmethod
    def _known_and_free(cls, given: dict[str, Any]) -> dict[str, Any]:
        faults = [
            f"transformer_config.{name} is not passed through: {OWNED[name]}"
            for name in given
            if name in OWNED
        ]
        known = transformer_config_fields()
        for name in given if known else ():
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known - OWNED.keys()), n=3, cutoff=0.6)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                faults.append(f"transformer_config.{name} is no field of Megatron's TransformerConfig{hint}")
        if faults:
            raise ValueError("; ".join(faults))
        return given

    @model_validator(mode="after")
    def _losses_fit(self) -> "MegatronSettings":
        if self.recompute_layers > 1 and self.recompute != "full":
            raise ValueError(
                f"recompute_layers = {self.recompute_layers} with recompute = {self.recompute}: layers are "
                "recomputed together by recompute=full only; set it, or leave recompute_layers out"
            )
        return self


@functools.cache
def transformer_config_fields() -> frozenset[str]:
    """Names of the fields of the installed Megatron's TransformerConfig; empty where it is not installed.

    Read from its source: importing megatron-core takes seconds and asks for a GPU, which a machine that only
    checks a configuration has not.
    """
    try:
        files = metadata.files("megatron-core") or []
    except metadata.PackageNotFoundError:
        return frozenset()
    wanted = {"transformer_config.py": "TransformerConfig", "model_parallel_config.py": "ModelParallelConfig"}
    found: set[str] = set()
    for file in files:
        name = wanted.get(file.name)
        if name is None:
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                found |= {
                    entry.target.id
                    for entry in node.body
                    if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
                }
    return frozenset(found)
