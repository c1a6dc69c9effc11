"""Filling one copy from one or more sources at once: lanes take chunks, verify them, and put them in place.

A lane is a thread with a connection. Lanes of sources with the same layout share one stream and take its
chunks as fast as each can; of a resharding plan every source has a stream of its own. A lane keeps two
requests in flight, so that a long line is never idle between them.
"""

import enum
import threading
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from dcs import delta
from dcs.control.messages import Source
from dcs.errors import CorruptChunk, DcsError, NoMemory, ProtocolError
from dcs.manifest import hash_chunk
from dcs.memory.shelf import Copy, Shelf, Superseded
from dcs.plan import blocks
from dcs.wire import frames, incoming
from dcs.wire.chunks import hash_parts, seal
from dcs.wire.connection import Connection
from dcs.wire.incoming import LANDED, WANTED, Progress, Stream

_RUN = 16  # chunks in one request, at most
_ATTEMPTS = 4  # for one chunk whose bytes do not match its hash


class Transfer:
    """One version on its way into one copy.

    Args:
        shelf: the copy's, whose lock guards all progress.
        copy: what is filled.
        base: a whole older copy that the sources may send differences to.
        former: what the copy's arena held before.
        departed: whether a source is a member no more, so that there is no use in waiting for it.

    Attributes:
        received: payload bytes by source member, retries included.
        differences: how many chunks came as such.
        spoilt: chunks of the copy's arena that no longer hold what they held before.
        starved: sources that say they wait for theirs.
    """

    def __init__(
        self,
        shelf: Shelf,
        copy: Copy,
        base: Copy | None,
        former: Copy | None,
        departed: Callable[[Source], bool] = lambda _: False,
    ) -> None:
        self.shelf = shelf
        self.copy = copy
        self.base = base
        copy.derived_from = -1 if base is None else base.version
        self.former = former
        self.departed = departed
        self.spoilt: set[int] = set()
        self.received: Counter[int] = Counter()
        self.differences = 0
        self.starved: set[int] = set()
        self.progress: list[Progress] = []

    def begin(self, coming: list[Stream]) -> list[Progress]:
        """Go on with these streams; what has landed whole stays."""
        copy = self.copy
        with self.shelf.changed:
            if any(not stream.selection.whole for stream in coming):
                covered = incoming.coverage(coming, len(copy.missing))
                copy.missing = np.where(copy.missing > 0, covered, 0)
            else:
                for index in np.flatnonzero(copy.missing).tolist():
                    start, end = copy.span(index)
                    copy.missing[index] = end - start
            self.progress = [incoming.begin(stream, copy.missing) for stream in coming]
            self.shelf.notify()
            return self.progress

    def land(self, progress: Progress, index: int, value: int) -> None:
        """A chunk's verified bytes are in place; `value` is its hash. With the shelf's lock held."""
        copy = self.copy
        progress.state[index] = LANDED
        if progress.stream.selection.whole:
            copy.hashes[index] = value  # first, as a server looks at `missing` without the lock
            copy.missing[index] = 0
        else:
            copy.selected.setdefault(progress.stream.key, [None] * len(progress.stream))[index] = value
            for touched, size in progress.stream.touched[index]:
                copy.missing[touched] = max(0, copy.missing[touched] - size)
        self.shelf.notify()

    @property
    def done(self) -> bool:
        """Whether every chunk of every stream has landed."""
        return all(not progress.left for progress in self.progress)


class _Got(enum.Enum):
    """What came of one chunk. USELESS: a difference to something that is not here."""

    GOOD = enum.auto()
    DAMAGED = enum.auto()
    USELESS = enum.auto()


