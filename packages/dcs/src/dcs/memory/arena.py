"""A flat buffer for one version of a model: one memfd, and every tensor of a layout as a view into it.

It is shared memory, so that other processes of the machine can map it (`Arena.map`) instead of copying it.
Buffers are reused from version to version: the first touch of a page costs more than the copy into it.
"""

import itertools
import mmap
import os
import warnings
from collections.abc import Mapping

import numpy as np
import torch

from dcs.errors import DcsError, LayoutMismatch, NoMemory
from dcs.layout import Layout, local, spec_of
from dcs.layout.tensors import FLOATING
from dcs.manifest import chunk_count, hash_chunk

_numbers = itertools.count(1)


class Arena:
    """Host memory for one version of a model.

    Attributes:
        tensors: every tensor of the layout, in name order, as views of the buffer.
        flat: the same bytes, uint8 [nbytes].
        memory: the same bytes.
        descriptor: of the memfd, -1 once closed.
        number: unique in this process.
        mapped: it belongs to another process and cannot be written.

    Raises `NoMemory`.
    """

    def __init__(self, layout: Layout) -> None:
        _, nbytes = layout.offsets()
        descriptor = os.memfd_create("dcs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, max(nbytes, 1))
            mapping = mmap.mmap(descriptor, max(nbytes, 1))
        except OSError as error:
            os.close(descriptor)
            raise NoMemory(f"no memory to stage {nbytes} bytes: {error}") from error
        self._view(layout, nbytes, mapping, descriptor)
        self.mapped = False

    @classmethod
    def map(cls, layout: Layout, descriptor: int) -> "Arena":
        """Another process's arena of the same layout, read-only; takes the descriptor over.

        Raises `DcsError` when it is too small, and `NoMemory`.
        """
        _, nbytes = layout.offsets()
        size = os.fstat(descriptor).st_size
        if size < nbytes:
            os.close(descriptor)
            raise DcsError(f"was given memory of {size} bytes, the layout needs {nbytes}")
        arena = cls.__new__(cls)
        try:
            mapping = mmap.mmap(descriptor, max(nbytes, 1), prot=mmap.PROT_READ)
        except OSError as error:
            os.close(descriptor)
            raise NoMemory(f"no memory to map {nbytes} bytes: {error}") from error
        arena._view(layout, nbytes, mapping, descriptor)
        arena.mapped = True
        return arena

    def _view(self, layout: Layout, nbytes: int, mapping: mmap.mmap, descriptor: int) -> None:
        self.layout = layout
        self.number = next(_numbers)
        self.nbytes = nbytes
        self.descriptor = descriptor
        self.flat = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        self.memory = memoryview(self.flat)
        with warnings.catch_warnings():
            # torch has no read-only tensors. Whoever writes to one of a mapped arena gets SIGSEGV, not a mix.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            flat = torch.from_numpy(self.flat)
        self.tensors: dict[str, torch.Tensor] = {}
        self._ends: list[int] = []
        starts, _ = layout.offsets()
        for spec, start in zip(layout.tensors, starts, strict=True):
            end = start + spec.nbytes
            dtype: torch.dtype = getattr(torch, spec.dtype)
            self.tensors[spec.name] = flat[start:end].view(dtype).view(spec.shape)
            self._ends.append(end)

    def fill(self, tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> tuple[int, ...]:
        """Copy `tensors` in, cast to the layout's dtypes, and return the xxh3-64 of every chunk.

        A chunk is hashed as soon as it is complete, while it is still in cache. The tensors may lie on any
        device, be non-contiguous, share storage, or require gradients; they must have been checked with
        `check`.
        """
        hashes: list[int] = []
        chunks = chunk_count(self.nbytes, chunk_bytes)
        with torch.no_grad():
            for (name, view), end in zip(self.tensors.items(), self._ends, strict=True):
                view.copy_(local(tensors[name]))
                while len(hashes) < chunks and (len(hashes) + 1) * chunk_bytes <= end:
                    start = len(hashes) * chunk_bytes
                    hashes.append(hash_chunk(self.memory[start : start + chunk_bytes]))
        if len(hashes) < chunks:
            hashes.append(hash_chunk(self.memory[len(hashes) * chunk_bytes :]))
        return tuple(hashes)

    def close(self) -> None:
        """Close the descriptor. The memory goes when the last view of it goes, here and elsewhere."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def check(tensors: Mapping[str, torch.Tensor], layout: Layout, cast: bool = False) -> None:
    """Raise `LayoutMismatch` unless `tensors` are exactly those of `layout`.

    With `cast`, floating tensors may have another floating dtype than the layout names for the wire.
    """
    for spec in layout.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise LayoutMismatch(
                f"tensor {spec.name!r} is absent, expected {spec}", spec.name, "absent", str(spec)
            )
        got = spec_of(spec.name, local(tensor))
        castable = cast and {got.dtype, spec.dtype} <= set(FLOATING)
        if got.shape != spec.shape or (got.dtype != spec.dtype and not castable):
            raise LayoutMismatch(
                f"tensor {spec.name!r} is {got}, expected {spec}: publish what the layout was made from",
                spec.name,
                str(got),
                str(spec),
            )
    if len(tensors) != len(layout.tensors):
        name = sorted(tensors.keys() - {spec.name for spec in layout.tensors})[0]
        got = str(spec_of(name, tensors[name]))
        raise LayoutMismatch(
            f"tensor {name!r} is {got}, expected absent: the layout does not name it", name, got, "absent"
        )
