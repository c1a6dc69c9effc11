"""From a Hugging Face config and settings to Megatron's: TransformerConfig, layer spec, model chunks."""

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn import functional

from relax.backends.train.errors import SettingsError, UntrainableModelError
from relax.backends.train.megatron.attention import PackedAttention
from relax.backends.train.megatron.families import FAMILIES, Family
from relax.backends.train.megatron.media import DeepstackLayer, MediaModel, MediaSpec
from relax.backends.train.megatron.norm import RMSNorm
from relax.backends.train.megatron.padding_token import keep_untrained
from relax.backends.train.megatron.rotary import PackedRotary, inverse_frequencies
from relax.backends.train.megatron.value_head import ValueHead
from relax.config.freeze import Part
from relax.config.megatron import MegatronSettings
from relax.config.parallel import ParallelSettings


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What a rank's part of the model is built from.

    Attributes:
        hf: the text config of the model folder.
        family: how it is mapped.
        config: Megatron's.
        transformer_engine: whether layers are Transformer Engine's; sequences then are packed as thd.
        padded_vocabulary: rows of the embedding over all tensor ranks.
        tied: the output layer is the embedding.
        critic: one value a token instead of logits.
        media: how it takes media; None for a model of text alone.
        share_encoding: ranks of a stage share the images of a micro-batch.
        freeze: parts of the model that are left as they are.
    """

    hf: Any
    family: Family
    config: TransformerConfig
    transformer_engine: bool
    padded_vocabulary: int
    tied: bool
    critic: bool
    media: MediaSpec | None = None
    share_encoding: bool = True
    freeze: tuple[Part, ...] = ()


def family_of(config: Any) -> Family:
    """The family that maps a Hugging Face config.

    Raises:
        UntrainableModelError: none of ours does.
    """
    found = FAMILIES.get(config.model_type)
    if found is None:
        raise UntrainableModelError(
            f"model type {config.model_type!r} is none that the megatron backend maps itself "
            f"({', '.join(sorted(FAMILIES))}); use actor.backend=torch_native"
        )
    return found


def blueprint(
    hf: Any,
    *,
    whole: Any = None,
    parallel: ParallelSettings,
    settings: MegatronSettings,
    dtype: torch.dtype,
    device: torch.device,
    critic: bool = False,
    replay: bool = False,
) -> Blueprint:
    """Settle everything that a rank's part of the model depends on.

    Args:
        hf: the text config of the model folder.
        whole: its config, of which `hf` may be a part; None where it is all.
        parallel: the split.
        settings: of the backend.
        dtype: float32, or bfloat16 with float32 masters in the optimizer.
        device: of this rank.
        critic: build a value head instead of the output layer.
        replay: let batches bring the routes of their tokens.

    Raises:
        UntrainableModelError: a family, or an option of one, that the backend does not build.
        SettingsError: a split that the model's sizes do not allow, or settings that Megatron refuses.
    """
    family = family_of(hf)
    whole = hf if whole is None else whole
    # Of a model with several towers the whole config says whether the output layer is the embedding.
    hf.tie_word_embeddings = bool(getattr(whole, "tie_word_embeddings", False))
    text = hf.to_dict()
    media = None if family.media is None else family.media(whole)
    if media is not None:
        _require_room(media, parallel, family.shape(text).layers)
    engine = uses_transformer_engine(settings, device)
    _require_fitting(family, text, parallel, settings)
    multiple = settings.vocabulary_divisor * parallel.tensor_parallel
    wanted = {
        **_model_fields(hf, family, text),
        **parallel_fields(parallel, settings),
        **precision_fields(dtype, device),
        **mixture_fields(bool(family.shape(text).experts), settings, engine, replay),
        **settings.transformer_config,
    }
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    unknown = sorted(wanted.keys() - known)
    if unknown:
        raise SettingsError(f"the installed megatron-core has no TransformerConfig.{unknown[0]}")
    try:
        config = TransformerConfig(**wanted)
    except (AssertionError, ValueError, TypeError) as error:
        raise SettingsError(f"megatron-core refuses this configuration: {error}") from error
    return Blueprint(
        hf=hf,
        family=family,
        config=config,
        transformer_engine=engine,
        padded_vocabulary=-(-hf.vocab_size // multiple) * multiple,
        tied=hf.tie_word_embeddings and not critic,
        critic=critic,
        media=media,
        share_encoding=settings.share_encoding,
    )


def chunks(plan: Blueprint) -> list[GPTModel]:
    """This rank's parts of the model, one a virtual stage, their weights not yet filled."""
    stages = plan.config.virtual_pipeline_model_parallel_size or 1
    frequencies = inverse_frequencies(plan.hf)
    built = []
    for stage in range(stages):
        virtual = stage if stages > 1 else None
        first, last = (
            known(ignore_virtual=False, vp_stage=virtual)
            for known in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        )
        spec = layer_spec(plan, virtual)
        model = _model(
            plan,
            virtual,
            config=plan.config,
            transformer_layer_spec=cast("Any", spec),
            vocab_size=plan.padded_vocabulary,
            max_sequence_length=plan.hf.max_position_embeddings,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=plan.tied,
            # The kind whose rotary embedding is told the positions; ours takes its place below.
            position_embedding_type="mrope",
            vp_stage=virtual,
        )
        padding = getattr(plan.hf, "pad_token_id", None)
        if first and padding is not None:
            keep_untrained(model.embedding.word_embeddings, padding)
        section = plan.media.section if plan.media is not None else None
        model.rotary_pos_emb = PackedRotary(frequencies.to(_device(model)), section)
        if last and plan.critic:
            model.output_layer = ValueHead(plan.config).to(_device(model))
        built.append(model.train())
    return built


