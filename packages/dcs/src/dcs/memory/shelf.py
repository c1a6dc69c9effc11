"""The copies of versions that a member has, and who is reading them; the same for publishers and subscribers.

A copy may be read while it is still being filled: a reader waits for the bytes it wants. It is written only
when nobody reads it: `Shelf.reserve` supersedes the oldest copy, whose readers move on to a newer version. An
arena that another process may still have mapped is never written again; it is let go instead.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from dcs.delta import Changed
from dcs.errors import DcsError, NoMemory
from dcs.interruptible import Condition
from dcs.layout import Layout
from dcs.manifest import Manifest, chunk_count, hash_chunk
from dcs.memory.arena import Arena

_SEND_SECONDS = 1.0  # for a chunk that is being sent to finish, before its reader is cut
_CUT_SECONDS = 10.0  # for a cut reader to notice; a shut-down socket returns at once
MAX_ARENAS = 5
"""Two are enough unless readers of this machine keep older ones mapped."""


class Superseded(Exception):
    """The version asked for is not held (any more). Never leaves the package."""


class NotYet(Superseded):
    """It may still come."""


class Reader(Protocol):
    """Somebody who reads a copy over a connection. `maps`: it has the memory mapped."""

    maps: bool

    def cut(self) -> None:
        """End the reader's connection at once."""
        ...


@dataclass(eq=False)
class Copy:
    """One version in one arena.

    Attributes:
        mark: what it is asked for by, besides its number: the root of the rank's part, or of the version.
        missing: int64 [chunks], bytes of each chunk that have not arrived.
        hashes: xxh3-64 of each chunk, once it is known.
        selected: the same for the chunks of other selections than the whole buffer.
        deltas: differences to older copies that have been made for readers.
        derived_from: the version that `changes` are counted from, where chunks came as differences.
    """

    arena: Arena
    version: int
    mark: bytes
    chunk_bytes: int
    hashes: list[int | None]
    missing: np.ndarray
    complete: bool = False
    readers: set[Reader] = field(default_factory=set)
    sending: int = 0
    closing: bool = False  # takes no new readers
    retired: bool = False  # gives no further chunk
    tainted: bool = False  # a process that has been cut off may still have it mapped
    selected: dict[bytes, list[int | None]] = field(default_factory=dict)
    deltas: dict[tuple[bytes, int, int], bytes | None] = field(default_factory=dict)
    derived_from: int = -1
    changes: dict[int, Changed] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """Bytes that have not arrived."""
        return int(self.missing.sum())

    def span(self, index: int) -> tuple[int, int]:
        """The byte range of a chunk."""
        return index * self.chunk_bytes, min((index + 1) * self.chunk_bytes, self.arena.nbytes)

    def hash(self, index: int) -> int:
        """xxh3-64 of a chunk that has arrived."""
        value = self.hashes[index]
        if value is None:
            start, end = self.span(index)
            value = self.hashes[index] = hash_chunk(self.arena.memory[start:end])
        return value

    def manifest(self, layout: str) -> Manifest:
        """Of a copy that is complete; `layout` is the fingerprint."""
        hashes = [self.hash(index) for index in range(len(self.hashes))]
        return Manifest.of(self.version, layout, self.arena.nbytes, self.chunk_bytes, hashes)


def whole(arena: Arena, version: int, mark: bytes, chunk_bytes: int, hashes: list[int | None]) -> Copy:
    """A copy whose bytes are all there."""
    missing = np.zeros(len(hashes), dtype=np.int64)
    return Copy(arena, version, mark, chunk_bytes, hashes, missing, complete=True)


def empty(arena: Arena, version: int, mark: bytes, chunk_bytes: int) -> Copy:
    """A copy that is to be filled."""
    chunks = chunk_count(arena.nbytes, chunk_bytes)
    missing = np.full(chunks, chunk_bytes, dtype=np.int64)
    if chunks:
        missing[-1] = arena.nbytes - (chunks - 1) * chunk_bytes
    return Copy(arena, version, mark, chunk_bytes, [None] * chunks, missing)


