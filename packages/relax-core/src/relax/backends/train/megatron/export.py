"""A Hugging Face folder written by all ranks together, without a whole model on any.

The tensors, in name order, are dealt to files of bounded size, and files to ranks. For each tensor in turn,
the ranks that hold boxes of it send them to the rank that writes its file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from dcs.layout import Layout, Piece
from safetensors.torch import save_file
from torch import Tensor, distributed

from relax.backends.train.errors import ExportError
from relax.backends.train.export import export_folder
from relax.backends.train.megatron.experts import Stored, stored
from relax.backends.train.megatron.files import FILE_BYTES, describe, file_names, files_of
from relax.backends.train.megatron.sources import weights_of
from relax.backends.train.megatron.weights import sources_of


@dataclass(frozen=True)
class Part:
    """One box of a Hugging Face tensor, where it lies, and who sends it."""

    rank: int
    local: str
    piece: Piece


@dataclass(frozen=True)
class Planned:
    """A Hugging Face tensor: its shape, dtype and parts, which cover it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def plan(layouts: Sequence[Layout]) -> list[Planned]:
    """Who sends what of each tensor, the lowest rank of those that hold the same box; in name order.

    Raises:
        ExportError: the layouts do not cover a tensor.
    """
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], Part]] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    for rank, layout in enumerate(layouts):
        for spec in layout.tensors:
            for piece in sources_of(spec):
                kinds[piece.source] = (piece.shape, spec.dtype)
                found = boxes.setdefault(piece.source, {})
                found.setdefault((piece.start, piece.extent), Part(rank, spec.name, piece))
    planned = []
    for name in sorted(boxes):
        shape, dtype = kinds[name]
        parts = tuple(part for _, part in sorted(boxes[name].items()))
        covered = sum(part.piece.size for part in parts)
        if covered != int(np.prod(shape)):
            raise ExportError(
                f"the ranks hold {covered} of the {int(np.prod(shape))} elements of {name}; who is missing?"
            )
        planned.append(Planned(name, shape, getattr(torch, dtype), parts))
    return planned


def write(
    folder: Path,
    *,
    source: Path,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    limit: int = FILE_BYTES,
    fused: bool = False,
) -> None:
    """Write a Hugging Face folder to `folder`, whole or not at all; every rank calls it.

    Args:
        folder: made by this call; may exist if empty.
        source: the folder the model came from: its config, tokenizer and templates come along.
        layout: of this rank.
        tensors: this rank's, by the layout's names.
        device: through which boxes are sent.
        limit: bytes of a file.
        fused: how the family holds experts, for a source without weights; see `experts.py`.

    Raises:
        ExportError: the target holds something, or is no folder; on every rank alike.
    """
    rank = distributed.get_rank()
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    layouts, refused = _exchanged(layout, taken, device)
    if refused:
        raise ExportError(f"export target {folder} is already there and not an empty folder; name a new one")
    files = files_of(stored(plan(layouts), weights_of(source), fused=fused), limit)
    if rank == 0:
        with export_folder(source=source, target=folder) as scratch:
            told(str(scratch), device)
            _write_files(scratch, files, tensors, device)
            describe(scratch, source, files)
            distributed.barrier()  # all files are there
    else:
        _write_files(Path(told("", device)), files, tensors, device)
        distributed.barrier()
    distributed.barrier()  # the folder is in its place


def _write_files(
    scratch: Path,
    files: Sequence[Sequence[Stored[Planned]]],
    tensors: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    for index, (name, contents) in enumerate(zip(file_names(len(files)), files, strict=True)):
        writer = index % size
        gathered: dict[str, Tensor] = {}
        for unit in contents:
            parts = [made for member in unit.members for made in _moved(member, writer, tensors, device)]
            if rank == writer:
                gathered[unit.name] = unit.assembled(parts)
        if rank == writer:
            save_file(gathered, scratch / name, metadata={"format": "pt"})


def told(text: str, device: torch.device, speaker: int = 0) -> str:
    """What one rank says; what the others give does not matter."""
    length = torch.tensor([len(text.encode())], device=device)
    distributed.broadcast(length, src=speaker)
    content = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if text and distributed.get_rank() == speaker:
        content.copy_(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
    distributed.broadcast(content, src=speaker)
    return content.cpu().numpy().tobytes().decode()


def _moved(
    planned: Planned, writer: int, tensors: Mapping[str, Tensor], device: torch.device
) -> Iterator[Tensor]:
    """The whole tensor, on the CPU, on the rank that writes it; nothing on others."""
    rank = distributed.get_rank()
    if rank != writer:
        for part in planned.parts:
            if part.rank == rank:
                distributed.send(_box(tensors[part.local], part.piece).contiguous(), dst=writer)
        return
    whole = torch.empty(planned.shape, dtype=planned.dtype)
    for part in planned.parts:
        if part.rank == rank:
            box = _box(tensors[part.local], part.piece)
        else:
            box = torch.empty(part.piece.extent, dtype=planned.dtype, device=device)
            distributed.recv(box, src=part.rank)
        target = whole
        for dimension, (first, length) in enumerate(zip(part.piece.start, part.piece.extent, strict=True)):
            target = target.narrow(dimension, first, length)
        target.copy_(box)
    yield whole


def _box(tensor: Tensor, piece: Piece) -> Tensor:
    box = tensor.detach()
    for dimension, (first, length) in enumerate(zip(piece.at, piece.own_extent, strict=True)):
        box = box.narrow(dimension, first, length)
    return box.reshape(piece.extent)


def _exchanged(layout: Layout, taken: bool, device: torch.device) -> tuple[list[Layout], bool]:
    """The layouts of all ranks in order, and whether any of them found the target taken."""
    mine = msgspec.msgpack.encode((taken, layout))
    sizes = torch.zeros(distributed.get_world_size(), dtype=torch.int64, device=device)
    sizes[distributed.get_rank()] = len(mine)
    distributed.all_reduce(sizes)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(padded) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyone, padded)
    decoder = msgspec.msgpack.Decoder(tuple[bool, Layout])
    found = [
        decoder.decode(part[: int(size)].cpu().numpy().tobytes())
        for part, size in zip(everyone, sizes.tolist(), strict=True)
    ]
    return [entry[1] for entry in found], any(entry[0] for entry in found)
