"""One role in one process: builds it, runs it, stops it. Knows nothing of who supervises it."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from agentic import GenerationRequest

from relax.backends.inference.base import FinishedGeneration, Health
from relax.backends.inference.errors import EngineLost, EngineNotBuilt
from relax.components import assembly
from relax.components.context import RunContext
from relax.components.trainers import RankHost, open_seat
from relax.distributed.bus import Endpoint
from relax.engine.pool import PooledEngine, ReplicaEngine
from relax.ops.allocator import keep_freed_memory
from relax.ops.leavable import leavable
from relax.ops.reports import Report, Reports


class RoleHost:
    """A role's life. `run` ends when its work is done or was stopped, and raises what it failed with."""

    def __init__(
        self, role: str, context: RunContext, engines: Mapping[str, ReplicaEngine] | None = None
    ) -> None:
        self.role = role
        self._context = context
        self._engines = dict(engines or {})
        self._reports = Reports(role)
        self._loop: Any = None
        self._seat: Any = None
        self._task: asyncio.Future[None] | None = None
        self._stopping = False
        self._fault: EngineLost | None = None
        self._closing: asyncio.Task[None] | None = None
        self._built = asyncio.Event()
        self._unbuilt = "it was ended before it was there"

    async def build(self) -> None:
        """Load what the role needs; heavy, in a thread so that the process still answers."""
        try:
            if self.role.startswith("engine-"):
                from relax.components.engine_host import EngineHost

                keep_freed_memory()
                self._loop = await EngineHost.create(self._context, self.role)
            else:
                self._loop = await leavable(self._assemble)
        except Exception as error:
            self._unbuilt = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._built.set()

    def _assemble(self) -> Any:
        keep_freed_memory()
        match self.role.partition("-")[0]:
            case _ if self._context.leader is not None:
                return RankHost(self._context, self.role, self._context.leader)
            case "actor":
                return assembly.actor(self._context, self._reports, self._seat)
            case "advantages":
                return assembly.advantages(self._context)
            case "reference":
                return assembly.reference(self._context, self._seat)
            case "rollout":
                return assembly.rollout(self._context, self._engines, self._reports)
            case _:
                raise ValueError(f"there is no role {self.role!r}")

    async def rendezvous(self, host: str) -> Endpoint:
        """Open the seat that the ranks of this role's trainer come to, at this machine's address."""
        trains = self.role == "actor"
        folder = self._context.model if trains else assembly.initial_folder(self._context.folder)
        config = self._context.config
        self._seat = await asyncio.to_thread(lambda: open_seat(config, folder, trains=trains, host=host))
        return Endpoint(self._seat.address, self._seat.token)

    async def run(self) -> None:
        if self._loop is None:
            await self.build()
        role: Any = self._loop
        running: asyncio.Future[None] = asyncio.ensure_future(role.run())
        self._task = running
        if self._stopping:
            self._stop()
        elif self._fault is not None:
            running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            if self._fault is not None:
                raise self._fault from None
            if not self._stopping:
                raise
        finally:
            close = getattr(self._loop, "close", None)
            if close is not None:
                self._closing = asyncio.create_task(close())
                if self._fault is None:  # what is stuck may take long to end: nobody waits for that
                    await self._closing

    async def engine(self) -> "HostedEngine":
        """The engine of an engine host, once it is built. Raises `EngineNotBuilt`."""
        await self._built.wait()
        if self._loop is None:
            raise EngineNotBuilt(self.role, self._unbuilt)
        return HostedEngine(self, self._loop.engine)

    def fail(self, fault: EngineLost) -> None:
        """End the role with that fault, and do not wait for what it holds: `closed` does. Idempotent."""
        if self._fault is None and not self._stopping:
            self._fault = fault
            if self._task is not None:
                self._task.cancel()

    async def closed(self) -> None:
        """Wait until all that a failed role held is let go of; raises what that failed with."""
        if self._closing is not None:
            await self._closing

    # What supervisors tell the roles that deal with engines

    async def engine_lost(self, name: str, reason: str, restarting: bool) -> None:
        """To rollout: an engine is gone, and whether another one is being started."""
        await self._built.wait()
        if self._loop is not None:
            self._loop.engine_lost(name, reason, restarting)

    async def engine_back(self, name: str, engine: ReplicaEngine) -> None:
        """To rollout: another engine has taken the place of a lost one."""
        await self._built.wait()
        if self._loop is not None:
            self._loop.engine_back(name, engine)

    async def engines_away(self, names: Collection[str]) -> None:
        """To the actor: these engines are lost now, and not to be waited for."""
        await self._built.wait()
        if self._loop is not None:
            self._loop.engines_away(names)

    def stop(self) -> None:
        """End early: a role that can finish tidily does, any other is cancelled. Idempotent."""
        if not self._stopping:
            self._stopping = True
            if self._task is not None:
                self._stop()

    def _stop(self) -> None:
        stop = getattr(self._loop, "stop", None)
        if stop is not None:
            stop()
        elif self._task is not None:
            self._task.cancel()

    def drain(self) -> list[Report]:
        return self._reports.drain()


class HostedEngine:
    """A host's engine as the pool sees it: one that the pool gives up ends its host."""

    def __init__(self, host: RoleHost, engine: PooledEngine) -> None:
        self._host = host
        self._engine = engine

    async def built(self) -> None:
        """At once: its host was asked for it."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]:
        return self._engine.generate(requests)

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def wait_version(self, version: int, timeout: float) -> int:
        return await self._engine.wait_version(version, timeout)

    async def health(self) -> Health:
        return await self._engine.health()

    async def discard(self, reason: str) -> None:
        self._host.fail(EngineLost(self._host.role, reason))
