"""Memory that is there: allocated once, huge pages asked for, every page touched."""

import mmap

import numpy as np


def touched(nbytes: int) -> np.ndarray:
    """uint8 ``[nbytes]``, of 1s."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    buffer[:] = 1
    return buffer
