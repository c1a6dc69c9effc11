"""The engine pool: which replicas there are, at which versions, and what becomes of those that are lost.

A replica is lost when a call on it says so, when its supervisor does, or when it answers but does not get on
(`ProgressWatch`). It leaves the pool at once: nothing is placed there, nobody waits for its versions, and its
requests are placed again (`Seat`). Its supervisor starts another of the same name, or says that it will not;
one that is started joins without weights, and is used once it has committed the newest version.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentic import GenerationRequest

from relax.backends.inference.base import FinishedGeneration, Health, InferenceEngine
from relax.backends.inference.errors import EngineLost, EngineNotBuilt
from relax.distributed.version_clock import VersionClock
from relax.engine.batching import Batching, Generates
from relax.engine.failover import LOSSES, NoReplicaLeft, ProgressWatch, as_lost
from relax.engine.router import Ask, Placement, Router

LOOKS_PER_STALL = 4
"""Looks at a replica's health within the time after which it counts as stalled."""


class PooledEngine(InferenceEngine, Protocol):
    """An engine whose commits can be awaited."""

    async def wait_version(self, version: int, timeout: float) -> int:
        """The committed version, once it is at least `version`. Raises TimeoutError."""
        ...


class ReplicaEngine(Protocol):
    """What the pool asks of a replica, in this process or another. Any call may raise `EngineLost`."""

    async def built(self) -> None:
        """Wait until it is there; how long a start may take is its supervisor's affair. Raises
        `EngineNotBuilt`.
        """
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]: ...

    async def abort(self, request_id: str) -> None: ...

    async def wait_version(self, version: int, timeout: float) -> int: ...

    async def health(self) -> Health: ...

    async def discard(self, reason: str) -> None:
        """The pool has given this replica up: end what is left of it, so that its supervisor may start
        another.
        """
        ...


@dataclass(eq=False)
class Replica:
    """One engine of the pool, from joining to leaving."""

    name: str
    engine: ReplicaEngine
    front: Batching
    requests: int = 0
    """Asked of it and not answered."""
    health: Health | None = None
    heard: float = field(default_factory=time.monotonic)
    watchers: list[asyncio.Task[None]] = field(default_factory=list)