def _model(plan: Blueprint, virtual: int | None, **arguments: Any) -> Any:
    if plan.media is None:
        return GPTModel(**arguments)
    first = get_transformer_layer_offset(
        plan.config, virtual, parallel_state.get_pipeline_model_parallel_rank()
    )
    return MediaModel(
        plan.media,
        first_layer=first,
        shared=plan.share_encoding,
        recompute=plan.config.recompute_granularity == "full",
        **arguments,
    )


def _device(model: GPTModel) -> torch.device:
    return next(model.parameters()).device


def layer_spec(plan: Blueprint, virtual: int | None) -> TransformerBlockSubmodules:
    """The layers of a stage: Transformer Engine's, or Megatron's own with attention and norms of ours."""
    spec = get_gpt_decoder_block_spec(
        plan.config, plan.transformer_engine, normalization="RMSNorm", vp_stage=virtual
    )
    if plan.media is not None:
        layers = [dataclasses.replace(layer, module=DeepstackLayer) for layer in spec.layer_specs or []]
        spec = dataclasses.replace(spec, layer_specs=layers)
    if plan.transformer_engine:
        return spec
    return dataclasses.replace(
        spec, layer_specs=[_with_our_modules(layer) for layer in spec.layer_specs or []], layer_norm=RMSNorm
    )


def _with_our_modules(layer: Any) -> Any:
    attention = layer.submodules.self_attention
    inner = dataclasses.replace(attention.submodules, core_attention=PackedAttention)
    if inner.q_layernorm is not IdentityOp:
        inner = dataclasses.replace(inner, q_layernorm=RMSNorm, k_layernorm=RMSNorm)
    submodules = dataclasses.replace(
        layer.submodules,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=dataclasses.replace(attention, submodules=inner),
    )
    return dataclasses.replace(layer, submodules=submodules)


