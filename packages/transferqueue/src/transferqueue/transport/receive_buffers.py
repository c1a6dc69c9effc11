"""Reusable memory for payload that comes from, or goes to, another host.

A fresh buffer costs a page fault and zeroing for every page; on a large message that is more than the copy
into it. Here a buffer lies on huge pages where the kernel gives them, and its memory goes back to the pool by
itself once the last numpy view of it is gone, also a view that a socket still sends from.
"""

import errno
import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from ..errors import InvalidArgument

_HUGE_PAGE = 2 << 20  # bytes
_ALIGNMENT = 64  # bytes, a cache line
_POOLED_FROM = 256 << 10  # bytes; below this malloc recycles its memory by itself
_FREED = 16 << 20  # bytes; glibc keeps up to twice as many
_STEPS = 8  # sizes in a doubling: at most an eighth of a buffer is slack


@dataclass(frozen=True, eq=False, slots=True)
class _Memory:
    """A mapping and how much of it may be used."""

    mapped: mmap.mmap
    size: int


class ReceiveBuffers:
    """A pool of buffers of any size. Thread-safe.

    Args:
        max_idle_bytes: memory kept for reuse; what is idle beyond it is given back to the system, the least
            recently used first. Buffers in use are not counted and not limited.
    """

    def __init__(self, max_idle_bytes: int = 1 << 30) -> None:
        if max_idle_bytes < 0:
            raise InvalidArgument(f"max_idle_bytes is {max_idle_bytes}; 0 (keep nothing) or more is expected")
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[_Memory] = []  # the least recently used first
        self._idle_bytes = 0
        self._closed = False
        # A finalizer runs on any thread at any time, also inside `take`, so it waits for no lock.
        self._released: deque[_Memory] = deque()
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for reuse now."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def take(self, nbytes: int) -> np.ndarray:
        """A writable uint8 array of `nbytes`, its contents undefined, its start aligned to 64 bytes.

        The memory is reused after the last view of the array, or of any array over it, is gone.
        """
        if nbytes < 0:
            raise InvalidArgument(f"a buffer of {nbytes} bytes was asked for; 0 or more is expected")
        if nbytes < _POOLED_FROM:
            return _aligned(np.empty(nbytes + _ALIGNMENT, np.uint8), _ALIGNMENT, nbytes)
        size = _rounded(nbytes)
        memory = self._reuse(size) or _map(size)
        root = np.frombuffer(memory.mapped, np.uint8)
        weakref.finalize(root, self._release, memory).atexit = False
        return _aligned(root, _HUGE_PAGE if memory.size >= _HUGE_PAGE else _ALIGNMENT, nbytes)

    def close(self) -> None:
        """Gives idle memory back; what is in use follows when its last view goes. Idempotent."""
        with self._lock:
            self._closed = True
            self._collect()

    def _reuse(self, size: int) -> _Memory | None:
        """The best fit among the idle ones, if at least half of it will be used."""
        with self._lock:
            self._collect()
            fitting = [memory for memory in self._idle if size <= memory.size <= 2 * size]
            if not fitting:
                return None
            best = min(fitting, key=lambda memory: memory.size)
            self._idle.remove(best)
            self._idle_bytes -= best.size
            return best

    def _release(self, memory: _Memory) -> None:
        self._released.append(memory)
        if self._lock.acquire(blocking=False):  # otherwise whoever holds it, or the next one, collects
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._released:
            memory = self._released.popleft()
            self._idle.append(memory)
            self._idle_bytes += memory.size
        limit = 0 if self._closed else self._max_idle_bytes
        while self._idle_bytes > limit:
            # Dropped, not unmapped: the finalizer that brought it here may hold the last view for a moment.
            self._idle_bytes -= self._idle.pop(0).size


def keep_freed_memory() -> None:
    """Makes this process's malloc keep what it frees, at most 32 MiB a thread, instead of giving it back to
    the kernel and faulting it in again for each received message.

    glibc raises both its thresholds, the one for separate mappings and the one for trimming, by the largest
    mapping freed so far; one that is freed untouched costs microseconds. Other allocators are unaffected.
    """
    freed_at_once = np.empty(_FREED, np.uint8)
    del freed_at_once


def _rounded(nbytes: int) -> int:
    """The size class of a buffer: a multiple of an eighth of the power of two below it, whole pages."""
    step = max((1 << (nbytes.bit_length() - 1)) // _STEPS, mmap.PAGESIZE)
    if nbytes >= _HUGE_PAGE:
        step = max(step, _HUGE_PAGE)
    return -(-nbytes // step) * step


def _map(size: int) -> _Memory:
    if size < _HUGE_PAGE:
        return _Memory(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), size)
    # One huge page more than needed, never touched: they begin at their own multiple, a mapping anywhere.
    mapped = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel built without huge pages
            raise
    return _Memory(mapped, size)


def _aligned(root: np.ndarray, alignment: int, nbytes: int) -> np.ndarray:
    start = -root.ctypes.data % alignment
    return root[start : start + nbytes]
