"""The sizes of a decoder-only transformer, and its tensors by their Hugging Face names: the global tensors
of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dcs.layout.pieces import Shape

# What a `model_type` says beside its sizes: (norms of q and k, biases of q, k and v).
_FAMILIES = {
    "llama": (False, False),
    "qwen2": (False, True),
    "qwen2_moe": (False, True),
    "qwen3": (True, False),
    "qwen3_moe": (True, False),
}


@dataclass(frozen=True)
class MegatronShape:
    """A GPT as Megatron-Core and the Llama and Qwen families of Hugging Face build it.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream.
        ffn: width of a dense layer's gated MLP; also read for `dense_layers` of a mixture of experts.
        heads, kv_groups, head_dim: query heads, heads of keys and values, and the width of one.
        vocab: rows of the embedding, without padding.
        experts: in a mixture-of-experts layer; 0 for a dense model.
        moe_ffn: width of one expert.
        shared_ffn: width of the shared expert; 0 for none.
        shared_gate: whether the shared expert has a gate of its own (Qwen2-MoE).
        dense_layers: layers (from 0) of a mixture of experts that have a dense MLP.
        tied_embeddings: the output layer is the embedding; there is then no `lm_head.weight`.
        qk_layernorm: norms of q and k, of width `head_dim`.
        qkv_bias: biases of q, k and v.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_groups: int
    head_dim: int
    vocab: int
    experts: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    tied_embeddings: bool = False
    qk_layernorm: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.kv_groups < 1 or self.heads % self.kv_groups:
            raise ValueError(f"{self.heads} heads over {self.kv_groups} KV groups: expected a multiple")
        if self.experts and not self.moe_ffn:
            raise ValueError(f"{self.experts} experts of width 0; moe_ffn is the width of one")

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> MegatronShape:
        """The shape that a `config.json` describes (`config.to_dict()`): llama, qwen2, qwen3 and their MoE
        kin.

        Raises `ValueError` for another `model_type`, and for what these families can be configured to that
        dcs has no names for (biases of the MLP or of o_proj).
        """
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise ValueError(
                f"model_type {family!r}; known are {', '.join(_FAMILIES)}: make a MegatronShape by hand, or "
                "give pieces with dcs.layout.of(..., pieces=...)"
            )
        qk_layernorm, qkv_bias = _FAMILIES[family]
        for name in ("mlp_bias", "attention_bias"):
            if config.get(name):
                raise ValueError(f"{name} is set: dcs has no names for the biases of this {family} model")
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        layers = config["num_hidden_layers"]
        step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
        dense |= {index for index in range(layers) if (index + 1) % step}
        shared = (config.get("shared_expert_intermediate_size") or 0) if family == "qwen2_moe" else 0
        return cls(
            layers=layers,
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=heads,
            kv_groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            experts=experts,
            moe_ffn=config.get("moe_intermediate_size") or 0 if experts else 0,
            shared_ffn=shared,
            shared_gate=bool(shared),
            dense_layers=tuple(sorted(dense)) if experts else (),
            tied_embeddings=bool(config.get("tie_word_embeddings")),
            qk_layernorm=qk_layernorm,
            qkv_bias=qkv_bias,
        )

    @property
    def output_name(self) -> str:
        """The global tensor that the output layer is."""
        return "model.embed_tokens.weight" if self.tied_embeddings else "lm_head.weight"

    def is_moe(self, layer: int) -> bool:
        """Whether a layer (from 0) has experts."""
        return bool(self.experts) and layer not in self.dense_layers

    def tensors(self) -> dict[str, Shape]:
        """Every global tensor: its Hugging Face name and its shape."""
        found = dict(self._outside())
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            found |= {prefix + name: shape for name, shape in self._attention()}
            found |= {prefix + name: shape for name, shape in self._mlp(layer)}
        return found

    def _outside(self) -> Iterator[tuple[str, Shape]]:
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied_embeddings:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def _attention(self) -> Iterator[tuple[str, Shape]]:
        yield "input_layernorm.weight", (self.hidden,)
        yield "post_attention_layernorm.weight", (self.hidden,)
        for name, heads in (("q", self.heads), ("k", self.kv_groups), ("v", self.kv_groups)):
            yield f"self_attn.{name}_proj.weight", (heads * self.head_dim, self.hidden)
            if self.qkv_bias:
                yield f"self_attn.{name}_proj.bias", (heads * self.head_dim,)
        yield "self_attn.o_proj.weight", (self.hidden, self.heads * self.head_dim)
        if self.qk_layernorm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)

    def _mlp(self, layer: int) -> Iterator[tuple[str, Shape]]:
        widths = {"mlp": self.ffn}
        if self.is_moe(layer):
            yield "mlp.gate.weight", (self.experts, self.hidden)
            widths = {f"mlp.experts.{expert}": self.moe_ffn for expert in range(self.experts)}
            if self.shared_ffn:
                widths["mlp.shared_expert"] = self.shared_ffn
            if self.shared_gate:
                yield "mlp.shared_expert_gate.weight", (1, self.hidden)
        for name, width in widths.items():
            yield f"{name}.gate_proj.weight", (width, self.hidden)
            yield f"{name}.up_proj.weight", (width, self.hidden)
            yield f"{name}.down_proj.weight", (self.hidden, width)
