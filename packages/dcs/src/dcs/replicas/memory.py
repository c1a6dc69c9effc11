"""The memory of a keeper: a budget, buffers that are used again, and memfds that ranks have handed over."""

import fcntl
import mmap
import os
import threading

from dcs.errors import ProtocolError
from dcs.replicas.errors import KeeperFull

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

KEPT_SPARE = 256  # a buffer goes when so many were asked for and none was of its size


class Region:
    """Memory that holds one shard. `memory` is what can be read and written, `nbytes` what it counts for."""

    def __init__(self, mapping: mmap.mmap, nbytes: int, mapped: bool) -> None:
        self.memory = memoryview(mapping)
        self.nbytes = nbytes
        self.spare_since = 0
        self.mapped = mapped  # a rank's own memory, rather than a buffer of this process


class Memory:
    """At most `max_bytes` in regions; what is received goes to buffers that are kept for the next shard of a
    size.

    A fresh buffer costs several times what a used one does, as the kernel has to clear each of its pages.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._used = 0
        self._spare: list[Region] = []
        self._asked = 0  # how many buffers have been asked for

    @property
    def used_bytes(self) -> int:
        """Bytes of all regions, spare ones included."""
        with self._lock:
            return self._used

    def buffer(self, nbytes: int, what: str) -> Region:
        """A writable buffer of `nbytes`. Raises `KeeperFull`."""
        with self._lock:
            self._asked += 1
            while self._spare and self._asked - self._spare[0].spare_since > KEPT_SPARE:
                self._used -= self._spare.pop(0).nbytes
            for region in self._spare:
                if region.nbytes == nbytes:
                    self._spare.remove(region)
                    return region
            self._reserve(nbytes, what)
        try:
            mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            with self._lock:
                self._used -= nbytes
            raise KeeperFull(f"no memory for {nbytes} bytes of {what}: {error}") from error
        return Region(mapping, nbytes, mapped=False)

    def map(self, descriptor: int, nbytes: int, what: str) -> Region:
        """A rank's memfd, mapped read-only. Takes the descriptor. Raises `KeeperFull` and `ProtocolError`."""
        try:
            # Sealed, so that it cannot be cut short under a mapping, which would end this process.
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
            size = os.fstat(descriptor).st_size
            if not sealed or size < nbytes:
                raise ProtocolError(f"{what}: a memfd of {size} bytes (sealed: {sealed}) for {nbytes} bytes")
            with self._lock:
                self._reserve(size, what)
            mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise ProtocolError(f"{what}: its memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        return Region(mapping, size, mapped=True)

    def give_back(self, region: Region) -> None:
        """The region holds nothing any more. One that a rank handed over is unmapped."""
        with self._lock:
            if region.mapped:
                self._used -= region.nbytes
                region.memory.release()
            else:
                region.spare_since = self._asked
                self._spare.append(region)

    def trim(self) -> None:
        """Return spare buffers to the system."""
        with self._lock:
            while self._spare:
                self._used -= self._spare.pop().nbytes

    def _reserve(self, nbytes: int, what: str) -> None:
        while self._used + nbytes > self.max_bytes and self._spare:
            self._used -= self._spare.pop(0).nbytes
        if self._used + nbytes > self.max_bytes:
            raise KeeperFull(
                f"no room for {nbytes} bytes of {what}: {self._used} of {self.max_bytes} are in use; raise "
                f"the keeper's"
                " max_bytes (about copies x (keep + 1) x the bytes of a shard, for every rank that keeps "
                "here), or lower"
                " keep"
            )
        self._used += nbytes