class Shelf:
    """Copies, oldest first, and spare arenas.

    Attributes:
        changed: guards everything here and in the copies; see `notify`.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.changed = Condition()
        self.held: list[Copy] = []
        self._free: deque[Arena] = deque()
        self._limbo: list[Copy] = []  # superseded, and still mapped by readers that will let go of them
        self._arenas: set[Arena] = set()  # of its own, wherever they are
        self._waiting = 0
        self._closed = False
        self._gone = -1  # the highest version that was held and is no more

    @property
    def _owned(self) -> int:
        return len(self._arenas)

    @property
    def oldest_arena(self) -> int:
        """The lowest number of the arenas here; 0 when there is none."""
        with self.changed:
            return min((arena.number for arena in self._arenas), default=0)

    def notify(self) -> None:
        """Wake those who wait for something here, if any; with `changed` held."""
        if self._waiting:
            self.changed.notify_all()

    def spare(self) -> Arena | None:
        """An arena that nobody uses; None when there are two already."""
        with self.changed:
            if self._free:
                return self._free.popleft()
            if self._owned < 2:
                return self._allocate()
            return None

    def reserve(self, oldest: Copy | None, grace: float) -> Arena:
        """The arena of `oldest`, once nobody reads it, to be given back by `put` or `release`.

        Waits up to `grace` seconds for its readers to finish, then supersedes it. An arena that is still
        mapped elsewhere is left to its readers, and another one comes back; so it does without `oldest`.
        Raises `NoMemory`; then `oldest` is served on.
        """
        with self.changed:
            if oldest is None or oldest not in self.held:
                return self._another()
            instead = None
            try:
                oldest.closing = True
                self._wait_for(lambda: not oldest.readers, grace)
                if not self._comes_back(oldest):
                    instead = self._another()
            except BaseException:
                oldest.closing = False
                raise
            oldest.retired = True
            self._end_sending(oldest)
            self._drop(oldest)
            if self._dismiss(oldest):
                if instead is None:
                    return oldest.arena
                self._keep(oldest.arena)  # it was let go of just now
            return instead or self._another()

    def put(self, copy: Copy) -> None:
        """Make a copy readable."""
        with self.changed:
            self.held.append(copy)
            self.notify()

    def withdraw(self, copy: Copy) -> None:
        """Take a copy back at once; its arena is free when its readers have gone."""
        with self.changed:
            if copy not in self.held:
                return
            copy.closing = copy.retired = True
            self._end_sending(copy)
            self._drop(copy)
            if self._dismiss(copy):
                self._keep(copy.arena)
            self.notify()

    def release(self, arena: Arena) -> None:
        """Give back an arena that was reserved and not put."""
        with self.changed:
            self._keep(arena)
            self.notify()

    def reclaim(self) -> None:
        """Take back what was reserved and neither put nor released: whoever had it was interrupted. For who
        alone reserves here.
        """
        with self.changed:
            used = {*self._free, *(copy.arena for copy in (*self.held, *self._limbo))}
            for arena in self._arenas - used:
                self._keep(arena)

    def open(self, reader: Reader, version: int, mark: bytes, seconds: float) -> Copy:
        """The copy of a version, for reading; it stays until `close`.

        Waits up to `seconds` for it to come. Raises `NotYet`, or `Superseded` when it does not come any more.
        """

        def found() -> Copy | None:
            for copy in self.held:
                if (copy.version, copy.mark) == (version, mark) and not copy.closing:
                    return copy
            return None

        with self.changed:
            # What was here and has gone does not come again.
            self._wait_for(lambda: found() or max(self._newest(), self._gone) >= version, seconds)
            copy = found()
            if copy is None:
                over = max(self._newest(), self._gone) >= version
                raise Superseded if over else NotYet
            copy.readers.add(reader)
            return copy

    def find(self, version: int) -> Copy | None:
        """A whole copy of this version, or None."""
        with self.changed:
            for copy in self.held:
                if copy.version == version and copy.complete and not copy.retired:
                    return copy
            return None

    def await_chunk(self, copy: Copy, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until `ready`; False when the time is over. Raises `Superseded` when the copy is retired."""
        with self.changed:
            self._wait_for(lambda: copy.retired or ready(), seconds)
            if copy.retired:
                raise Superseded
            return ready()

    @contextmanager
    def sending(self, *copies: Copy) -> Iterator[None]:
        """While this lasts the copies are not written; keep it short. Raises `Superseded`."""
        with self.changed:
            if any(copy.retired for copy in copies):
                raise Superseded
            for copy in copies:
                copy.sending += 1
        try:
            yield
        finally:
            with self.changed:
                for copy in copies:
                    copy.sending -= 1
                self.notify()

    def close_reader(self, reader: Reader, copy: Copy, done: bool) -> None:
        """The reader's connection needs the copy no more; `done`: the reader itself has said so."""
        with self.changed:
            copy.readers.discard(reader)
            copy.tainted |= reader.maps and not done
            if copy in self._limbo and not any(other.maps for other in copy.readers):
                self._limbo.remove(copy)
                if self._dismiss(copy):
                    self._keep(copy.arena)
            self.notify()

    def close(self) -> None:
        """Close every arena."""
        with self.changed:
            for arena in [*(copy.arena for copy in (*self.held, *self._limbo)), *self._free]:
                arena.close()
            for known in (self.held, self._limbo, self._free, self._arenas):
                known.clear()
            self._closed = True

    def _wait_for(self, condition: Callable[[], object], seconds: float) -> bool:
        self._waiting += 1
        try:
            return bool(self.changed.wait_for(condition, seconds))
        finally:
            self._waiting -= 1

    def _newest(self) -> int:
        return max((copy.version for copy in self.held), default=-1)

    def _allocate(self) -> Arena:
        arena = Arena(self.layout)
        self._arenas.add(arena)
        return arena

    def _another(self) -> Arena:
        """A free arena, or a new one. With `MAX_ARENAS` of them, the oldest one lent is given up for it: its
        readers are cut off and keep that memory, which is never written again.
        """
        if not self._free and self._owned >= MAX_ARENAS and self._limbo:
            lent = self._limbo[0]
            for reader in list(lent.readers):
                reader.cut()
            self._wait_for(lambda: lent not in self._limbo, _CUT_SECONDS)
        if self._free:
            return self._free.popleft()
        if self._owned < MAX_ARENAS:
            return self._allocate()
        raise NoMemory(
            f"{MAX_ARENAS} versions of this process are read by others that do not let go of them within"
            f" {_CUT_SECONDS} s of being cut off"
        )

    def _drop(self, copy: Copy) -> None:
        self.held.remove(copy)
        if copy.complete:
            self._gone = max(self._gone, copy.version)

    def _keep(self, arena: Arena) -> None:
        """Have an arena to spare; one is enough beside the two that are always needed."""
        if self._closed or (self._free and self._owned > 2):
            self._arenas.discard(arena)
            arena.close()
        else:
            self._free.append(arena)

    def _comes_back(self, copy: Copy) -> bool:
        """Whether `_dismiss` would give its arena back now."""
        lent = any(reader.maps for reader in copy.readers)
        return not (lent or copy.tainted or copy.arena.mapped)

    def _dismiss(self, copy: Copy) -> bool:
        """Whether the arena of a copy that has left `held` may be written again."""
        copy.deltas.clear()
        if any(reader.maps for reader in copy.readers):
            self._limbo.append(copy)
            return False
        if copy.arena.mapped:  # its owner's, and whoever has mapped it closes it
            return False
        if copy.tainted:
            self._arenas.discard(copy.arena)
            copy.arena.close()
            return False
        return True

    def _end_sending(self, copy: Copy) -> None:
        if self._wait_for(lambda: not copy.sending, _SEND_SECONDS):
            return
        for reader in list(copy.readers):
            reader.cut()
        if not self._wait_for(lambda: not copy.sending, _CUT_SECONDS):
            raise DcsError(
                f"version {copy.version} is still being sent {_CUT_SECONDS} s after its readers were cut; its"
                " buffer cannot be reused"
            )
