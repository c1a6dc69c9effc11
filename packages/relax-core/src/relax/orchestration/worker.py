"""A role's worker as a Ray actor, and an engine that lives in one, as the rollout sees it."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from agentic import GenerationRequest

from relax.backends.inference.base import FinishedGeneration, Health, UpdateReport
from relax.components.context import RunContext
from relax.components.host import RoleHost
from relax.ops.reports import Report


class RoleWorker:
    """A Ray actor around one role host; an engine's worker also answers generation calls."""

    def __init__(self, role: str, context: RunContext, engines: Mapping[str, Any] | None = None) -> None:
        remotes = {name: RemoteEngine(handle) for name, handle in (engines or {}).items()}
        self._host = RoleHost(role, context, remotes)
        self._finished: list[FinishedGeneration | tuple[list[str], BaseException]] = []
        self._arrived = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()

    async def build(self) -> None:
        await self._host.build()

    async def run(self) -> None:
        await self._host.run()

    async def stop(self) -> None:
        self._host.stop()

    async def pid(self) -> int:
        return os.getpid()

    async def drain(self) -> list[Report]:
        return self._host.drain()

    # An engine's worker

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
    """An engine in another Ray actor. One call collects for all requests in flight."""

    COLLECT_SECONDS = 30.0

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._open: dict[str, asyncio.Queue[FinishedGeneration | BaseException]] = {}
        self._collector: asyncio.Task[None] | None = None

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]:
        arrivals: asyncio.Queue[FinishedGeneration | BaseException] = asyncio.Queue()
        for request in requests:
            self._open[request.id] = arrivals
        await self._handle.submit.remote(list(requests))
        if self._collector is None or self._collector.done():
            self._collector = asyncio.create_task(self._collect())
        try:
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
                for finished in await self._handle.collect.remote(self.COLLECT_SECONDS):
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

    async def abort(self, request_id: str) -> None:
        await self._handle.abort.remote(request_id)

    def weights(self) -> Mapping[str, Any]:
        raise TypeError("a remote engine follows the published weights in its own process")

    async def begin_update(self, version: int, tensors: Mapping[str, Any]) -> None:
        raise TypeError("a remote engine follows the published weights in its own process")

    async def commit_update(self, version: int) -> UpdateReport:
        raise TypeError("a remote engine follows the published weights in its own process")

    async def wait_version(self, version: int, timeout: float) -> int:
        return await self._handle.wait_version.remote(version, timeout)

    async def health(self) -> Health:
        return await self._handle.health.remote()

    async def close(self) -> None:
        if self._collector is not None:
            self._collector.cancel()
            await asyncio.gather(self._collector, return_exceptions=True)
