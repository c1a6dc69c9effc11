"""Where a subscriber gets a version from: memory of this machine, peers that have it, the training ranks.

An attempt goes through the sources in the coordinator's order. Whatever fails, the next source goes on with
what is still missing; a version is never started over.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dcs import manifest as manifests
from dcs.control.messages import Announcement, Gathering, Source
from dcs.errors import CorruptChunk, DcsError, LayoutMismatch, ProtocolError, PublisherLost
from dcs.layout import Layout
from dcs.manifest import Manifest
from dcs.memory import shelf as shelves
from dcs.memory.arena import Arena
from dcs.memory.shelf import MAX_ARENAS, Copy, Shelf, Superseded
from dcs.plan.planner import plan
from dcs.wire.collective import CollectiveBroken
from dcs.wire.connection import Connection, where
from dcs.wire.frames import Hello
from dcs.wire.gathering import Groups, receive
from dcs.wire.incoming import Stream, whole_stream
from dcs.wire.machine import machine_id
from dcs.wire.tls import Tls, client_context
from dcs.wire.transfer import Lane, Transfer, run_lanes

_WATCH_SECONDS = 0.25
_PATIENCE_SECONDS = 2.0  # with a source before it can be called slow
_SLOW = 5.0  # times longer than versions take else
_UNKNOWN_SECONDS = 10.0  # what a version may take when none has been received yet
_INLINE = 4  # chunks; fewer are fetched without a thread of their own
_HOLDERS = 4  # sources of the same layout at a time


@dataclass(eq=False)
class Job:
    """One version on its way; survives failed attempts.

    Attributes:
        target: what is fetched.
        copy: where to; None until memory is needed, and not at all when it is mapped.
        wire: how it came.
        slow: members that were too slow to wait for.
        failures: the last error of each source.
    """

    target: Announcement
    copy: Copy | None = None
    transfer: Transfer | None = None
    began: float = field(default_factory=time.monotonic)
    wire: str = ""
    from_ranks: int = 0
    from_peers: int = 0
    slow: set[int] = field(default_factory=set)
    failures: dict[str, Exception] = field(default_factory=dict)

    @property
    def root(self) -> bytes:
        """The version's root."""
        return manifests.version_root(self.target.roots)

    def mark(self, source: Source) -> bytes:
        """What a source calls this version."""
        return self.root if source.rank < 0 else self.target.roots[source.rank]


