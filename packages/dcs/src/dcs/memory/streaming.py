"""Copies of what no cache holds, past the caches: by the loop of `streaming.c`, where it was compiled.

torch copies a tensor by stores that fetch each line before it is overwritten. For what is many times larger
than a cache that costs a third more, and it throws out of the cache what the trainer works on.
"""

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from dcs import compiled

_ABI: Final = 1
_LIBRARY: Final = Path(__file__).with_name("_streaming.so")
WORTH_BYTES: Final = 8 << 20  # in all; what is smaller may be read again from a cache soon


class Streaming:
    """Calls of the compiled loop; each lets other threads run meanwhile."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._stream = library.dcs_stream
        self._stream.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._stream.restype = None

    def ranges(self, to: np.ndarray, source: np.ndarray, nbytes: np.ndarray) -> None:
        """Copy `nbytes[i]` bytes from address `source[i]` to `to[i]`; each uint64 [n]. No range overlaps."""
        self._stream(len(nbytes), to.ctypes.data, source.ctypes.data, nbytes.ctypes.data)

    def block(self, target: np.ndarray, source: np.ndarray) -> None:
        """Copy one range; both uint8 [n], contiguous, and writable the first."""
        to, count = ctypes.c_uint64(target.ctypes.data), ctypes.c_uint64(len(source))
        start = ctypes.c_uint64(source.ctypes.data)
        self._stream(1, ctypes.addressof(to), ctypes.addressof(start), ctypes.addressof(count))


@functools.cache
def loaded() -> Streaming | None:
    """The compiled loop; None where torch has to do: off x86-64, or installed where no compiler was."""
    library, _ = compiled.load(_LIBRARY, "dcs_streaming_abi", _ABI)
    return None if library is None else Streaming(library)


def is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether copying `source` to `target` is copying its bytes, in host memory."""
    return (
        source.dtype is target.dtype
        and source.shape == target.shape
        and source.device.type == "cpu"
        and target.device.type == "cpu"
        and source.is_contiguous()
        and target.is_contiguous()
        and not (source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg())
    )


def copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each target what its source holds, as `target.copy_(source, non_blocking=True)` would.

    Args:
        pairs: (target, source), of the same shape; any dtypes, devices and strides. None overlaps another.
    """
    listed = list(pairs)
    loop = loaded() if sum(target.nbytes for target, _ in listed) >= WORTH_BYTES else None
    plain = [] if loop is None else [pair for pair in listed if is_plain(*pair)]
    if loop is not None and plain:
        to = np.array([target.data_ptr() for target, _ in plain], np.uint64)
        source = np.array([tensor.data_ptr() for _, tensor in plain], np.uint64)
        loop.ranges(to, source, np.array([target.nbytes for target, _ in plain], np.uint64))
    if len(plain) == len(listed):
        return
    done = {id(target) for target, _ in plain}
    for target, tensor in listed:
        if id(target) not in done:
            target.copy_(tensor, non_blocking=True)
