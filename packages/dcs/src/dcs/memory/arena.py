"""A flat staging buffer: one contiguous allocation, and every tensor of a layout as a view into it."""

from collections.abc import Mapping

import numpy as np
import torch

from dcs.errors import LayoutMismatch
from dcs.layout import ALIGNMENT, Layout, spec_of
from dcs.manifest import chunk_count, hash_chunk


class Arena:
    """Host memory for one version of a model; reused from version to version.

    Attributes:
        tensors: every tensor of the layout, in name order, as views of the buffer.
        memory: the same bytes, writable.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        starts, self.nbytes = layout.offsets()
        # Zeroed, as the gaps between tensors are hashed and sent too: equal weights must have equal hashes.
        # numpy takes zeroed pages from the kernel where torch writes them: what is not filled costs nothing.
        raw = np.zeros(self.nbytes + ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        flat = raw[start : start + self.nbytes]
        self.memory = memoryview(flat)
        self._flat = torch.from_numpy(flat)
        self.tensors: dict[str, torch.Tensor] = {}
        self._ends: list[int] = []
        for spec, start in zip(layout.tensors, starts, strict=True):
            end = start + spec.nbytes
            dtype: torch.dtype = getattr(torch, spec.dtype)
            self.tensors[spec.name] = self._flat[start:end].view(dtype).view(spec.shape)
            self._ends.append(end)

    def fill(self, tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> tuple[int, ...]:
        """Copy `tensors` in and return the xxh3-64 of every chunk.

        A chunk is hashed as soon as it is complete, while it is still in cache. The tensors may lie on any
        device, be non-contiguous, share storage, or require gradients; they must have been checked with
        `check`.
        """
        hashes: list[int] = []
        chunks = chunk_count(self.nbytes, chunk_bytes)
        with torch.no_grad():
            for (name, view), end in zip(self.tensors.items(), self._ends, strict=True):
                view.copy_(tensors[name])
                while len(hashes) < chunks and (len(hashes) + 1) * chunk_bytes <= end:
                    start = len(hashes) * chunk_bytes
                    hashes.append(hash_chunk(self.memory[start : start + chunk_bytes]))
        if len(hashes) < chunks:
            hashes.append(hash_chunk(self.memory[len(hashes) * chunk_bytes :]))
        return tuple(hashes)


def check(tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Raise `LayoutMismatch` unless `tensors` are exactly those of `layout`."""
    for spec in layout.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise LayoutMismatch(
                f"tensor {spec.name!r} is absent, expected {spec}", spec.name, "absent", str(spec)
            )
        got = spec_of(spec.name, tensor)
        if got != spec:
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
