"""Tensors of a model folder, readable in boxes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from relax.backends.models import build_model, has_weights, weights_prefix
from relax.backends.train.safetensors_folder import SafetensorsFolder


class Source(Protocol):
    """Hugging Face tensors, readable in boxes."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that there is."""
        ...

    def box(self, name: str, start: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        """A copy, or a view that is not written to, of one box of a tensor."""
        ...


class MemorySource:
    """Tensors of a model in memory: for folders without weights, whose model is drawn from a seed."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

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
        return SafetensorsFolder(folder, weights_prefix(folder))
    model = build_model(folder, seed=seed)
    return MemorySource({name: tensor.detach() for name, tensor in model.state_dict().items()})


def weights_of(folder: Path) -> SafetensorsFolder | None:
    """The safetensors of a folder; None where it has none."""
    return SafetensorsFolder(folder, weights_prefix(folder)) if has_weights(folder) else None
