"""Which boxes of Hugging Face tensors a rank's parameters are, and filling them from a model folder.

One mechanism serves loading, publishing and exporting: `dcs.layout` describes each parameter as boxes of
global tensors, so that a rank reads and sends only what it holds.
"""

from collections.abc import Iterable, Mapping

import msgspec
import torch
from dcs.layout import Layout, MegatronShape, Piece, TensorSpec, megatron_layout, whole
from megatron.core import parallel_state
from safetensors import SafetensorError
from torch import Tensor, nn

from relax.backends.train.errors import UntrainableModelError
from relax.backends.train.megatron.build import Blueprint
from relax.backends.train.megatron.experts import stored_box
from relax.backends.train.megatron.sources import Source, open_source
from relax.backends.train.megatron.value_head import HF_NAME

__all__ = ["Source", "fill", "local_names", "open_source", "rank_layout", "sources_of"]


def rank_layout(plan: Blueprint, named: Mapping[str, Tensor]) -> Layout:
    """The layout of this rank's parameters `named`, as `local_names` gives them."""
    config = plan.config
    shape: MegatronShape = plan.family.shape(plan.hf.to_dict())
    layout = megatron_layout(
        shape,
        config.params_dtype,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=config.tensor_model_parallel_size,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=config.pipeline_model_parallel_size,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=config.expert_model_parallel_size,
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=config.expert_tensor_parallel_size,
        vpp_size=config.virtual_pipeline_model_parallel_size or 1,
        vocab_divisor=plan.padded_vocabulary // config.tensor_model_parallel_size,
        experts="grouped" if plan.transformer_engine else "sequential",
        transformer_engine=plan.transformer_engine,
    )
    decoder = [_renamed(spec, plan) for spec in layout.tensors]
    layout = Layout(tuple(sorted([*decoder, *_encoders(plan, named)], key=lambda spec: spec.name)))
    if not plan.critic:
        return layout
    head = whole(HF_NAME, (1, shape.hidden))
    return Layout(
        tuple(
            TensorSpec(spec.name, (1, shape.hidden), spec.dtype, head)
            if spec.name.endswith("output_layer.weight")
            else spec
            for spec in _with_head(layout, plan)
        )
    )


def all_names(plan: Blueprint) -> list[str]:
    """The Hugging Face names of all tensors of the model, also of those that other ranks have."""
    names = [plan.family.named(name) for name in plan.family.shape(plan.hf.to_dict()).tensors()]
    for encoder in () if plan.media is None else plan.media.encoders:
        with torch.device("meta"):
            tower: nn.Module = encoder.build(plan.config.params_dtype, False).get_submodule("tower")
        names += [plan.family.encoders[encoder.name] + name for name, _ in tower.named_parameters()]
    return names


def _renamed(spec: TensorSpec, plan: Blueprint) -> TensorSpec:
    """A decoder's tensor under the names that its family's folders have."""
    pieces = tuple(
        msgspec.structs.replace(piece, source=plan.family.named(piece.source)) for piece in spec.pieces
    )
    return TensorSpec(spec.name, spec.shape, spec.dtype, pieces)


def _encoders(plan: Blueprint, named: Mapping[str, Tensor]) -> Iterable[TensorSpec]:
    """Of every encoder all tensors, as every rank of the first stage has them."""
    dtype = str(plan.config.params_dtype).removeprefix("torch.")
    for name, tensor in named.items():
        source = plan.family.encoder_named(name)
        if source is not None:
            shape = tuple(tensor.shape)
            yield TensorSpec(name, shape, dtype, whole(source, shape))


def _with_head(layout: Layout, plan: Blueprint) -> Iterable[TensorSpec]:
    """A tied model's single stage has no output layer, but as a critic it has a head."""
    names = [spec.name for spec in layout.tensors]
    last = [
        name.removesuffix("decoder.final_layernorm.weight") for name in names if "final_layernorm" in name
    ]
    specs = list(layout.tensors)
    if last and f"{last[0]}output_layer.weight" not in names:
        specs.append(
            TensorSpec(f"{last[0]}output_layer.weight", (1, 1), str(plan.config.params_dtype).split(".")[1])
        )
    return sorted(specs, key=lambda spec: spec.name)


def local_names(chunks: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """This rank's parameters by local name; with virtual stages, of `model0.`, `model1.`, ..."""
    parts = list(chunks)
    return {
        f"model{index}.{name}" if len(parts) > 1 else name: parameter
        for index, chunk in enumerate(parts)
        for name, parameter in chunk.named_parameters()
    }


def sources_of(spec: TensorSpec) -> tuple[Piece, ...]:
    """The boxes that a tensor is made of, one that is empty left out."""
    pieces = spec.pieces or whole(spec.name, spec.shape)
    return tuple(piece for piece in pieces if piece.size)


@torch.no_grad()
def fill(parameters: Mapping[str, Tensor], layout: Layout, source: Source) -> None:
    """Write every box that the layout names from the source; padding becomes 0.

    A critic's head that the folder lacks stays at 0.

    Raises:
        UntrainableModelError: the folder lacks a tensor, or it has another shape.
    """
    for spec in layout.tensors:
        parameter = parameters[spec.name]
        if spec.name.endswith("word_embeddings.weight") or spec.name.endswith("output_layer.weight"):
            parameter.zero_()
        for piece in sources_of(spec):
            if piece.source == HF_NAME and HF_NAME not in source:
                continue
            target = parameter
            for dimension, (first, length) in enumerate(zip(piece.at, piece.own_extent, strict=True)):
                target = target.narrow(dimension, first, length)
            target.copy_(_read(source, piece).reshape(target.shape))


def _read(source: Source, piece: Piece) -> Tensor:
    """The box of a piece, in its extent."""
    place = stored_box(piece, source)
    if place.name not in source:
        raise UntrainableModelError(f"the model folder's safetensors lack {piece.source!r}")
    try:
        found = source.box(place.name, place.start, place.extent)
    except (SafetensorError, IndexError, RuntimeError) as error:
        raise UntrainableModelError(
            f"tensor {place.name!r} of the model folder does not have the shape that config.json says "
            f"({list(piece.shape)}): {error}"
        ) from error
    if tuple(found.shape) != tuple(place.extent):
        raise UntrainableModelError(
            f"tensor {place.name!r} of the model folder does not have the shape that config.json says "
            f"({list(piece.shape)})"
        )
    return found.transpose(-2, -1) if place.transposed else found
