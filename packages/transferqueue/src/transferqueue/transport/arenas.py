"""Arenas: segments of memory that the processes of one host share."""

import mmap
import os
import threading

import numpy as np

from ..errors import Corrupt, QueueError


class ArenaMap:
    """The arenas a process has been given descriptors of, mapped when first used and never unmapped while
    an array looks at them.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[int, int]] = {}
        self._readable: dict[int, mmap.mmap] = {}
        self._writable: dict[int, tuple[mmap.mmap, np.ndarray]] = {}
        self._lock = threading.Lock()

    def add(self, arena: int, nbytes: int, descriptor: int) -> None:
        """Takes over a descriptor. One that is here already is closed."""
        with self._lock:
            if arena in self._sizes:
                os.close(descriptor)
            else:
                self._sizes[arena] = (nbytes, descriptor)

    def __contains__(self, arena: object) -> bool:
        return arena in self._sizes

    def read(self, arena: int, start: int, stop: int) -> np.ndarray:
        """Bytes of an arena, uint8 ``[stop - start]``, read-only. Every call gives an array that owns its
        view: when it and all views of it are gone, nothing looks there any more.
        """
        self._check(arena, start, stop)
        mapped = self._readable.get(arena)
        if mapped is None:
            with self._lock:
                mapped = self._readable.get(arena)
                if mapped is None:
                    mapped = self._readable[arena] = self._map(arena, mmap.PROT_READ)
        return np.frombuffer(mapped, np.uint8, stop - start, start)

    def write(self, arena: int, start: int, stop: int) -> np.ndarray:
        """The same bytes, writable."""
        self._check(arena, start, stop)
        return self._mapped(arena)[1][start:stop]

    def _mapped(self, arena: int) -> tuple[mmap.mmap, np.ndarray]:
        found = self._writable.get(arena)
        if found is None:
            with self._lock:
                found = self._writable.get(arena)
                if found is None:
                    mapped = self._map(arena, mmap.PROT_READ | mmap.PROT_WRITE)
                    found = self._writable[arena] = (mapped, np.frombuffer(mapped, np.uint8))
        return found

    def _map(self, arena: int, protection: int) -> mmap.mmap:
        nbytes, descriptor = self._sizes[arena]
        try:
            return mmap.mmap(descriptor, nbytes, prot=protection)
        except OSError as error:
            raise QueueError(
                f"this process cannot map {nbytes} bytes of shared memory: {error}; raise `ulimit -n` or "
                "`ulimit -v`, or connect with transport='zmq'"
            ) from error

    def punch(self, arena: int, start: int, stop: int) -> None:
        """Gives the pages of a range back; it then reads as zeros."""
        self._check(arena, start, stop)
        self._mapped(arena)[0].madvise(mmap.MADV_REMOVE, start, stop - start)

    def _check(self, arena: int, start: int, stop: int) -> None:
        if arena not in self._sizes or not 0 <= start <= stop <= self._sizes[arena][0]:
            raise Corrupt(f"there are no bytes {start} to {stop} of arena {arena}")

    def close(self) -> None:
        """Closes the descriptors; what is mapped stays until the last array is gone. Idempotent."""
        with self._lock:
            for _, descriptor in self._sizes.values():
                os.close(descriptor)
            self._sizes.clear()
            self._readable.clear()
            self._writable.clear()


class SharedMemory:
    """Makes arenas of anonymous shared memory. Pages are taken when they are first written."""

    def make(self, arena: int, nbytes: int) -> int:
        """A descriptor of `nbytes` of zeros."""
        descriptor = os.memfd_create(f"transferqueue-{arena}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
