"""Which parts of a run can do what a model's config.json asks for, told without building any of them."""

import importlib.util
from collections.abc import Iterator

from relax.backends.inference.sglang.pictures import FAMILIES as PICTURED
from relax.backends.models import WHOLE_OMNI
from relax.backends.train.megatron.families import FAMILIES
from relax.backends.train.omni import MODEL_TYPE as OMNI
from relax.backends.train.vision import MODEL_TYPE as SEEN
from relax.config import RunConfig
from relax.config.freeze import PARTS
from relax.orchestration.model_shape import ModelShape

WHOLE = ("qwen2_5_omni",)
"""Folders of a thinker with a talker that are not read as their thinker, as those in WHOLE_OMNI are."""

HEARD = (OMNI, *sorted(WHOLE_OMNI))
"""Models that trainers show images and video, and play sound."""

SHOWN = (*PICTURED, *HEARD)
"""Models that SGLang is given what a run's processor made for."""


def unsuitable(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """What cannot work of a model with a backend, an engine and a split: the key, the value, the way out."""
    yield from _trainer(config, shape)
    yield from _engine(config, shape)
    yield from _context(config, shape)


def missized(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Of that, what is about sizes alone: a split that does not divide, a context that is too short, a part
    to be frozen that there is not.
    """
    yield from _frozen(config, shape)
    if config.actor.backend == "megatron" and shape.kind in FAMILIES:
        yield from _megatron_split(config, shape)
    if config.rollout.engine == "sglang":
        yield from _sglang_split(config, shape)
    yield from _context(config, shape)


def _trainer(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    actor, model = config.actor, f"model.path = {config.model.path!r} ({shape.kind})"
    if actor.backend == "megatron":
        if shape.kind not in FAMILIES:
            if _bridged():
                return
            yield (
                f"actor.backend = megatron with {model}: it maps {', '.join(sorted(FAMILIES))}, and others "
                f"where megatron-bridge is installed, which it is not here; use actor.backend=torch_native "
                f"for a family that transformers has as a causal language model"
            )
            return
        yield from _megatron_split(config, shape)
    elif actor.backend == "torch_native":
        if shape.kind in WHOLE:
            yield (
                f"actor.backend = torch_native with {model}: it is no causal language model, but a thinker "
                f"and a talker; of such folders it reads {', '.join(sorted(WHOLE_OMNI))}, as its thinker"
            )
        elif (shape.sees or shape.hears) and shape.kind not in (SEEN, *HEARD) and not config.model.text_only:
            yield (
                f"actor.backend = torch_native with {model}: of the models that see or hear it trains "
                f"{', '.join((SEEN, *HEARD))} on that; take one of those, or set model.text_only=true to "
                f"train it on text"
            )


def _bridged() -> bool:
    """Whether megatron-bridge is installed; what it maps is known when it is asked, on the ranks."""
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:  # not even megatron-core
        return False


def _megatron_split(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    actor = config.actor
    cuts = [
        ("num_attention_heads", shape.heads, "tensor_parallel", actor.tensor_parallel),
        ("num_key_value_heads", shape.kv_heads, "tensor_parallel", actor.tensor_parallel),
        ("intermediate_size", shape.ffn, "tensor_parallel", actor.tensor_parallel),
        (
            "num_hidden_layers",
            shape.layers,
            "pipeline_parallel x actor.virtual_pipeline",
            actor.pipeline_parallel * actor.virtual_pipeline,
        ),
    ]
    if shape.experts:
        cuts += [
            ("num_experts", shape.experts, "expert_parallel", actor.expert_parallel),
            (
                "moe_intermediate_size",
                shape.moe_ffn,
                "expert_tensor_parallel",
                actor.expert_tensor_parallel,
            ),
        ]
        if actor.tensor_parallel > 1 and not actor.megatron.sequence_parallel:
            yield (
                f"actor.tensor_parallel = {actor.tensor_parallel} with a mixture of experts: Megatron trains "
                f"that with sequence parallelism only; set actor.megatron.sequence_parallel=true"
            )
    elif actor.expert_parallel * actor.expert_tensor_parallel > 1:
        yield (
            f"actor.expert_parallel = {actor.expert_parallel} and actor.expert_tensor_parallel = "
            f"{actor.expert_tensor_parallel} with a model that has no experts; leave them at 1"
        )
    for name, length, key, size in cuts:
        if length % size:
            yield f"actor.{key} = {size} does not divide the model's {name} of {length}; choose a divisor"


def _engine(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    rollout, model = config.rollout, f"model.path = {config.model.path!r} ({shape.kind})"
    reads = config.model.text_only
    if rollout.engine == "transformers" and (
        (shape.hears and not reads and shape.kind not in HEARD) or shape.kind in WHOLE
    ):
        yield (
            f"rollout.engine = transformers with {model}: of the models that hear it plays sound to "
            f"{', '.join(HEARD)}; take one of those, or a thinker alone with model.text_only=true"
        )
    if rollout.engine != "sglang":
        return
    if (shape.hears or (shape.sees and not reads)) and shape.kind not in SHOWN:
        yield (
            f"rollout.engine = sglang with {model}, which sees or hears: a server is shown what the run's "
            f"processor made, and that is written for {', '.join(SHOWN)}; use rollout.engine=transformers"
        )
    yield from _sglang_split(config, shape)


def _sglang_split(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    rollout = config.rollout
    ranks, heads = rollout.sglang.tensor_parallel, shape.kv_heads
    if shape.heads % ranks:
        yield (
            f"rollout.sglang.tensor_parallel = {ranks} does not divide the model's num_attention_heads of "
            f"{shape.heads}; choose a divisor"
        )
    if heads % ranks and ranks % heads:
        yield (
            f"rollout.sglang.tensor_parallel = {ranks} and the model's num_key_value_heads of {heads}: one "
            f"has to divide the other; choose a divisor or a multiple"
        )
    if shape.experts and shape.experts % rollout.sglang.expert_parallel:
        yield (
            f"rollout.sglang.expert_parallel = {rollout.sglang.expert_parallel} does not divide the model's "
            f"num_experts of {shape.experts}; choose a divisor"
        )


def _frozen(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    parts = {
        "language": True,
        "vision": shape.sees,
        "audio": shape.hears,
        "projector": shape.sees or shape.hears,
    }
    there = ", ".join(part for part in PARTS if parts[part])
    for part in config.actor.freeze:
        if not parts[part]:
            yield f"actor.freeze names {part!r}, and the model ({shape.kind}) has {there} only; leave it out"


def _context(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    asked = config.model.context_length
    if asked is not None and asked > shape.context:
        yield (
            f"model.context_length = {asked} is more than the {shape.context} tokens of the model; lower it "
            f"or leave it out"
        )
    if config.rollout.max_new_tokens >= min(asked or shape.context, shape.context):
        yield (
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt in the "
            f"model's context of {shape.context} tokens"
        )