class Puller:
    """Fetches versions; only one thread calls `attempt`.

    Args:
        shelf, layout, chunk_bytes: of the copies here.
        hello: what to say to a source.
        layouts: the layouts of sources, by fingerprint.
        wires: which of `shm` and `tcp` may be used.
        streams: connections to a source on another machine.
        delta: take differences to the version before: always, never, or (None) from other machines.
        progress: called now and then with bytes done, bytes in all, and the version.
        tls: speak TLS with sources, over TCP.
        groups: for broadcasts; None takes part in none.
        departed: whether a source was evicted.
        stopped: whether to give up.
    """

    def __init__(
        self,
        shelf: Shelf,
        layout: Layout,
        chunk_bytes: int,
        *,
        hello: Callable[[], Hello],
        layouts: Callable[[Sequence[str]], dict[str, Layout]],
        wires: Sequence[str],
        streams: int,
        delta: bool | None,
        progress: Callable[[int, int, int], None] | None,
        tls: Tls | None,
        groups: Groups | None,
        departed: Callable[[Source], bool],
        stopped: Callable[[], bool],
    ) -> None:
        self._shelf = shelf
        self._layout = layout
        self._fingerprint = layout.fingerprint
        self._nbytes = layout.offsets()[1]
        self._chunk_bytes = chunk_bytes
        self._hello = hello
        self._layouts = layouts
        self._known: dict[str, Layout] = {self._fingerprint: layout}
        self._wires = wires
        self._streams = streams
        self._delta = delta
        self._progress = progress
        self._context = None if tls is None else client_context(tls)
        self._groups = groups
        self._departed = departed
        self._stopped = stopped
        self._whole = whole_stream(self._nbytes, chunk_bytes)
        self._planned: tuple[tuple[str, ...], list[Stream | None]] | None = None
        self._pool: dict[tuple[int, bool], list[Connection]] = {}
        self._busy: set[Connection] = set()
        self._mapped: dict[tuple[int, int], Arena] = {}  # by the source's member and its arena's number
        self._owners: dict[Copy, tuple[Connection, bytes]] = {}
        self._best = 0.0  # bytes a second, of the fastest version so far

    def attempt(
        self,
        job: Job,
        sources: Sequence[Source],
        gathering: Gathering | None,
        reserve: Callable[[Job], tuple[Copy, Copy | None, Copy | None]],
    ) -> None:
        """Bring what is missing, from any of `sources`; returns when the version is whole.

        Args:
            gathering: of receivers that get this version by broadcast, which this one is part of.
            reserve: gives a copy to fill, an older whole one, and what the former's arena held before.

        Raises `Superseded` when no training rank holds the version any more; `CorruptChunk`, `LayoutMismatch`
        and `Unauthorized` when another attempt is of no use; `PublisherLost` when one may be.
        """
        job.failures.clear()
        self._forget({source.member for source in sources})
        if job.copy is None and gathering is None and "shm" in self._wires:
            near = [source for source in sources if self._can_map(source)]
            if any(self._attempt(job, [source], lambda one: self._map(job, one[0])) for source in near):
                return
        if job.transfer is None:
            job.copy, base, former = reserve(job)
            base = base if self._delta is not False else None
            if gathering is not None and self._gather(job, job.copy, gathering, sources):
                return
            job.transfer = Transfer(self._shelf, job.copy, base, former, self._departed)
        tiers = self._tiers(job, sources) if "tcp" in self._wires else []
        for number, tier in enumerate(tiers):
            last = number == len(tiers) - 1
            self._attempt(job, tier, lambda some, last=last: self._fetch(job, some, last))
            if job.transfer.copy.complete:
                self._rate(job)
                return
            if self._stopped():
                return
        self._raise(job, sources)

    def release(self, copy: Copy) -> None:
        """A copy is not read here any more; tells its owner when it was mapped."""
        connection, mark = self._owners.pop(copy, (None, b""))
        if connection is not None:
            try:
                connection.done(copy.version, mark)
            except OSError:
                return  # the owner has gone; so has its interest

    def cut(self) -> None:
        """End every connection, from another thread."""
        if self._groups is not None:
            self._groups.abort()
        for connection in [*list(self._busy), *(each for idle in list(self._pool.values()) for each in idle)]:
            connection.cut()

    def close(self) -> None:
        """Close every connection; by the thread that calls `attempt`, or after it has ended."""
        for idle in self._pool.values():
            for connection in idle:
                connection.close()
        self._pool.clear()
        if self._groups is not None:
            self._groups.close()
        for arena in self._mapped.values():
            arena.close()
        self._mapped.clear()

    def _gather(self, job: Job, copy: Copy, gathering: Gathering, sources: Sequence[Source]) -> bool:
        """Take part in a broadcast; False when something of the version is still missing."""
        ranks = [source for source in sources if source.rank >= 0]
        if self._groups is None or not ranks:
            return False

        def manifest() -> Manifest:
            connection = self._connect(ranks[0])
            try:
                found = connection.manifest(
                    job.target.version, job.mark(ranks[0]), self._nbytes, self._watch_waiting
                )
                connection.done(job.target.version, job.mark(ranks[0]))
            except BaseException:
                self._drop(connection)
                raise
            self._give_back(connection)
            return found

        try:
            whole = receive(self._groups, gathering, copy, manifest, self._shelf)
        except (OSError, DcsError, Superseded) as error:
            job.failures["collective"] = error
            if isinstance(error, CollectiveBroken) and not error.quiet:
                # The backend may still write to this memory: it is given up, and the version begins anew.
                copy.tainted = True
                raise ProtocolError(f"{error}; its buffer is given up") from error
            return False
        if whole:
            self._complete(job, copy, "collective")
        return whole

    # One source, or several at once.

    def _attempt(self, job: Job, sources: list[Source], fetch: Callable[[list[Source]], bool]) -> bool:
        try:
            return fetch(sources)
        except (OSError, DcsError, Superseded) as error:
            for source in sources:
                job.failures.setdefault(source.name, error)
            return False

    def _map(self, job: Job, source: Source) -> bool:
        mark = job.mark(source)
        connection, arena = self._map_arena(job, source, mark)
        chunks = manifests.chunk_count(self._nbytes, self._chunk_bytes)
        job.copy = shelves.whole(arena, job.target.version, job.root, self._chunk_bytes, [None] * chunks)
        self._owners[job.copy] = connection, mark
        self._give_back(connection)
        self._shelf.put(job.copy)
        job.wire = "shm"
        return True

    def _map_arena(self, job: Job, source: Source, mark: bytes) -> tuple[Connection, Arena]:
        while True:
            reused = bool(self._pool.get((source.member, True)))
            connection = self._connect(source, unix=True)
            try:
                number, descriptor, lowest = connection.map(job.target.version, mark, self._watch_waiting)
                if descriptor is not None:
                    before = self._mapped.pop((source.member, number), None)
                    if before is not None:  # given again over a new connection
                        before.close()
                    self._mapped[source.member, number] = Arena.map(self._layout, descriptor)
                elif (source.member, number) not in self._mapped:
                    raise ConnectionResetError(f"{source.name!r} named memory that is not mapped any more")
            except OSError:
                self._drop(connection)
                if not reused:  # else the source had cut it between versions
                    raise
                continue
            except BaseException:
                self._drop(connection)
                raise
            arena = self._mapped[source.member, number] = self._mapped.pop((source.member, number))
            known = [each for each in self._mapped if each[0] == source.member]
            for old in [each for each in known if each[1] < lowest] or known[:-MAX_ARENAS]:
                self._mapped.pop(old).close()  # its owner has given it up
            return connection, arena

    def _fetch(self, job: Job, sources: list[Source], last: bool) -> bool:
        transfer = job.transfer
        assert transfer is not None
        same = [source for source in sources if source.layout == self._fingerprint]
        same = [source for source in same if job.mark(source) == job.mark(same[0])]  # replicas, bit for bit
        pairs: list[tuple[Source, Stream]] = [(source, self._whole) for source in same]
        if not same:
            pairs = self._plan(job, sources)
        if self._delta is None and any(self._is_here(source) for source, _ in pairs):
            transfer.base = None
        coming = [self._whole] if same else [stream for _, stream in pairs]
        progress = dict(zip(map(id, coming), transfer.begin(coming), strict=True))
        lanes: list[Lane] = []
        try:
            for source, stream in pairs:
                wanted = 1 if self._is_here(source) else min(self._streams, max(1, len(stream)))
                for _ in range(wanted):
                    try:
                        connection = self._connect(source)
                    except (OSError, DcsError) as error:
                        job.failures[source.name] = error
                        break
                    lanes.append(
                        Lane(
                            transfer,
                            progress[id(stream)],
                            connection,
                            job.target.version,
                            job.mark(source),
                            wanted * (len(same) or 1),
                        )
                    )
            self._run(job, lanes, last)
        finally:
            self._account(job, lanes, {source.member: source for source in sources})
        self._finish(job, lanes, same)
        return transfer.copy.complete

    def _run(self, job: Job, lanes: list[Lane], last: bool) -> None:
        transfer = job.transfer
        assert transfer is not None
        if not lanes:
            return
        if len(lanes) == 1 and len(transfer.copy.hashes) <= _INLINE:
            lanes[0].run()
            return
        before, began = transfer.copy.remaining, time.monotonic()
        allowed = self._nbytes / self._best * _SLOW if self._best else _UNKNOWN_SECONDS

        def watch() -> float:
            remaining, now = transfer.copy.remaining, time.monotonic()
            if self._progress is not None:
                self._progress(self._nbytes - remaining, self._nbytes, job.target.version)
            rate = max(1.0, (before - remaining) / max(1e-6, now - began))
            patient = last or bool(transfer.starved) or now - began < _PATIENCE_SECONDS
            slow = not patient and remaining / rate > max(allowed, _PATIENCE_SECONDS)
            if slow:
                job.slow |= {lane.connection.source.member for lane in lanes if not lane.ended}
            if slow or self._stopped():
                for lane in lanes:
                    lane.connection.cut()
            return _WATCH_SECONDS

        run_lanes(lanes, watch)

    def _account(self, job: Job, lanes: list[Lane], sources: dict[int, Source]) -> None:
        """Take what the lanes have brought into the books, and their connections back."""
        transfer = job.transfer
        assert transfer is not None
        for member, count in transfer.received.items():
            if member in sources and sources[member].rank >= 0:
                job.from_ranks += count
            else:
                job.from_peers += count
        transfer.received.clear()
        for lane in lanes:
            if lane.error is None:
                self._give_back(lane.connection)
            else:
                job.failures[lane.connection.source.name] = lane.error
                self._drop(lane.connection)

    def _finish(self, job: Job, lanes: list[Lane], same: list[Source]) -> None:
        transfer, copy = job.transfer, job.copy
        assert transfer is not None
        assert copy is not None
        if not transfer.done or copy.missing.any():
            return
        for lane in lanes:
            source = lane.connection.source
            whole = source in same and source.rank >= 0 and lane.error is None
            whole = whole and manifests.is_content(job.target.roots[source.rank])
            if whole and lane.connection.welcome.chunk_bytes == self._chunk_bytes:
                hashes = [copy.hash(index) for index in range(len(copy.hashes))]
                root = manifests.root_hash(self._fingerprint, self._chunk_bytes, hashes)
                if root != job.target.roots[source.rank]:
                    with self._shelf.changed:
                        copy.missing[:] = self._chunk_bytes
                    raise CorruptChunk(
                        f"version {job.target.version} from {source.name!r} has root {root.hex()}, announced"
                        f" was {job.target.roots[source.rank].hex()}"
                    )
                break
        self._complete(job, copy, "tcp+delta" if transfer.differences else "tcp")
        for lane in lanes:
            if lane.error is None:
                try:
                    lane.connection.done(job.target.version, job.mark(lane.connection.source))
                except OSError:
                    continue  # found out at its next use

    def _complete(self, job: Job, copy: Copy, wire: str) -> None:
        with self._shelf.changed:
            copy.complete = True
            self._shelf.notify()
        job.wire = wire
        if self._progress is not None:
            self._progress(self._nbytes, self._nbytes, job.target.version)

    # Choosing.

    def _tiers(self, job: Job, sources: Sequence[Source]) -> list[list[Source]]:
        """Whom to ask at once, in the coordinator's order: those who have it, a relay, the ranks."""
        mapped = [source for source in sources if "shm" in self._wires and self._can_map(source)]
        order = [source for source in sources if source not in mapped] + mapped
        usable = [
            source
            for source in order
            if source.rank >= 0 or (source.layout == self._fingerprint and source.member not in job.slow)
        ]
        ranks = [source for source in usable if source.rank >= 0]
        holders = [source for source in usable if source.rank < 0 and source.holds][:_HOLDERS]
        together = [rank for rank in ranks if rank.layout == self._fingerprint] or ranks
        tiers: list[list[Source]] = []
        for source in usable:
            tier = together if source.rank >= 0 else holders if source.holds else [source]
            if tier not in tiers and (source in tier or source.rank >= 0):
                tiers.append(tier)
        return tiers

    def _plan(self, job: Job, ranks: list[Source]) -> list[tuple[Source, Stream]]:
        """The stream from each rank that has something for this layout."""
        key = tuple(source.layout for source in ranks)
        if self._planned is None or self._planned[0] != key:
            wanted = sorted(set(key) - self._known.keys())
            if wanted:
                self._known |= self._layouts(wanted)
            missing = sorted(set(key) - self._known.keys())
            if missing:
                raise ProtocolError(f"the coordinator does not know the layouts {', '.join(missing)}")
            try:
                made = plan(
                    self._layout,
                    [self._known[each] for each in key],
                    turn=self._hello().member,
                    who=self._hello().name,
                )
            except LayoutMismatch as error:
                lost = len(job.target.roots) - len(ranks)
                if not lost:
                    raise
                raise PublisherLost(
                    f"{lost} of the {len(job.target.roots)} ranks that published version"
                    f" {job.target.version} of run {job.target.run!r} are gone, with what only they had;"
                    " waiting for the trainer to come back"
                ) from error
            streams = [
                Stream(rows, self._chunk_bytes, whole=False) if len(rows) else None for rows in made.blocks
            ]
            self._planned = key, streams
        return [
            (source, stream)
            for source, stream in zip(ranks, self._planned[1], strict=True)
            if stream is not None
        ]

    def _can_map(self, source: Source) -> bool:
        return source.layout == self._fingerprint and bool(source.endpoint.path) and self._is_here(source)

    def _is_here(self, source: Source) -> bool:
        return source.endpoint.machine == machine_id()

    def _rate(self, job: Job) -> None:
        self._best = max(self._best, self._nbytes / max(1e-3, time.monotonic() - job.began))

    def _raise(self, job: Job, sources: Sequence[Source]) -> None:
        """Say why it did not work, from what each source answered."""
        ranks = [
            job.failures[source.name]
            for source in sources
            if source.rank >= 0 and source.name in job.failures
        ]
        errors = ranks or list(job.failures.values())
        if any(isinstance(error, Superseded) for error in ranks):
            raise Superseded
        for error in errors:
            final = isinstance(error, DcsError) and not isinstance(error, ProtocolError)
            if final and (isinstance(error, LayoutMismatch) or error in ranks):
                raise error
        reasons = "; ".join(
            f"{source.name} at {where(source.endpoint)}: {job.failures[source.name]!r}"
            for source in sources
            if source.name in job.failures
        )
        raise PublisherLost(
            f"version {job.target.version} of run {job.target.run!r} cannot be pulled now:"
            f" {reasons or 'no source is known'}"
        )

    # Connections.

    def _connect(self, source: Source, unix: bool = False) -> Connection:
        idle = self._pool.get((source.member, unix))
        if idle:
            connection = idle.pop()
        else:
            connection = Connection(source, unix, self._context)
            self._busy.add(connection)
            try:
                if self._stopped():
                    raise ConnectionAbortedError("closed while connecting")
                connection.greet(self._hello())
            except BaseException:
                self._drop(connection)
                raise
        self._busy.add(connection)
        return connection

    def _give_back(self, connection: Connection) -> None:
        self._busy.discard(connection)
        self._pool.setdefault((connection.source.member, connection.unix), []).append(connection)

    def _forget(self, members: set[int]) -> None:
        """Let go of connections to, and memory of, those who are no sources any more."""
        for member, unix in [key for key in self._pool if key[0] not in members]:
            for connection in self._pool.pop((member, unix)):
                connection.close()
        for key in [key for key in self._mapped if key[0] not in members]:
            self._mapped.pop(key).close()

    def _drop(self, connection: Connection) -> None:
        self._busy.discard(connection)
        connection.close()

    def _watch_waiting(self) -> None:
        if self._stopped():
            raise ConnectionAbortedError("closed while waiting")
