"""The state of many ranks on disk: every rank's part is a safetensors file, and what each tensor is a box of.

    FOLDER/rank-00001.safetensors    the tensors that this rank owns
    FOLDER/rank-00001.json           {"schema", "rank", "world_size", "sha256", "data", "boxes": {name: box}}

A box says the shape of the global tensor and where this part starts in it, so that any split can be read by
any other, one slice at a time. Nothing in it is ever unpickled.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from relax.backends.train.base import StateTree
from relax.backends.train.errors import StateCorruptError, StateMissingError
from relax.backends.train.state_files import written

SCHEMA = 1


@dataclass(frozen=True)
class Box:
    """Where a part lies in a global tensor."""

    shape: tuple[int, ...]
    start: tuple[int, ...]


def write_part(
    folder: Path,
    rank: int,
    world_size: int,
    tensors: Mapping[str, Tensor],
    boxes: Mapping[str, Box],
    data: Mapping[str, Any],
) -> None:
    """Write one rank's part into a folder that is there; on the disk when this returns.

    Args:
        tensors: by global name; empty parts may be left out.
        boxes: of each tensor.
        data: plain JSON, the same on every rank.

    Raises:
        StateFileError: it cannot be written, as on a full disk.
    """
    with written(folder):
        file = folder / f"rank-{rank:05d}.safetensors"
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file)
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        told = {
            "schema": SCHEMA,
            "rank": rank,
            "world_size": world_size,
            "sha256": digest,
            "data": dict(data),
            "boxes": {name: {"shape": boxes[name].shape, "start": boxes[name].start} for name in tensors},
        }
        index = file.with_suffix(".json")
        index.write_text(json.dumps(told, allow_nan=False, indent=1))
        for path in (file, index, folder):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def is_sharded(folder: Path) -> bool:
    """Whether ranks have written this folder."""
    return (folder / "rank-00000.json").is_file()


class Parts:
    """What all ranks wrote into a folder.

    Args:
        folder: of `write_part`.
        rank, world_size: of who reads: each of them checks the digests of some of the files.

    Raises:
        StateMissingError: there is no such folder.
        StateCorruptError: a part is missing, damaged, or of another schema.
    """

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        if not folder.is_dir():
            raise StateMissingError(f"there is no state folder {folder}")
        self._folder = folder
        first = _index(folder, 0)
        self.world_size = int(first["world_size"])
        self.data: dict[str, Any] = first["data"]
        self._indices = [first, *(_index(folder, other) for other in range(1, self.world_size))]
        for other in range(rank, self.world_size, world_size):
            self._check(other)
        self._where: dict[str, list[tuple[int, Box]]] = {}
        for other, index in enumerate(self._indices):
            for name, box in index["boxes"].items():
                self._where.setdefault(name, []).append(
                    (other, Box(tuple(box["shape"]), tuple(box["start"])))
                )
        self._open: dict[int, Any] = {}

    def names(self) -> list[str]:
        """The global tensors there are."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a global tensor."""
        return self._where[name][0][1].shape

    def read(
        self, name: str, start: Sequence[int] | None = None, extent: Sequence[int] | None = None
    ) -> Tensor:
        """A box of a global tensor, or all of it, put together from the parts that hold it.

        Raises:
            StateCorruptError: a part of it was written by no rank.
        """
        shape = self.shape(name)
        start = tuple(start) if start is not None else (0,) * len(shape)
        extent = tuple(extent) if extent is not None else shape
        found: Tensor | None = None
        filled = 0
        for rank, box in self._where[name]:
            part = self._part(rank).get_slice(name)
            own = part.get_shape()
            first = [max(a, b) for a, b in zip(start, box.start, strict=True)]
            last = [min(a + n, b + m) for a, n, b, m in zip(start, extent, box.start, own, strict=True)]
            if any(a >= b for a, b in zip(first, last, strict=True)):
                continue
            theirs = tuple(slice(a - s, b - s) for a, b, s in zip(first, last, box.start, strict=True))
            ours = tuple(slice(a - s, b - s) for a, b, s in zip(first, last, start, strict=True))
            piece = part[theirs] if theirs else self._part(rank).get_tensor(name)
            if found is None:
                found = torch.empty(extent, dtype=piece.dtype)
            found[ours] = piece
            filled += piece.numel()
        wanted = int(torch.Size(extent).numel())
        if found is None and not wanted:
            return torch.empty(extent, dtype=self._part(self._where[name][0][0]).get_tensor(name).dtype)
        if found is None or filled < wanted:
            raise StateCorruptError(f"state {self._folder} holds {filled} of {wanted} numbers of {name!r}")
        return found

    def _part(self, rank: int) -> Any:
        if rank not in self._open:
            try:
                self._open[rank] = safe_open(self._file(rank), framework="pt")
            except (OSError, SafetensorError) as error:
                raise StateCorruptError(f"{self._file(rank)} cannot be read: {error}") from error
        return self._open[rank]

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank:05d}.safetensors"

    def _check(self, rank: int) -> None:
        file = self._file(rank)
        try:
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise StateCorruptError(f"state {self._folder} lacks {file.name}: {error}") from error
        if found != self._indices[rank]["sha256"]:
            raise StateCorruptError(
                f"{file} has sha256 {found}, which is not that in its index; one of them is damaged, take "
                f"another state"
            )


def read_whole(folder: Path) -> StateTree:
    """All of a state of many ranks, for one: every tensor whole, the random state of rank 0."""
    parts = Parts(folder)
    tensors = {name: parts.read(name) for name in parts.names() if not name.startswith("rng.")}
    tensors["rng.torch"] = parts.read("rng.0.torch")
    return StateTree(tensors, parts.data)


def _index(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank-{rank:05d}.json"
    try:
        told = json.loads(path.read_bytes())
        if told["schema"] != SCHEMA:
            raise ValueError(f"schema {told['schema']!r}, this version reads {SCHEMA}")
        return {name: told[name] for name in ("rank", "world_size", "sha256", "data", "boxes")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StateCorruptError(f"{path} cannot be read: {error}; take another state") from error