def uses_transformer_engine(settings: MegatronSettings, device: torch.device) -> bool:
    """Whether layers are Transformer Engine's: where it is, or where the settings ask for it."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    if settings.transformer_engine is None:
        return installed and device.type == "cuda"
    if settings.transformer_engine and not (installed and device.type == "cuda"):
        lacking = "is not installed here" if not installed else f"needs a GPU, the device is {device}"
        raise SettingsError(
            f"actor.megatron.transformer_engine = true, but Transformer Engine {lacking}; leave the setting "
            "out to use it where it is"
        )
    return settings.transformer_engine


def _require_room(media: MediaSpec, parallel: ParallelSettings, layers: int) -> None:
    """Features for the first layers travel on to the next stage, but not on an interleaved schedule: there
    all stages are told one length for all they send.
    """
    own = layers // (parallel.pipeline_parallel * parallel.virtual_pipeline)
    if parallel.virtual_pipeline > 1 and own < media.deep:
        raise SettingsError(
            f"actor.virtual_pipeline = {parallel.virtual_pipeline} leaves {own} layers to a stage, but this "
            f"model adds features of its images after the first {media.deep}, which have to be in the first "
            "stage of an interleaved schedule; lower actor.virtual_pipeline or actor.pipeline_parallel"
        )


def _require_fitting(
    family: Family, text: Mapping[str, Any], parallel: ParallelSettings, settings: MegatronSettings
) -> None:
    shape, tensor = family.shape(text), parallel.tensor_parallel
    require_divisible(
        {
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_groups,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.layers,
            "num_experts": shape.experts,
            "moe_intermediate_size": shape.moe_ffn if shape.experts else None,
        },
        parallel,
    )
    if shape.experts:
        if tensor > 1 and not settings.sequence_parallel:
            raise SettingsError(
                f"actor.tensor_parallel = {tensor} with a mixture of experts: Megatron trains that with "
                "sequence parallelism only; set actor.megatron.sequence_parallel=true"
            )
    elif parallel.expert_parallel * parallel.expert_tensor_parallel > 1:
        raise SettingsError(
            f"actor.expert_parallel = {parallel.expert_parallel} and actor.expert_tensor_parallel = "
            f"{parallel.expert_tensor_parallel} with a model that has no experts; leave them at 1"
        )


def require_divisible(sizes: Mapping[str, int | None], parallel: ParallelSettings) -> None:
    """See that a split divides what it cuts of a model.

    Args:
        sizes: by the name in config.json; None for what the model has not.
        parallel: the split.

    Raises:
        SettingsError: it does not.
    """
    stages = parallel.pipeline_parallel * parallel.virtual_pipeline
    cuts = {
        "num_attention_heads": ("tensor_parallel", parallel.tensor_parallel),
        "num_key_value_heads": ("tensor_parallel", parallel.tensor_parallel),
        "intermediate_size": ("tensor_parallel", parallel.tensor_parallel),
        "num_hidden_layers": ("pipeline_parallel x actor.virtual_pipeline", stages),
        "num_experts": ("expert_parallel", parallel.expert_parallel),
        "moe_intermediate_size": ("expert_tensor_parallel", parallel.expert_tensor_parallel),
    }
    for name, (key, size) in cuts.items():
        if (length := sizes.get(name)) and length % size:
            raise SettingsError(
                f"the model's {name} is {length}, which actor.{key} = {size} does not divide; take a divisor"
            )


def _model_fields(hf: Any, family: Family, text: Mapping[str, Any]) -> dict[str, Any]:
    shape = family.shape(text)
    half = shape.head_dim // 2
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_groups,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "mrope_section": [half, 0, 0],
        **family.fields(text),
    }


def parallel_fields(parallel: ParallelSettings, settings: MegatronSettings) -> dict[str, Any]:
    """What a split says."""
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor_parallel,
        "pipeline_model_parallel_size": parallel.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": (
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        "context_parallel_size": parallel.context_parallel,
        "expert_model_parallel_size": parallel.expert_parallel,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel,
        # Megatron refuses it for one rank, where it would change nothing.
        "sequence_parallel": settings.sequence_parallel and parallel.tensor_parallel > 1,
        # Micro-batches are cut by tokens, so each has its own length, and tells it from stage to stage. An
        # interleaved schedule of two ranks would mix up what they tell each other: there they are padded.
        "variable_seq_lengths": parallel.pipeline_parallel > 1 and parallel.virtual_pipeline == 1,
        "overlap_p2p_comm": parallel.virtual_pipeline > 1,
        "batch_p2p_comm": parallel.virtual_pipeline == 1,
        # Sums, never means: see `optimizer.py`.
        "calculate_per_token_loss": True,
    }
    if settings.recompute != "none":
        fields["recompute_granularity"] = settings.recompute
    if settings.recompute == "full":
        fields |= {"recompute_method": "uniform", "recompute_num_layers": settings.recompute_layers}
    return fields


def precision_fields(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What a dtype and a device say."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise SettingsError(f"dtype {dtype} cannot be trained by megatron; use float32 or bfloat16")
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,
    }


def mixture_fields(experts: bool, settings: MegatronSettings, engine: bool, replay: bool) -> dict[str, Any]:
    """What settings say of a mixture of experts; of a model without, what Megatron asks all the same."""
    if not experts:
        for name in ("aux_loss", "z_loss"):
            if getattr(settings, name):
                raise SettingsError(
                    f"actor.megatron.{name} = {getattr(settings, name)} with a model that has no experts; "
                    "leave it out"
                )
        # Only so that Megatron, which looks at it without experts too, allows sequences of any length.
        return {"moe_token_dispatcher_type": "alltoall"}
    return {
        "moe_token_dispatcher_type": settings.token_dispatcher,
        "moe_router_load_balancing_type": settings.aux_loss_kind if settings.aux_loss else "none",
        "moe_aux_loss_coeff": settings.aux_loss,
        "moe_z_loss_coeff": settings.z_loss,
        "moe_grouped_gemm": engine,
        "moe_enable_routing_replay": replay,
    }
