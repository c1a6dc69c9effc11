"""One role in one process: builds it, runs it, stops it. Knows nothing of who supervises it."""

import asyncio
from collections.abc import Mapping
from typing import Any

from relax.components import assembly
from relax.components.context import RunContext
from relax.engine.pool import PooledEngine
from relax.ops.allocator import keep_freed_memory
from relax.ops.reports import Report, Reports


class RoleHost:
    """A role's life. `run` ends when its work is done or was stopped, and raises what it failed with."""

    def __init__(
        self, role: str, context: RunContext, engines: Mapping[str, PooledEngine] | None = None
    ) -> None:
        self.role = role
        self._context = context
        self._engines = dict(engines or {})
        self._reports = Reports(role)
        self._loop: Any = None
        self._task: asyncio.Future[None] | None = None
        self._stopping = False
        self._built = asyncio.Event()

    async def build(self) -> None:
        """Load what the role needs; heavy, in a thread so that the process still answers."""
        try:
            self._loop = await asyncio.to_thread(self._assemble)
        finally:
            self._built.set()

    def _assemble(self) -> Any:
        keep_freed_memory()
        match self.role.partition("-")[0]:
            case "actor":
                return assembly.actor(self._context, self._reports)
            case "advantages":
                return assembly.advantages(self._context)
            case "reference":
                return assembly.reference(self._context)
            case "engine":
                from relax.components.engine_host import EngineHost

                return EngineHost(self._context, self.role)
            case "rollout":
                return assembly.rollout(self._context, self._engines, self._reports)
            case _:
                raise ValueError(f"there is no role {self.role!r}")

    async def run(self) -> None:
        if self._loop is None:
            await self.build()
        role: Any = self._loop
        running: asyncio.Future[None] = asyncio.ensure_future(role.run())
        self._task = running
        if self._stopping:
            self._stop()
        try:
            await running
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            close = getattr(self._loop, "close", None)
            if close is not None:
                await close()

    async def engine(self) -> PooledEngine:
        """The engine of an engine host, once it is built."""
        await self._built.wait()
        if self._loop is None:
            raise RuntimeError(f"{self.role} could not be built")
        return self._loop.engine

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
