"""The engine pool: which replica takes a group, and at which versions the replicas are."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from relax.backends.inference.base import Health, InferenceEngine
from relax.distributed.version_clock import VersionClock
from relax.engine.batching import Batching


class PooledEngine(InferenceEngine, Protocol):
    """An engine whose commits can be awaited."""

    async def wait_version(self, version: int, timeout: float) -> int:
        """The committed version, once it is at least `version`. Raises TimeoutError."""
        ...


@dataclass
class Replica:
    """One engine of the pool. `episodes` counts those running on it."""

    name: str
    engine: PooledEngine
    front: Batching
    episodes: int = 0


class EnginePool:
    """Replicas by name, each watched for the versions it commits."""

    def __init__(
        self,
        engines: Mapping[str, PooledEngine],
        batching: Callable[[InferenceEngine], Batching],
        clock: VersionClock,
        commit_timeout: float,
    ) -> None:
        self.replicas = {name: Replica(name, engine, batching(engine)) for name, engine in engines.items()}
        self._clock = clock
        self._commit_timeout = commit_timeout
        self._changed = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        for name in engines:
            clock.joined(name)

    def start(self) -> None:
        """Begin to follow the versions of all replicas."""
        self._watchers = [asyncio.create_task(self._watch(replica)) for replica in self.replicas.values()]

    async def _watch(self, replica: Replica) -> None:
        version = -1
        try:
            while True:
                try:
                    version = await replica.engine.wait_version(version + 1, self._commit_timeout)
                except TimeoutError:
                    continue
                self._clock.committed(replica.name, version)
                self._changed.set()
        except Exception as error:
            self._failure = error
            self._changed.set()
            raise

    async def wait_startable(self, step: int) -> None:
        """Wait until some replica may start a group of `step`."""
        while not self._clock.routable(step):
            await self._next_change()

    async def wait_may_start(self, step: int, name: str) -> None:
        """Wait until the replica `name` may start a group of `step`."""
        while not self._clock.may_start(step, name):
            await self._next_change()

    async def wait_all_at(self, version: int) -> None:
        """Wait until every replica serves at least `version`."""
        while any(served < version for served in self._clock.engines.values()):
            await self._next_change()

    async def _next_change(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def oldest_served(self, step: int) -> int:
        """The oldest version among the replicas that may start a group of `step`; there must be one."""
        return min(self._clock.engines[name] for name in self._clock.routable(step))

    def least_loaded(self, step: int) -> Replica:
        """The replica with the fewest episodes among those that may start a group of `step`."""
        return min(
            (self.replicas[name] for name in self._clock.routable(step)), key=lambda r: (r.episodes, r.name)
        )

    def by_ordinal(self, ordinal: int) -> Replica:
        """The replica a group belongs to under static assignment."""
        names = sorted(self.replicas)
        return self.replicas[names[ordinal % len(names)]]

    async def health(self) -> dict[str, Health]:
        found = await asyncio.gather(*(replica.engine.health() for replica in self.replicas.values()))
        return dict(zip(self.replicas, found, strict=True))

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(replica.front.close() for replica in self.replicas.values()))
