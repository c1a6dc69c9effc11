"""Tensors of a model folder, readable in boxes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax.backends.models import build_model, has_weights
from relax.backends.train.errors import UntrainableModelError


class Source(Protocol):
    """Hugging Face tensors, readable in boxes."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that there is."""
        ...

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

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(self._files[name]).get_slice(name).get_shape())

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
        return FolderSource(folder)
    model = build_model(folder, seed=seed)
    return MemorySource({name: tensor.detach() for name, tensor in model.state_dict().items()})


def weights_of(folder: Path) -> FolderSource | None:
    """The safetensors of a folder; None where it has none."""
    return FolderSource(folder) if has_weights(folder) else None
