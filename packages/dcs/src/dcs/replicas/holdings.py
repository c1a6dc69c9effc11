"""What a keeper holds: names, attempts, steps, shards. No sockets; every method may be called from any
thread.

An attempt is one start of a run, known by its session. Its number orders it among the others: the newest may
save, older ones only be read. A shard is visible to others once it is whole; one that is still arriving is
not.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dcs.errors import Closed, DcsError, Evicted, ProtocolError, StaleVersion, Timeout
from dcs.replicas.errors import WorldSizeMismatch
from dcs.replicas.memory import Memory, Region
from dcs.replicas.messages import (
    AttemptRecord,
    Choice,
    Drop,
    Fetch,
    Floor,
    Inventory,
    NameStatus,
    Shard,
    StepRecord,
)

MAX_NAMES = 1024
KEPT_ATTEMPTS = 8  # without shards, so that an old rank is still known as old
TAKEOVER_SECONDS = 10.0


@dataclass(eq=False)
class Kept:
    """A shard that is whole. It goes once it is `doomed` and nobody reads it."""

    shard: Shard
    region: Region
    readers: int = 0
    doomed: bool = False


@dataclass(eq=False)
class Arriving:
    """A shard of which the chunks in `missing` are not here yet. `guard` is held by the one who receives
    it.
    """

    shard: Shard
    region: Region
    missing: set[int]
    guard: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False  # held, or given up: its region is no longer its own


@dataclass(eq=False)
class _Attempt:
    session: str
    number: int
    world_size: int
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)  # by step and rank
    arriving: dict[int, Arriving] = field(default_factory=dict)  # by rank
    choice: Choice | None = None

    def record(self) -> AttemptRecord:
        ranks: dict[int, list[int]] = {}
        for (step, rank), kept in self.kept.items():
            if not kept.doomed:
                ranks.setdefault(step, []).append(rank)
        steps = tuple(StepRecord(step, tuple(sorted(ranks[step]))) for step in sorted(ranks))
        return AttemptRecord(self.session, self.number, self.world_size, steps, self.choice)


@dataclass(eq=False)
class _Run:
    attempts: dict[str, _Attempt] = field(default_factory=dict)
    generation: int = 1

    def newest(self) -> int:
        return max((attempt.number for attempt in self.attempts.values()), default=0)


@dataclass(eq=False)
class _Watcher:
    """Somebody who waits for news of a name, other than what came from one rank of one session: itself."""

    name: str
    source: tuple[str, int] | None
    news: threading.Condition


class Holdings:
    """The shards of a keeper, within `memory`."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._runs: dict[str, _Run] = {}
        self._lock = threading.RLock()
        self._watchers: list[_Watcher] = []
        self._closed = False

    def close(self) -> None:
        """Wake everybody who waits; they raise `Closed`."""
        with self._lock:
            self._closed = True
            for watcher in self._watchers:
                watcher.news.notify()

    def let_go(self) -> None:
        """Give back the memory of all shards, also what ranks have lent. Nobody may be connected any more."""
        with self._lock:
            for attempt in [attempt for run in self._runs.values() for attempt in run.attempts.values()]:
                for kept in list(attempt.kept.values()):
                    self._doom(attempt, kept)

    # -- attempts --

    def open(self, name: str, session: str, number: int, world_size: int) -> None:
        """Make `session` known; the number of an attempt only grows. Raises `WorldSizeMismatch`,
        `DcsError`.
        """
        with self._lock:
            run = self._run(name)
            attempt = run.attempts.get(session)
            if attempt is None:
                # Milliseconds: also a keeper that has lost its memory gives out greater numbers than before,
                # unless the clock was set back meanwhile, and no other keeper is in reach that knows better.
                number = number or max(run.newest() + 1, time.time_ns() // 1_000_000)
                run.attempts[session] = _Attempt(session, number, world_size)
                self._prune(run)
                self._change(run)
            elif attempt.world_size != world_size:
                raise WorldSizeMismatch(
                    f"session {session!r} of {name!r} has {attempt.world_size} ranks, a rank came with "
                    f"world_size {world_size}; all ranks of a session give the same, and each start of a run "
                    "a new session"
                )
            elif number > attempt.number:
                attempt.number = number
                self._change(run)

    def choose(self, name: str, session: str, choice: Choice) -> None:
        """Note what rank 0 of a session has chosen for all its ranks."""
        with self._lock:
            run = self._run(name)
            self._attempt(run, name, session).choice = choice
            self._change(run)

    def inventory(
        self, name: str, generation: int, seconds: float, source: tuple[str, int] | None = None
    ) -> Inventory:
        """All that is held under a name, as soon as it is another generation than that, or after
        `seconds`.

        What a `source` (session and rank) saves meanwhile does not end the wait.
        """
        deadline = time.monotonic() + seconds
        with self._lock:
            while True:
                if self._closed:
                    raise Closed("the keeper is closing")
                run = self._runs.get(name)
                now = 0 if run is None else run.generation
                left = deadline - time.monotonic()
                if now != generation or left <= 0:
                    records = () if run is None else tuple(a.record() for a in run.attempts.values())
                    return Inventory(now, records)
                watcher = _Watcher(name, source, threading.Condition(self._lock))
                self._watchers.append(watcher)
                try:
                    watcher.news.wait(left)
                finally:
                    self._watchers.remove(watcher)

    # -- shards --

    def begin(self, shard: Shard) -> Arriving | None:
        """Make room for a shard, or take up the one of which a part is here; None when it is held already.

        The caller has the `guard` of what it gets, and releases it. Raises `Evicted` (a newer attempt has
        taken over), `StaleVersion` (another process saves as this rank), `KeeperFull`, `ProtocolError`.
        """
        with self._lock:
            attempt, there = self._admit(shard)
            if there is not None:
                return None
            arriving = attempt.arriving.get(shard.rank)
        if arriving is not None:
            # Its connection was cut, or it will be in a moment: this one has come after it.
            if not arriving.guard.acquire(timeout=TAKEOVER_SECONDS):
                raise Timeout(f"{shard} still arrives on another connection")
            with self._lock:
                if arriving.shard == shard and not arriving.ended:
                    return arriving
                self._discard(attempt, arriving)
            arriving.guard.release()
        arriving = Arriving(shard, self.memory.buffer(shard.nbytes, str(shard)), set(range(shard.chunks)))
        arriving.guard.acquire()
        with self._lock:
            try:
                attempt, there = self._admit(shard)
            except DcsError:
                self.memory.give_back(arriving.region)
                raise
            if there is not None or shard.rank in attempt.arriving:
                self.memory.give_back(arriving.region)
                if there is not None:
                    return None
                raise StaleVersion(f"{shard} is being sent twice at a time; is its rank number used twice?")
            attempt.arriving[shard.rank] = arriving
        return arriving

    def finish(self, arriving: Arriving) -> None:
        """The shard is whole: show it. Raises `Evicted` when a newer attempt has taken over meanwhile."""
        with self._lock:
            shard = arriving.shard
            if arriving.ended:
                raise StaleVersion(f"{shard} was dropped while it arrived")
            arriving.ended = True
            run = self._run(shard.name)
            attempt = run.attempts.get(shard.session)
            if attempt is not None and attempt.arriving.get(shard.rank) is arriving:
                del attempt.arriving[shard.rank]
            try:
                attempt, there = self._admit(shard)
            except DcsError:
                self.memory.give_back(arriving.region)
                raise
            if there is not None:
                self.memory.give_back(arriving.region)
                return
            attempt.kept[shard.step, shard.rank] = Kept(shard, arriving.region)
            self._change(run, (shard.session, shard.rank))

    def abandon(self, arriving: Arriving) -> None:
        """Forget a shard of which no more will come; whoever calls has its `guard`."""
        with self._lock:
            run = self._runs.get(arriving.shard.name)
            attempt = None if run is None else run.attempts.get(arriving.shard.session)
            if attempt is not None:
                self._discard(attempt, arriving)

    def hold(self, shard: Shard, region: Region) -> None:
        """Hold a shard that was handed over. Takes the region; raises as `begin`."""
        with self._lock:
            try:
                attempt, there = self._admit(shard)
            except DcsError:
                self.memory.give_back(region)
                raise
            if there is not None:
                self.memory.give_back(region)
                if there.region.mapped:
                    return
                raise StaleVersion(f"{shard} is held already, in memory of the keeper's own")
            attempt.kept[shard.step, shard.rank] = Kept(shard, region)
            self._change(self._run(shard.name), (shard.session, shard.rank))

    def drop(self, which: Drop) -> bool:
        """Let go of a shard; False when somebody reads it, so that it will go a little later.

        Raises `Evicted` when a newer attempt has taken over, which may want to restore it.
        """
        with self._lock:
            run = self._runs.get(which.name)
            attempt = None if run is None else run.attempts.get(which.session)
            if run is None or attempt is None:
                return True
            arriving = attempt.arriving.get(which.rank)
            if arriving is not None and arriving.shard.step == which.step:
                self._give_up(attempt, arriving)
            kept = attempt.kept.get((which.step, which.rank))
            if kept is None:
                return True
            self._newest(run, attempt, str(kept.shard))
            self._doom(attempt, kept)
            return (which.step, which.rank) not in attempt.kept

    def retain(self, name: str, session: str, floor: Floor | None) -> None:
        """Let go of what is older than a floor, if the newest attempt says so."""
        with self._lock:
            run = self._runs.get(name)
            if run is None or floor is None or session not in run.attempts:
                return
            if run.attempts[session].number < run.newest():
                return
            oldest = (floor.oldest.attempt, floor.oldest.step)
            for attempt in list(run.attempts.values()):
                for kept in list(attempt.kept.values()):
                    shard = kept.shard
                    anchored = floor.anchor is not None and (shard.session, shard.step) == (
                        floor.anchor.session,
                        floor.anchor.step,
                    )
                    if (attempt.number, shard.step) < oldest and not anchored:
                        self._doom(attempt, kept)
                for arriving in list(attempt.arriving.values()):
                    if (attempt.number, arriving.shard.step) < oldest:
                        self._give_up(attempt, arriving)
            self._prune(run)

    def forget(self, name: str) -> None:
        """Let go of everything under a name."""
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                return
            for attempt in run.attempts.values():
                for kept in list(attempt.kept.values()):
                    self._doom(attempt, kept)
                for arriving in list(attempt.arriving.values()):
                    self._give_up(attempt, arriving)
            self._change(run)
        self.memory.trim()

    @contextmanager
    def reading(self, which: Fetch | Shard) -> Iterator[Kept]:
        """A shard, which stays for as long as it is read. Raises `StaleVersion` when it is not held."""
        with self._lock:
            run = self._runs.get(which.name)
            attempt = None if run is None else run.attempts.get(which.session)
            kept = None if attempt is None else attempt.kept.get((which.step, which.rank))
            if run is None or attempt is None or kept is None or kept.doomed:
                raise StaleVersion(
                    f"step {which.step} of rank {which.rank} of {which.name!r} (session {which.session!r}) "
                    "is not held here any more"
                )
            kept.readers += 1
        try:
            yield kept
        finally:
            with self._lock:
                kept.readers -= 1
                if kept.doomed:
                    self._doom(attempt, kept)

    def older(self, shard: Shard) -> Shard | None:
        """The newest shard of the same rank and size that is held: most of a shard may equal it."""
        with self._lock:
            run = self._run(shard.name)
            found = [
                (attempt.number, kept.shard.step, kept.shard)
                for attempt in run.attempts.values()
                for kept in attempt.kept.values()
                if not kept.doomed and (kept.shard.rank, kept.shard.nbytes) == (shard.rank, shard.nbytes)
            ]
        return max(found, key=lambda entry: entry[:2])[2] if found else None

    def status(self) -> tuple[NameStatus, ...]:
        """What is held under each name."""
        with self._lock:
            return tuple(
                NameStatus(
                    name,
                    sum(k.shard.nbytes for a in run.attempts.values() for k in a.kept.values()),
                    tuple(attempt.record() for attempt in run.attempts.values()),
                )
                for name, run in sorted(self._runs.items())
            )

    # -- with the lock held --

    def _run(self, name: str) -> _Run:
        if name not in self._runs:
            if len(self._runs) >= MAX_NAMES:
                raise DcsError(
                    f"{len(self._runs)} names are kept here already, {name!r} would be one too many"
                )
            self._runs[name] = _Run()
        return self._runs[name]

    def _attempt(self, run: _Run, name: str, session: str) -> _Attempt:
        attempt = run.attempts.get(session)
        if attempt is None:
            raise ProtocolError(f"session {session!r} of {name!r} was not opened here")
        return attempt

    def _newest(self, run: _Run, attempt: _Attempt, what: str) -> None:
        newest = max(run.attempts.values(), key=lambda a: a.number)
        if newest.number > attempt.number:
            raise Evicted(
                f"{what}: session {newest.session!r} (attempt {newest.number}) has taken over from"
                f" {attempt.session!r} (attempt {attempt.number}); this rank is of a start that is over, "
                f"and has to end"
            )

    def _admit(self, shard: Shard) -> tuple[_Attempt, Kept | None]:
        run = self._run(shard.name)
        attempt = self._attempt(run, shard.name, shard.session)
        self._newest(run, attempt, str(shard))
        if shard.world_size != attempt.world_size or shard.rank >= shard.world_size:
            raise ProtocolError(f"{shard} of {shard.world_size} ranks, its session has {attempt.world_size}")
        there = attempt.kept.get((shard.step, shard.rank))
        if there is not None and there.doomed:
            raise StaleVersion(f"{shard} was dropped, and is still being read")
        if there is not None and there.shard != shard:
            raise StaleVersion(
                f"{shard} is held with other bytes; is its rank number, or its step, used twice?"
            )
        return attempt, there

    def _doom(self, attempt: _Attempt, kept: Kept) -> None:
        # No news for those who watch: they said what may go, and see it with the next shard that comes.
        kept.doomed = True
        if not kept.readers and attempt.kept.pop((kept.shard.step, kept.shard.rank), None) is not None:
            self.memory.give_back(kept.region)

    def _give_up(self, attempt: _Attempt, arriving: Arriving) -> None:
        """Forget a shard that is arriving, at once if nobody receives it, else when its connection ends."""
        if arriving.guard.acquire(blocking=False):
            self._discard(attempt, arriving)
            arriving.guard.release()

    def _discard(self, attempt: _Attempt, arriving: Arriving) -> None:
        if not arriving.ended:
            arriving.ended = True
            attempt.arriving.pop(arriving.shard.rank, None)
            self.memory.give_back(arriving.region)

    def _prune(self, run: _Run) -> None:
        empty = [a for a in run.attempts.values() if not a.kept and not a.arriving]
        newest = run.newest()
        for attempt in sorted(empty, key=lambda a: a.number)[:-KEPT_ATTEMPTS]:
            if attempt.number != newest:
                del run.attempts[attempt.session]

    def _change(self, run: _Run, source: tuple[str, int] | None = None) -> None:
        run.generation += 1
        for watcher in self._watchers:
            if self._runs.get(watcher.name) is run and (source is None or watcher.source != source):
                watcher.news.notify()
