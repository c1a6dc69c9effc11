"""Which boxes of Hugging Face tensors a rank's parameters are, and filling them from a model folder.

One mechanism serves loading, publishing and exporting: `dcs.layout` describes each parameter as boxes of
global tensors, so that a rank reads and sends only what it holds.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from dcs.layout import Layout, MegatronShape, Piece, TensorSpec, megatron_layout, whole
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from relax.backends.models import build_model, has_weights
from relax.backends.train.errors import UntrainableModelError
from relax.backends.train.megatron.build import Blueprint
from relax.backends.train.megatron.value_head import HF_NAME

__all__ = ["Source", "fill", "local_names", "open_source", "rank_layout", "sources_of"]


class Source(Protocol):
    """Hugging Face tensors, readable in boxes."""

    def __contains__(self, name: str) -> bool: ...

    def box(self, name: str, start: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        """A copy, or a view that is not written to, of one box of a tensor."""
        ...


class FolderSource:
    """The safetensors of a folder; only the bytes of a box are read."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        self._folder = folder
        self._open: dict[str, safe_open] = {}
        if index.is_file():
            self._files: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            file = "model.safetensors"
            self._files = dict.fromkeys(self._file(file).keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def box(self, name: str, start: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        part = self._file(self._files[name]).get_slice(name)
        return part[tuple(slice(first, first + length) for first, length in zip(start, extent, strict=True))]

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            path = self._folder / name
            try:
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise UntrainableModelError(f"{path} cannot be read: {error}") from error
        return self._open[name]


class MemorySource:
    """Tensors of a model in memory: for folders without weights, whose model is drawn from a seed."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def box(self, name: str, start: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        part = self._tensors[name]
        for dimension, (first, length) in enumerate(zip(start, extent, strict=True)):
            part = part.narrow(dimension, first, length)
        return part


def open_source(folder: Path, *, seed: int) -> Source:
    """The weights of a folder. One without any is drawn from `seed`, whole, as all backends and engines do:
    that is meant for the tiny models of tests and demos.
    """
    if has_weights(folder):
        return FolderSource(folder)
    model = build_model(folder, seed=seed)
    return MemorySource({name: tensor.detach() for name, tensor in model.state_dict().items()})


def rank_layout(plan: Blueprint) -> Layout:
    """The layout of this rank's parameters, by the names `local_names` gives them."""
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
    name, start, extent = piece.source, piece.start, piece.extent
    if name not in source:
        name, start, extent = _among_fused(piece)
    if name not in source:
        raise UntrainableModelError(f"the model folder's safetensors lack {piece.source!r}")
    try:
        found = source.box(name, start, extent)
    except (SafetensorError, IndexError, RuntimeError) as error:
        raise UntrainableModelError(
            f"tensor {name!r} of the model folder does not have the shape that config.json says "
            f"({list(piece.shape)}): {error}"
        ) from error
    if tuple(found.shape) != tuple(extent):
        raise UntrainableModelError(
            f"tensor {name!r} of the model folder does not have the shape that config.json says "
            f"({list(piece.shape)})"
        )
    return found


def _among_fused(piece: Piece) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Where an expert's box lies when all experts of a layer are one tensor, as transformers holds them."""
    head, found, rest = piece.source.partition(".experts.")
    expert, _, kind = rest.partition(".")
    if not found or not expert.isdigit():
        return piece.source, piece.start, piece.extent
    row = piece.start[0] + (piece.shape[0] if kind == "up_proj.weight" else 0)
    fused = "down_proj" if kind == "down_proj.weight" else "gate_up_proj"
    return f"{head}.experts.{fused}", (int(expert), row, *piece.start[1:]), (1, *piece.extent)
