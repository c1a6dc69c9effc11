"""Memory that a rank freezes its state into: memfds, which a keeper on this machine maps as they are."""

import fcntl
import mmap
import os

import numpy as np
import torch

from dcs.memory import streaming
from dcs.replicas.memory import SEALS
from dcs.replicas.tree import Flat, Place

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
        self._places: list[Place] = []
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[np.ndarray] = []
        self._addresses = self._sizes = np.empty(0, np.uint64)  # of the tensors

    def fits(self, nbytes: int) -> bool:
        """Whether it is large enough for `nbytes`, and not far too large."""
        return nbytes <= self.nbytes <= 2 * nbytes + _ROUND

    def fill(self, flat: Flat) -> None:
        """Copy a flattened tree in. Its tensors may lie on any device, be non-contiguous or require
        gradients.
        """
        if flat.places != self._places:
            self._lay_out(flat)
        tensors = [source for source in flat.sources if isinstance(source, torch.Tensor)]
        # One call, whichever it is: per tensor, the way to the copy costs more than a small copy.
        loop = streaming.loaded()
        if loop is not None and all(_is_bytes(tensor) for tensor in tensors):
            addresses = [tensor.data_ptr() for tensor in tensors]
            loop.ranges(self._addresses, np.array(addresses, np.uint64), self._sizes)
        elif tensors:
            sources = [tensor.detach() for tensor in tensors]
            torch._foreach_copy_(self._tensors, sources)  # pyright: ignore[reportPrivateImportUsage]
        arrays = [source for source in flat.sources if not isinstance(source, torch.Tensor)]
        for view, array in zip(self._arrays, arrays, strict=True):
            view[:] = array

    def _lay_out(self, flat: Flat) -> None:
        """Make views for the leaves of trees like this, and clear what lies between them.

        It is hashed, too: equal trees must have equal chunks.
        """
        self._places = []
        self._tensors, self._arrays = [], []
        before = 0
        for start, nbytes, dtype, shape in flat.places:
            self._bytes[before:start] = 0
            before = start + nbytes
            room = self._bytes[start:before]
            if dtype is None:
                self._arrays.append(room)
            else:
                self._tensors.append(torch.from_numpy(room).view(dtype).view(shape))
        self._bytes[before : flat.nbytes] = 0
        self._addresses = np.array([tensor.data_ptr() for tensor in self._tensors], np.uint64)
        self._sizes = np.array([tensor.nbytes for tensor in self._tensors], np.uint64)
        self._places = flat.places

    def close(self) -> None:
        """Give the memory back; a keeper that maps it keeps it for as long as it does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            # The mapping goes with the last view of it.
            del self._tensors, self._arrays, self._bytes, self.memory


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Whether copying it is copying bytes of host memory, where dtype and shape are those of the target."""
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
