"""All roles in one process: the same loops as on a cluster, as tasks of one event loop."""

import asyncio
import traceback

from relax.backends.inference.errors import EngineLost
from relax.components.context import RunContext
from relax.components.host import RoleHost
from relax.engine.failover import as_lost
from relax.orchestration.engine_keeper import EngineKeeper
from relax.orchestration.launcher import Poll, RoleFailed, WorkerStatus
from relax.orchestration.plan import Plan

END_SECONDS = 30.0
"""Longest tidy end of all roles."""


class LocalLauncher:
    """Hosts built one after the other, engines first, then run side by side."""

    def __init__(self, plan: Plan, context: RunContext) -> None:
        self._plan = plan
        self._context = context
        self._hosts: dict[str, RoleHost] = {}
        self._keepers: dict[str, EngineKeeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lost: list[RoleHost] = []

    async def start(self) -> None:
        workers = [worker for role in self._plan.roles for worker in role.workers]
        engines = [worker for worker in workers if worker.startswith("engine-")]
        for name in (*engines, *(worker for worker in workers if worker not in engines)):
            pool = {n: await self._hosts[n].engine() for n in engines} if name == "rollout" else None
            host = RoleHost(name, self._context, pool)
            self._hosts[name] = host
            try:
                await host.build()
            except Exception as error:
                told = "".join(traceback.format_exception(error)).rstrip()
                raise RoleFailed(f"{name} failed:\n{told}") from error
        settings = self._context.config
        for name in engines:
            self._keepers[name] = EngineKeeper(
                name,
                _HostLife(self, name),
                self,
                restarts=settings.rollout.engine_restarts,
                start_seconds=settings.start_seconds,
            )
            self._tasks[name] = asyncio.create_task(self._keepers[name].run())
        for name in workers:
            if name not in engines:
                self._tasks[name] = asyncio.create_task(self._hosts[name].run())

    async def poll(self) -> Poll:
        poll = Poll()
        for name, host in self._hosts.items():
            poll.reports += host.drain()
            poll.workers[name] = self._status(name)
        return poll

    def _status(self, name: str) -> WorkerStatus:
        task = self._tasks.get(name)
        if task is None:
            return WorkerStatus(name, "starting")
        if (keeper := self._keepers.get(name)) is not None:
            return keeper.status
        if not task.done():
            return WorkerStatus(name, "running")
        if task.cancelled():
            return WorkerStatus(name, "failed", "cancelled")
        error = task.exception()
        if error is None:
            return WorkerStatus(name, "done")
        return WorkerStatus(name, "failed", "".join(traceback.format_exception(error)))

    async def engine_lost(self, name: str, reason: str, restarting: bool) -> None:
        await self._hosts["rollout"].engine_lost(name, reason, restarting)

    async def engine_back(self, name: str) -> None:
        await self._hosts["rollout"].engine_back(name, await self._hosts[name].engine())

    def renew(self, name: str) -> RoleHost:
        """A host for another life of an engine."""
        self._lost.append(self._hosts[name])
        self._hosts[name] = RoleHost(name, self._context)
        return self._hosts[name]

    async def stop(self) -> None:
        for name in ("rollout", "actor"):
            if name in self._hosts:
                self._hosts[name].stop()

    async def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.close()
        for host in self._hosts.values():
            host.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=END_SECONDS)
        for task in self._tasks.values():
            task.cancel()
        ending = [asyncio.ensure_future(host.closed()) for host in (*self._lost, *self._hosts.values())]
        if ending:
            await asyncio.wait(ending, timeout=END_SECONDS)
        for task in ending:
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *ending, return_exceptions=True)


class _HostLife:
    """The lives of an engine as hosts in this process. The first host is there already."""

    def __init__(self, launcher: LocalLauncher, name: str) -> None:
        self._launcher = launcher
        self._name = name
        self._host: RoleHost | None = launcher._hosts[name]

    async def begin(self) -> None:
        if self._host is None:
            self._host = self._launcher.renew(self._name)
            await self._host.build()

    async def serve(self) -> None:
        assert self._host is not None
        await self._host.run()

    async def end(self) -> None:
        self._host = None

    def loss(self, error: Exception) -> EngineLost | None:
        return as_lost(self._name, error)
