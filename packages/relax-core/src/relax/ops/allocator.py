"""The C library's allocator, told to keep freed memory: tensors of a step are as large as those of the one
before.
"""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BELOW = 1 << 30
"""Bytes; blocks up to this size come from the heap, which is given back to the system only beyond it."""


def keep_freed_memory() -> bool:
    """Serve large blocks from the heap and keep what is freed; returns whether the C library can do that.

    With glibc's defaults every large tensor is mapped, zeroed by page faults and unmapped again: a tenth of
    the time of a step of a small model on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, KEEP_BELOW)) and bool(mallopt(M_TRIM_THRESHOLD, KEEP_BELOW))
