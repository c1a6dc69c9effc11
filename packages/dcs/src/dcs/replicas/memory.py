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

    mapped = False  # it is a buffer of this process, rather than a rank's own memory

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        self._memory: memoryview | None = memoryview(mapping)
        self.nbytes = nbytes
        self.spare_since = 0

    @property
    def memory(self) -> memoryview:
        """Its bytes."""
        assert self._memory is not None
        return self._memory


class LentRegion(Region):
    """A rank's memfd, which is mapped, read-only, once somebody reads it: hardly a shard ever is."""

    mapped = True

    def __init__(self, descriptor: int, nbytes: int, what: str) -> None:
        self._memory = None
        self._descriptor = descriptor
        self._what = what
        self.nbytes = nbytes
        self.spare_since = 0

    @property
    def memory(self) -> memoryview:
        """Its bytes. Raises `KeeperFull` where the system cannot map them."""
        if self._memory is None:
            try:
                mapping = mmap.mmap(self._descriptor, self.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            except OSError as error:
                raise KeeperFull(f"{self._what}: its memory cannot be mapped: {error}") from error
            self._memory = memoryview(mapping)
        return self._memory

    def release(self) -> None:
        """Let go of it, for good."""
        if self._memory is not None:
            self._memory.release()
        os.close(self._descriptor)


def _room(descriptor: int, nbytes: int, what: str) -> int:
    """The size of a memfd that a rank passed. Raises `ProtocolError` for one that is too small.

    It has to be sealed: cut short under a mapping, it would end this process. Nothing but a memfd can be.
    """
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        size = os.fstat(descriptor).st_size
    except OSError as error:
        raise ProtocolError(f"{what}: what was passed is no memfd: {error}") from error
    if not sealed or size < nbytes:
        raise ProtocolError(f"{what}: a memfd of {size} bytes (sealed: {sealed}) for {nbytes} bytes")
    return size


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
        return Region(mapping, nbytes)

    def lend(self, descriptor: int, nbytes: int, what: str) -> LentRegion:
        """A rank's memfd. Takes the descriptor. Raises `KeeperFull` and `ProtocolError`."""
        try:
            size = _room(descriptor, nbytes, what)
            with self._lock:
                self._reserve(size, what)
        except BaseException:
            os.close(descriptor)
            raise
        return LentRegion(descriptor, size, what)

    def copy(self, descriptor: int, region: Region, nbytes: int, what: str) -> None:
        """Fill a buffer from a rank's memfd. Takes the descriptor. Raises `ProtocolError`."""
        try:
            _room(descriptor, nbytes, what)
            done = 0
            while done < nbytes:  # read, as mapping it costs more: a fault for every few of its pages
                count = os.preadv(descriptor, [region.memory[done:nbytes]], done)
                if not count:
                    raise ProtocolError(f"{what}: its memory ends after {done} of {nbytes} bytes")
                done += count
        except OSError as error:
            raise ProtocolError(f"{what}: its memory cannot be read: {error}") from error
        finally:
            os.close(descriptor)

    def give_back(self, region: Region) -> None:
        """The region holds nothing any more. One that a rank handed over is unmapped."""
        with self._lock:
            if isinstance(region, LentRegion):
                self._used -= region.nbytes
                region.release()
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
                "the keeper's max_bytes (about copies x (keep + 1) x the bytes of a shard, for every rank "
                "that keeps here), or lower keep"
            )
        self._used += nbytes
