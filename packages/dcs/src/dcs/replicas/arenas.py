"""Memory that a rank freezes its state into: memfds, so that a keeper on this machine maps them as they
are.
"""

import fcntl
import mmap
import os

import numpy as np
import torch

from dcs.replicas.memory import SEALS
from dcs.replicas.tree import Flat

_ROUND = 1 << 20  # bytes; sizes are rounded up, so that a tree that grows a little still fits


class Arena:
    """One memfd. Attributes: `descriptor`, `nbytes` that it has room for, `memory`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-max(nbytes, 1) // _ROUND) * _ROUND
        self.descriptor = os.memfd_create("dcs-replica", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.nbytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            # Now rather than page by page, and as an error rather than a SIGBUS where there is no memory.
            os.posix_fallocate(self.descriptor, 0, self.nbytes)
            self.memory = memoryview(mmap.mmap(self.descriptor, self.nbytes))
        except BaseException:
            os.close(self.descriptor)
            raise
        self._bytes = np.frombuffer(self.memory, np.uint8)
        self._flat = torch.from_numpy(self._bytes)
        self._spans: list[tuple[int, int]] = []

    def fits(self, nbytes: int) -> bool:
        """Whether it is large enough for `nbytes`, and not far too large."""
        return nbytes <= self.nbytes <= 2 * nbytes + _ROUND

    def fill(self, flat: Flat) -> None:
        """Copy a flattened tree in. Its tensors may lie on any device, be non-contiguous or require
        gradients.
        """
        spans = [(leaf.start, leaf.start + leaf.nbytes) for leaf in flat.leaves]
        if spans != self._spans:
            self._clear_gaps(spans, flat.nbytes)
            self._spans = spans
        with torch.no_grad():
            for leaf, (start, end) in zip(flat.leaves, spans, strict=True):
                source = leaf.source
                if isinstance(source, torch.Tensor):
                    self._flat[start:end].view(source.dtype).view(source.shape).copy_(source)
                else:
                    self._bytes[start:end] = source

    def _clear_gaps(self, spans: list[tuple[int, int]], nbytes: int) -> None:
        # Between leaves there is padding, which is hashed too: equal trees must have equal chunks.
        before = 0
        for start, end in [*spans, (nbytes, nbytes)]:
            self._bytes[before:start] = 0
            before = end

    def close(self) -> None:
        """Give the memory back; a keeper that maps it keeps it for as long as it does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            # The mapping goes with the last view of it.
            del self._flat, self._bytes, self.memory
