"""All roles in one process: the same loops as on a cluster, as tasks of one event loop."""

import asyncio
import traceback

from relax.components.context import RunContext
from relax.components.host import RoleHost
from relax.orchestration.launcher import Poll, WorkerStatus
from relax.orchestration.plan import Plan


class LocalLauncher:
    """Hosts built one after the other, engines first, then run side by side."""

    def __init__(self, plan: Plan, context: RunContext) -> None:
        self._plan = plan
        self._context = context
        self._hosts: dict[str, RoleHost] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        workers = [worker for role in self._plan.roles for worker in role.workers]
        engines = [worker for worker in workers if worker.startswith("engine-")]
        for name in (*engines, *(worker for worker in workers if worker not in engines)):
            pool = {n: await self._hosts[n].engine() for n in engines} if name == "rollout" else None
            host = RoleHost(name, self._context, pool)
            self._hosts[name] = host
            await host.build()
        self._tasks = {name: asyncio.create_task(host.run()) for name, host in self._hosts.items()}

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
        if not task.done():
            return WorkerStatus(name, "running")
        if task.cancelled():
            return WorkerStatus(name, "failed", "cancelled")
        error = task.exception()
        if error is None:
            return WorkerStatus(name, "done")
        return WorkerStatus(name, "failed", "".join(traceback.format_exception(error)))

    async def stop(self) -> None:
        for name in ("rollout", "actor"):
            if name in self._hosts:
                self._hosts[name].stop()

    async def close(self) -> None:
        for host in self._hosts.values():
            host.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=30)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