class EnginePool:
    """Replicas by name, each watched for the versions it commits and for its progress.

    Args:
        engines: by name.
        batching: makes the front of each.
        clock: is told which versions are served, who joins and who leaves.
        commit_timeout: seconds of one wait for a version; it is renewed.
        placement: which replica a request goes to; the pool's own router when not given.
        stall_seconds: a replica with requests that has not got on for so long is lost; None: it may take its
            time. It counts from when the replica is built.
        failover: False: a lost replica is the end (a replay follows what was, and nothing was lost then).
    """

    def __init__(
        self,
        engines: Mapping[str, ReplicaEngine],
        batching: Callable[[Generates], Batching],
        clock: VersionClock,
        commit_timeout: float,
        *,
        placement: Placement | None = None,
        stall_seconds: float | None = None,
        failover: bool = True,
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.placement: Placement = placement if placement is not None else Router()
        self.moved = 0
        """Requests that were asked of a second engine because the first one was lost."""
        self._batching = batching
        self._clock = clock
        self._commit_timeout = commit_timeout
        self._stall_seconds = stall_seconds
        self._failover = failover
        self.events: Callable[..., None] = lambda event, **data: None
        """Told of every loss and return, by name and with what belongs to it."""
        self._changed = asyncio.Event()
        self._started = self._closed = False
        self._away: dict[str, float] = {}  # replicas that are lost and may come back: since when
        self._given_up: dict[str, str] = {}  # those that will not: why
        self._ending: set[asyncio.Task[None]] = set()
        self._lost_tokens = 0
        self.failure: BaseException | None = None
        """What ends the run."""
        for name, engine in engines.items():
            self._join(name, engine)

    def start(self) -> None:
        """Begin to follow the versions and the progress of all replicas."""
        self._started = True
        for replica in self.replicas.values():
            self._watch(replica)

    # Replicas come and go

    def _join(self, name: str, engine: ReplicaEngine) -> Replica:
        replica = self.replicas[name] = Replica(name, engine, self._batching(engine))
        self._clock.joined(name)
        self.placement.joined(name)
        return replica

    def lose(self, replica: Replica, error: BaseException | str) -> EngineLost:
        """A replica is lost; returns its loss. It may be said more than once."""
        if isinstance(error, str):
            lost = EngineLost(replica.name, error)
        else:
            lost = as_lost(replica.name, error) or EngineLost(replica.name, str(error))
        if self._closed or self.replicas.get(replica.name) is not replica:
            return lost
        now = time.monotonic()
        del self.replicas[replica.name]
        self._away.setdefault(replica.name, now)
        self._clock.left(replica.name)
        self.placement.left(replica.name)
        if replica.health is not None:
            self._lost_tokens += replica.health.generated_tokens
        self.events(
            "engine lost",
            engine=replica.name,
            reason=lost.reason,
            requests=replica.requests,
            seconds=now - replica.heard,
        )
        if not self._failover:
            self.failure = lost
        for watcher in replica.watchers:
            if watcher is not asyncio.current_task():
                watcher.cancel()
        self._spawn(self._end(replica, lost))
        self.wake()
        return lost

    async def _end(self, replica: Replica, lost: EngineLost) -> None:
        await replica.front.fail(lost)
        await replica.engine.discard(lost.reason)

    def engine_lost(self, name: str, reason: str, *, restarting: bool) -> None:
        """The supervisor of a replica says that it is gone, and whether another one is being started."""
        if self._closed:
            return
        if (replica := self.replicas.get(name)) is not None:
            self.lose(replica, reason)
        if not restarting:
            self._away.pop(name, None)
            self._given_up[name] = reason
            self.events("engine given up", engine=name, reason=reason)
            if not self.replicas and not self._away:
                self.failure = NoReplicaLeft(self._given_up)
            self.wake()

    def engine_back(self, name: str, engine: ReplicaEngine) -> None:
        """Another engine takes the place of a lost one. It is used once it has weights."""
        if self._closed:
            return
        replica = self._join(name, engine)
        if self._started:
            self._watch(replica)
        self.wake()

    # What they are watched for

    def _watch(self, replica: Replica) -> None:
        watches = [self._watch_versions(replica)]
        if self._stall_seconds is not None:
            watches.append(self._watch_progress(replica, self._stall_seconds))
        replica.watchers = [asyncio.create_task(self._guard(replica, watch)) for watch in watches]

    async def _guard(self, replica: Replica, watch: Coroutine[Any, Any, None]) -> None:
        """Run a watch once the replica is built; a replica that is lost ends it, any other fault ends the
        run. One that is never built is its supervisor's to tell of, who knows the whole of it.
        """
        try:
            await replica.engine.built()
        except EngineNotBuilt:
            watch.close()
            return
        except LOSSES as error:
            watch.close()
            self.lose(replica, error)
            return
        except asyncio.CancelledError:
            watch.close()
            raise
        replica.heard = time.monotonic()
        try:
            await watch
        except LOSSES as error:
            self.lose(replica, error)
        except Exception as error:
            self.failure = error
            self.wake()
            raise

    async def _watch_versions(self, replica: Replica) -> None:
        version = -1
        while True:
            try:
                version = await replica.engine.wait_version(version + 1, self._commit_timeout)
            except TimeoutError:
                continue
            replica.heard = time.monotonic()
            self._clock.committed(replica.name, version)
            self.placement.committed(replica.name)
            if (since := self._away.pop(replica.name, None)) is not None:
                self.events(
                    "engine back", engine=replica.name, version=version, seconds=replica.heard - since
                )
            self.wake()

    async def _watch_progress(self, replica: Replica, seconds: float) -> None:
        watch = ProgressWatch()
        while True:
            await asyncio.sleep(seconds / LOOKS_PER_STALL)
            try:
                async with asyncio.timeout(seconds):
                    health = await replica.engine.health()
            except TimeoutError:
                self.lose(replica, f"it has not said for {seconds:g} s how it is (rollout.stall_seconds)")
                return
            if not health.alive:
                self.lose(replica, "it says that it has ended")
                return
            before, replica.health = replica.health, health
            if before is None or before.decode_steps != health.decode_steps:
                replica.heard = time.monotonic()
            if watch.idle_seconds(health, replica.requests, time.monotonic()) >= seconds:
                self.lose(
                    replica,
                    f"it answers, but has not got on for {seconds:g} s (rollout.stall_seconds) with "
                    f"{max(replica.requests, health.running)} requests, at decode step "
                    f"{health.decode_steps} of version {health.version}",
                )
                return

    # What rollout waits for

    async def place(self, ask: Ask, step: int, stopped: Callable[[], bool]) -> Replica | None:
        """The replica for a request of a group of `step`, once one may start it; None when it is `stopped`
        before.
        """
        while not stopped():
            self._raise_failure()
            name = self.placement.place(ask, lambda name: self._clock.may_start(step, name))
            if name is not None:
                return self.replicas[name]
            await self._next_change()
        return None

    async def wait_startable(self, step: int) -> None:
        """Wait until some replica may start a group of `step`."""
        while not self._clock.routable(step):
            await self._next_change()

    async def wait_may_start(self, step: int, name: str) -> None:
        """Wait until the replica `name` may start a group of `step`."""
        while not self._clock.may_start(step, name):
            await self._next_change()

    async def wait_all_at(self, version: int) -> None:
        """Wait until every replica that is there serves at least `version`, and there is one."""
        while not self._clock.engines or any(served < version for served in self._clock.engines.values()):
            await self._next_change()

    def wake(self) -> None:
        """Have everyone who waits here look again."""
        self._changed.set()

    async def _next_change(self) -> None:
        self._raise_failure()
        self._changed.clear()
        await self._changed.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def oldest_served(self, step: int) -> int:
        """The oldest version among the replicas that may start a group of `step`; there must be one."""
        return min(self._clock.engines[name] for name in self._clock.routable(step))

    async def generated_tokens(self) -> int:
        """What the engines say they have sampled; of those that were lost, what they had last said."""
        found = self._lost_tokens
        for replica in list(self.replicas.values()):
            try:
                async with asyncio.timeout(self._commit_timeout):
                    replica.health = await replica.engine.health()
            except (TimeoutError, EngineNotBuilt, *LOSSES):
                pass  # it counts with what it said last
            found += replica.health.generated_tokens if replica.health is not None else 0
        return found

    async def close(self) -> None:
        """Stop watching; requests that are open end with an error. Idempotent."""
        self._closed = True
        replicas = list(self.replicas.values())
        watchers = [watcher for replica in replicas for watcher in replica.watchers]
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, *self._ending, return_exceptions=True)
        await asyncio.gather(*(replica.front.close() for replica in replicas))

    def _spawn(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
