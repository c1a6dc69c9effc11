"""A checkpoint of the megatron backend as a Hugging Face folder, in one process, without Megatron or a GPU.

A `torch_dist` checkpoint names whole tensors, however they were split when it was written. They are read one
by one and written file by file: neither the model nor the optimizer is ever in memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dcs.layout import MegatronShape, Piece, TensorSpec, megatron_layout, whole
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from relax.backends.model_files import ModelFolderError
from relax.backends.models import load_config, text_config
from relax.backends.train.errors import StateCorruptError, StateMismatchError, StateMissingError
from relax.backends.train.export import export_folder
from relax.backends.train.megatron.experts import stored
from relax.backends.train.megatron.families import FAMILIES, Family
from relax.backends.train.megatron.files import FILE_BYTES, describe, file_names, files_of
from relax.backends.train.megatron.sources import weights_of


@dataclass(frozen=True)
class Target:
    """A Hugging Face tensor, and the boxes of one Megatron tensor that it is put together from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: TensorSpec
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def convert(source: Path, target: Path, origin: Path, limit: int = FILE_BYTES) -> list[str]:
    """Write `target` from the checkpoint `source`; config and tokenizer come from the folder `origin`.

    Returns the names of the files with weights.

    Raises:
        StateMissingError: `source` is no `torch_dist` checkpoint, or `origin` no model folder.
        StateMismatchError: the checkpoint lacks a tensor of the model, or has it in another shape.
        StateCorruptError: a file of the checkpoint cannot be read.
        ExportError: the target holds something.
    """
    try:
        config = load_config(origin)
    except ModelFolderError as error:
        raise StateMissingError(str(error)) from error
    reader = _Reader(source)
    family, shape = _mapping(config)
    dtype = reader.dtype("embedding.word_embeddings.weight")
    targets = sorted(_targets(family, shape, dtype, reader), key=lambda found: found.spec.name)
    units = stored(targets, weights_of(origin), fused=family.fused_experts)
    # In the order of the checkpoint's tensors, of which the last one read is kept.
    files = files_of(sorted(units, key=lambda unit: unit.members[0].spec.name), limit)
    names = file_names(len(files))
    with export_folder(source=origin, target=target) as scratch:
        for name, contents in zip(names, files, strict=True):
            made = {
                unit.name: unit.assembled([_assembled(part, reader) for part in unit.members])
                for unit in contents
            }
            save_file(made, scratch / name, {"format": "pt"})
        describe(scratch, origin, files)
    return names


def _mapping(config: Any) -> tuple[Family, MegatronShape]:
    """Of a model's config: its family, and the sizes of its decoder."""
    text = text_config(config)
    family = FAMILIES.get(text.model_type)
    if family is None:
        raise StateMismatchError(
            f"model type {text.model_type!r} is none whose checkpoints can be converted "
            f"({', '.join(sorted(FAMILIES))}); export it with the ranks that trained it"
        )
    # Of a model with several towers the whole config says whether the output layer is the embedding.
    tied = bool(getattr(config, "tie_word_embeddings", False))
    return family, family.shape(text.to_dict() | {"tie_word_embeddings": tied})


def _targets(family: Family, shape: MegatronShape, dtype: torch.dtype, reader: "_Reader") -> Iterator[Target]:
    for name, size in reader.encoders():
        source = family.encoder_named(name)
        if source is not None:
            pieces = whole(source, size)
            spec = TensorSpec(name, size, str(dtype).removeprefix("torch."), pieces)
            yield Target(source, size, dtype, spec, pieces)
    layout = megatron_layout(shape, dtype, vocab_divisor=1, experts="grouped", transformer_engine=True)
    for spec in layout.tensors:
        by_source: dict[str, list[Piece]] = {}
        for piece in spec.pieces:
            if piece.size:
                by_source.setdefault(piece.source, []).append(piece)
        for source, pieces in by_source.items():
            yield Target(family.named(source), pieces[0].shape, dtype, spec, tuple(pieces))


def _assembled(target: Target, reader: "_Reader") -> Tensor:
    whole = reader.tensor(target.spec)
    made = torch.empty(target.shape, dtype=target.dtype)
    for piece in target.pieces:
        made[_box(piece.start, piece.extent)] = whole[_box(piece.at, piece.own_extent)]
    return made


def _box(start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(start, extent, strict=True))


class _Reader:
    """Whole tensors of a checkpoint by Megatron's names; the last one read is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / ".metadata").is_file():
            raise StateMissingError(f"{folder} is no torch_dist checkpoint: it has no .metadata")
        self._files = FileSystemReader(folder)
        self._known: Mapping[str, object] = self._files.read_metadata().state_dict_metadata
        self._last: tuple[str, Tensor] | None = None

    def dtype(self, key: str) -> torch.dtype:
        return self._described(key).properties.dtype

    def encoders(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of an encoder; those are whole in a checkpoint."""
        for name in self._known:
            if name.startswith("encoders."):
                yield name, tuple(self._described(name).size)

    def tensor(self, spec: TensorSpec) -> Tensor:
        """The tensor of one layer and one expert, in the shape that the spec says, padding cut off."""
        key, place = self._find(spec.name)
        found = self._read(key)
        for index in place:
            found = found[index]
        if found.ndim != len(spec.shape) or any(
            have < want for have, want in zip(found.shape, spec.shape, strict=True)
        ):
            raise StateMismatchError(
                f"checkpoint {self._folder} has {key} as {list(found.shape)}, the model has "
                f"{list(spec.shape)}; is this the folder the model came from?"
            )
        return found

    def _find(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The checkpoint's own name of a parameter, and which entry of a stack it is."""
        for candidate, place in _names(name):
            if candidate in self._known:
                return candidate, place
        raise StateMismatchError(f"checkpoint {self._folder} lacks {name}; is it of this model?")

    def _read(self, key: str) -> Tensor:
        if self._last is None or self._last[0] != key:
            described = self._described(key)
            room = torch.empty(described.size, dtype=described.properties.dtype)
            try:
                load({key: room}, storage_reader=FileSystemReader(self._folder), no_dist=True)
            except (CheckpointException, OSError, EOFError, RuntimeError) as error:
                raise StateCorruptError(
                    f"checkpoint {self._folder}: {key} cannot be read: {error}"
                ) from error
            self._last = (key, room)
        return self._last[1]

    def _described(self, key: str) -> TensorStorageMetadata:
        found = self._known.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise StateMismatchError(f"checkpoint {self._folder} has no tensor {key}; is it of a GPT model?")
        return found


def _names(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names under which Megatron's checkpoints hold a parameter: each layer on its own, or all in a stack."""
    parts = name.split(".")
    expert: tuple[int, ...] = ()
    for kind in ("linear_fc1", "linear_fc2"):
        if kind in parts and parts[-1].removeprefix("weight").isdigit():
            expert = (int(parts[-1].removeprefix("weight")),)
            parts = [*parts[: parts.index("experts")], "experts", "experts", kind, "weight"]
    spellings = [parts]
    if parts[-2:] == ["pre_mlp_layernorm", "weight"]:
        # The local spec's norm before experts is kept under the name of a fused dense one.
        spellings.append([*parts[:-2], "mlp", "linear_fc1", "layer_norm_weight"])
    for spelling in spellings:
        yield ".".join(spelling), expert
        if spelling[:2] == ["decoder", "layers"]:
            yield ".".join([*spelling[:2], *spelling[3:]]), (int(spelling[2]), *expert)