class Lane:
    """One connection that brings chunks of one stream. Run `run`, on a thread of its own or not.

    Attributes:
        error: why it ended before there was nothing left to take, or None.
        ended: set by the end of `run`.
    """

    def __init__(
        self,
        transfer: Transfer,
        progress: Progress,
        connection: Connection,
        version: int,
        mark: bytes,
        share: int,
    ) -> None:
        self.connection = connection
        self.error: OSError | DcsError | Superseded | None = None
        self.ended = False
        self._transfer = transfer
        self._progress = progress
        self._version = version
        self._mark = mark
        self._most = max(1, min(_RUN, len(progress.stream) // (2 * max(1, share))))
        self._asked: deque[tuple[int, int, Copy | None]] = deque()
        self._scratch = np.empty(0, dtype=np.uint8)

    def run(self) -> None:
        """Take and bring chunks until none is left to take, or the source fails."""
        try:
            self._run()
        except (OSError, DcsError, Superseded) as error:
            self.error = error
        except MemoryError as error:
            self.error = NoMemory(f"no memory to receive version {self._version}: {error}")
        finally:
            with self._transfer.shelf.changed:
                for first, count, _ in self._asked:
                    self._progress.give_back(first, count)
                self.ended = True
                self._transfer.starved.discard(self.connection.source.member)
                self._transfer.shelf.notify()

    def refuse(self, error: DcsError) -> None:
        """It cannot run at all."""
        with self._transfer.shelf.changed:
            self.error, self.ended = error, True
            self._transfer.shelf.notify()

    def _run(self) -> None:
        stream = self._progress.stream
        number = frames.WHOLE
        if stream.rows is not None:
            number = self.connection.select(stream.rows, stream.selection.key)
        while True:
            while len(self._asked) < 2:
                with self._transfer.shelf.changed:
                    run = self._progress.take(self._most)
                if run is None:
                    break
                base = self._transfer.base
                self._asked.append((*run, base))
                self.connection.ask(
                    frames.CHUNKS,
                    self._version,
                    self._mark,
                    selection=number,
                    base=frames.NO_BASE if base is None else base.version,
                    first=run[0],
                    count=run[1],
                )
            if not self._asked:
                return
            first, count, base = self._asked[0]
            for index in range(first, first + count):
                self._receive(index, base)
            self._asked.popleft()

    def _receive(self, index: int, base: Copy | None) -> None:
        transfer, member = self._transfer, self.connection.source.member
        encoding, got, length, value, base_value = self.connection.reply(self._waiting)
        size = self._progress.stream.selection.sizes[index]
        if (
            encoding > frames.DELTA
            or got != index
            or (length > size if encoding == frames.DELTA else length != size)
        ):
            raise ProtocolError(
                f"asked {self.connection.source.name!r} for chunk {index} of {size} bytes, got chunk {got}"
                f" of {length}"
            )
        if encoding == frames.DELTA:
            outcome = self._receive_difference(index, length, value, base_value, base)
        else:
            outcome = self._receive_dense(index, size, value)
        with transfer.shelf.changed:
            transfer.starved.discard(member)
            transfer.received[member] += length
            if outcome is _Got.GOOD:
                transfer.differences += encoding == frames.DELTA
                transfer.land(self._progress, index, value)
                return
            self._progress.damaged[index] += outcome is _Got.DAMAGED
            attempts = self._progress.damaged[index]
            self._progress.state[index] = WANTED
        if attempts >= _ATTEMPTS:
            raise CorruptChunk(
                f"chunk {index} of version {self._version} from {self.connection.source.name!r} did not match"
                f" its hash {attempts} times; the source's buffer or the path to it is damaged"
            )

    def _receive_dense(self, index: int, size: int, value: int) -> _Got:
        copy = self._transfer.copy
        spans = self._progress.stream.spans(index)
        if spans is None or not self._unshared(index):
            rows = self._progress.stream.into[index]
            view = self._buffer(size)
            self.connection.receive_into(memoryview(view))
            if hash_chunk(memoryview(view)) != value:
                return _Got.DAMAGED
            blocks.scatter(rows, copy.arena.flat, view)
            return _Got.GOOD
        self._transfer.spoilt.add(index)
        parts = [copy.arena.memory[start : start + length] for start, length in spans]
        self.connection.receive_parts(parts)
        return _Got.GOOD if hash_parts(parts) == value else _Got.DAMAGED

    def _receive_difference(
        self, index: int, length: int, value: int, base_value: int, base: Copy | None
    ) -> _Got:
        transfer, stream = self._transfer, self._progress.stream
        payload = memoryview(bytearray(length))
        self.connection.receive_into(payload)
        if base is None or length < 8:
            raise ProtocolError(f"{self.connection.source.name!r} sent a difference that was not asked for")
        if int.from_bytes(payload[:8], "little") != seal(payload[8:], value):
            return _Got.DAMAGED
        if not self._is_base(base, index, base_value):
            transfer.base = None  # the source's is another one: go on without
            return _Got.USELESS
        if stream.selection.whole:
            start, end = transfer.copy.span(index)
            target = transfer.copy.arena.flat[start:end]
            changed = self._apply(index, payload[8:], base, base.arena.flat[start:end], target)
            if changed is not None:
                transfer.copy.changes[index] = changed
        else:
            packed = self._buffer(stream.selection.sizes[index])
            blocks.gather(stream.into[index], base.arena.flat, packed)
            delta.apply(payload[8:], packed)
            blocks.scatter(stream.into[index], transfer.copy.arena.flat, packed)
        return _Got.GOOD

    def _is_base(self, base: Copy, index: int, value: int) -> bool:
        """Whether the chunk here is the one that the source made its difference to."""
        stream = self._progress.stream
        if stream.selection.whole:
            return base.hash(index) == value
        known = base.selected.get(stream.key)
        return known is not None and known[index] == value

    def _apply(
        self, index: int, body: memoryview, base: Copy, source: np.ndarray, target: np.ndarray
    ) -> delta.Changed | None:
        """Make `target` the base's chunk `source` plus `body`; by what changed only, where that is known."""
        former, changed = self._transfer.former, base.changes.get(index)
        behind = former is not None and base.derived_from == former.version
        if not behind or changed is None or index in self._transfer.spoilt:
            self._transfer.spoilt.add(index)
            np.copyto(target, source)
            return delta.apply(body, target)
        result = delta.apply(body, target, behind=changed)
        self._transfer.spoilt.add(index)
        return result

    def _unshared(self, index: int) -> bool:
        """Whether no chunk of the copy that this one falls into has landed: peers may be reading those."""
        if self._progress.stream.selection.whole:
            return True  # it falls into the one of its number, which is this lane's until it has landed
        missing = self._transfer.copy.missing
        return all(missing[touched] for touched, _ in self._progress.stream.touched[index])

    def _buffer(self, size: int) -> np.ndarray:
        if len(self._scratch) < size:
            self._scratch = np.empty(size, dtype=np.uint8)
        return self._scratch[:size]

    def _waiting(self) -> None:
        source = self.connection.source
        if self._transfer.departed(source):
            raise ConnectionAbortedError(f"{source.name!r} waits for its own source, and was evicted")
        with self._transfer.shelf.changed:
            self._transfer.starved.add(self.connection.source.member)
            self._transfer.shelf.notify()


def run_lanes(lanes: list[Lane], watch: Callable[[], float]) -> None:
    """Run every lane to its end. `watch` is called again after as many seconds as it last returned, at most;
    it may cut lanes.
    """
    threads = [threading.Thread(target=lane.run, name="dcs-lane", daemon=True) for lane in lanes]
    for lane, thread in zip(lanes, threads, strict=True):
        try:
            thread.start()
        except RuntimeError as error:
            lane.refuse(NoMemory(f"no memory for a thread to receive with: {error}"))
    while running := [thread for thread in threads if thread.is_alive()]:
        running[0].join(min(watch(), 60.0))
