"""A role's worker as a Ray actor, and an engine that lives in one, as the rollout sees it."""

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from agentic import GenerationRequest
from ray.exceptions import RayActorError

from relax.backends.inference.base import FinishedGeneration, Health
from relax.backends.inference.errors import EngineLost
from relax.components.context import RunContext
from relax.components.host import RoleHost
from relax.distributed.bus import Endpoint
from relax.ops.reports import Report


class RoleWorker:
    """A Ray actor around one role host; an engine's worker also answers generation calls."""

    def __init__(self, role: str, context: RunContext, engines: Mapping[str, Any] | None = None) -> None:
        remotes = {name: RemoteEngine(name, handle) for name, handle in (engines or {}).items()}
        self._host = RoleHost(role, context, remotes)
        self._cluster = context.config.ray.address is not None
        self._finished: list[FinishedGeneration | tuple[list[str], BaseException]] = []
        self._arrived = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()

    async def build(self) -> None:
        await self._host.build()

    async def run(self) -> None:
        await self._host.run()

    async def rendezvous(self) -> Endpoint:
        """Open the seat of a trainer's leader where its ranks reach it: on loopback with an embedded Ray."""
        return await self._host.rendezvous(ray.util.get_node_ip_address() if self._cluster else "127.0.0.1")

    async def stop(self) -> None:
        self._host.stop()

    async def pid(self) -> int:
        return os.getpid()

    async def drain(self) -> list[Report]:
        return self._host.drain()

    # The rollout's worker, and the actor's

    async def engine_lost(self, name: str, reason: str, restarting: bool) -> None:
        await self._host.engine_lost(name, reason, restarting)

    async def engine_back(self, name: str, handle: Any) -> None:
        await self._host.engine_back(name, RemoteEngine(name, handle))

    async def engines_away(self, names: Collection[str]) -> None:
        await self._host.engines_away(names)

    # An engine's worker

    async def built(self) -> None:
        """Return once its engine is there. Raises `EngineNotBuilt`."""
        await self._host.engine()

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Admit requests; their generations come out of `collect`."""
        call = asyncio.create_task(self._generate(requests))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _generate(self, requests: Sequence[GenerationRequest]) -> None:
        try:
            async for finished in (await self._host.engine()).generate(requests):
                self._finished.append(finished)
                self._arrived.set()
        except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
            self._finished.append(([request.id for request in requests], error))
            self._arrived.set()

    async def collect(self, timeout: float) -> list[FinishedGeneration | tuple[list[str], BaseException]]:
        """What has finished since the last call; waits for the first one up to `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._arrived.wait()
        except TimeoutError:
            return []
        self._arrived.clear()
        finished, self._finished = self._finished, []
        return finished

    async def abort(self, request_id: str) -> None:
        await (await self._host.engine()).abort(request_id)

    async def wait_version(self, version: int, timeout: float) -> int:
        return await (await self._host.engine()).wait_version(version, timeout)

    async def health(self) -> Health:
        return await (await self._host.engine()).health()


class RemoteEngine:
    """An engine in another Ray actor. One call collects for all requests in flight.

    Whatever Ray says of an actor that cannot be reached is `EngineLost` here.
    """

    COLLECT_SECONDS = 30.0

    def __init__(self, name: str, handle: Any) -> None:
        self._name = name
        self._handle = handle
        self._open: dict[str, asyncio.Queue[FinishedGeneration | BaseException]] = {}
        self._collector: asyncio.Task[None] | None = None

    async def built(self) -> None:
        with self._lost_with_its_actor():
            await self._handle.built.remote()

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]:
        arrivals: asyncio.Queue[FinishedGeneration | BaseException] = asyncio.Queue()
        for request in requests:
            self._open[request.id] = arrivals
        try:
            with self._lost_with_its_actor():
                await self._handle.submit.remote(list(requests))
            if self._collector is None or self._collector.done():
                self._collector = asyncio.create_task(self._collect())
            for _ in requests:
                arrived = await arrivals.get()
                if isinstance(arrived, BaseException):
                    raise arrived
                yield arrived
        finally:
            for request in requests:
                self._open.pop(request.id, None)

    async def _collect(self) -> None:
        try:
            while self._open:
                with self._lost_with_its_actor():
                    collected = await self._handle.collect.remote(self.COLLECT_SECONDS)
                for finished in collected:
                    if isinstance(finished, FinishedGeneration):
                        self._deliver(finished.id, finished)
                    else:
                        ids, error = finished
                        for request_id in ids:
                            self._deliver(request_id, error)
        except Exception as error:  # noqa: BLE001 - handed to every caller, who raises it
            for request_id in list(self._open):
                self._deliver(request_id, error)

    def _deliver(self, request_id: str, what: FinishedGeneration | BaseException) -> None:
        arrivals = self._open.pop(request_id, None)
        if arrivals is not None:
            arrivals.put_nowait(what)

    @contextmanager
    def _lost_with_its_actor(self) -> Iterator[None]:
        try:
            yield
        except RayActorError as error:
            raise EngineLost(self._name, process_died(error)) from error

    async def abort(self, request_id: str) -> None:
        with self._lost_with_its_actor():
            await self._handle.abort.remote(request_id)

    async def wait_version(self, version: int, timeout: float) -> int:
        with self._lost_with_its_actor():
            return await self._handle.wait_version.remote(version, timeout)

    async def health(self) -> Health:
        with self._lost_with_its_actor():
            return await self._handle.health.remote()

    async def discard(self, reason: str) -> None:
        """End its actor at once: what is stuck cannot be asked to end."""
        if self._collector is not None:
            self._collector.cancel()
            await asyncio.gather(self._collector, return_exceptions=True)
        await asyncio.to_thread(ray.kill, self._handle)


def process_died(error: RayActorError) -> str:
    """What Ray knows of the end of an actor's process, in a line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"its process died ({first})"
