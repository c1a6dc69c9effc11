"""A role as a Ray Serve deployment: it creates the role's workers, watches them, says how they fare."""

import asyncio
import contextlib
import traceback
import uuid
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError

from relax.backends.inference.errors import EngineLost
from relax.components.context import RunContext
from relax.engine.failover import as_lost
from relax.ops.reports import Report
from relax.orchestration.engine_keeper import EngineKeeper
from relax.orchestration.launcher import State, WorkerStatus
from relax.orchestration.plan import RolePlan
from relax.orchestration.worker import RoleWorker, process_died

ALONE_SECONDS = 10.0
"""Longest tidy end of workers whose run was killed; then they are killed too."""


@dataclass(frozen=True)
class ServiceStatus:
    """What a deployment says. `incarnation` changes when Serve had to start it anew, its workers lost."""

    incarnation: str
    workers: list[WorkerStatus]
    reports: list[Report]
    away: frozenset[str] = frozenset()
    """Engines that are lost now."""


class RoleService:
    """Supervises the workers of one role. Control plane only: no sample passes through it.

    An engine that is lost is started again as a new worker of the same name; any other worker that fails has
    failed for good.
    """

    def __init__(
        self,
        role: RolePlan,
        context: RunContext,
        options: dict[str, dict[str, Any]],
        lifeline: Any | None = None,
    ) -> None:
        """
        Args:
            role: whose workers these are.
            context: what they are told.
            options: of Ray for workers by name, beside what the plan says that they reserve.
            lifeline: the `Lifeline` of a driver on a Ray that is only visited.
        """
        self._role = role
        self._incarnation = uuid.uuid4().hex
        self._context = context
        self._options = options
        self._workers: dict[str, Any] = {}
        self._up: set[str] = set()
        engines = [name for name in role.workers if name.startswith("engine-")]
        for name in (*engines, *(worker for worker in role.workers if worker not in engines)):
            pool = {engine: self._workers[engine] for engine in engines} if name == "rollout" else None
            self._create(name, pool)
        self._states: dict[str, WorkerStatus] = {
            name: WorkerStatus(name, "starting") for name in self._workers if name not in engines
        }
        self._keepers = {
            name: EngineKeeper(
                name,
                _ActorLife(self, name),
                self,
                restarts=context.config.rollout.engine_restarts,
                start_seconds=context.config.start_seconds,
            )
            for name in engines
        }
        loop = asyncio.get_event_loop()
        self._watchers = [loop.create_task(self._watch(name)) for name in self._states]
        self._states |= {name: WorkerStatus(name, "starting") for name in role.ranks}
        self._leader = loop.create_task(self._rendezvous()) if role.ranks else None
        self._watchers += [loop.create_task(self._watch_rank(name)) for name in role.ranks]
        self._watchers += [loop.create_task(keeper.run()) for keeper in self._keepers.values()]
        self._alone = None if lifeline is None else loop.create_task(self._end_with(lifeline))

    def _create(
        self, name: str, pool: dict[str, Any] | None = None, context: RunContext | None = None
    ) -> Any:
        worker_class = ray.remote(RoleWorker)
        self._workers[name] = worker_class.options(
            num_cpus=self._role.cpus_per_worker,
            num_gpus=self._role.gpus_of(name),
            max_restarts=0,
            max_concurrency=1000,
            **self._options.get(name, {}),
        ).remote(name, context or self._context, pool)
        return self._workers[name]

    async def _rendezvous(self) -> RunContext:
        """What ranks are told: the leader's worker opens a seat for them before it builds its part."""
        leader = await self._workers[self._role.name].rendezvous.remote()
        return replace(self._context, leader=leader)

    async def _watch_rank(self, name: str) -> None:
        assert self._leader is not None
        try:
            self._create(name, context=await asyncio.shield(self._leader))
        except RayActorError as error:  # its own watcher tells the run why
            self._set(name, "failed", f"its leader died: {error}")
            return
        await self._watch(name)

    async def _watch(self, name: str) -> None:
        worker = self._workers[name]
        try:
            if self._leader is not None and name == self._role.name:
                await asyncio.shield(self._leader)
            await worker.pid.remote()
            self._up.add(name)
            await worker.build.remote()
            self._set(name, "running")
            await worker.run.remote()
            self._set(name, "done")
        except RayTaskError as error:
            self._set(name, "failed", str(error))
        except RayActorError as error:
            self._set(name, "failed", f"the process of {name} died: {error}")
        except Exception:  # noqa: BLE001 - whatever it is ends the run with its traceback
            self._set(name, "failed", traceback.format_exc())

    def _set(self, name: str, state: State, error: str = "") -> None:
        self._states[name] = WorkerStatus(name, state, error)

    async def status(self) -> ServiceStatus:
        """State of every worker, and what they reported since the last call."""
        reports: list[Report] = []
        # As they are before their reports are fetched: whoever is done then has said its last word.
        states = dict(self._states)
        for name, status in states.items():
            if name not in self._up or status.state == "failed":
                continue
            try:
                reports += await self._workers[name].drain.remote()
            except RayActorError:
                continue  # its watcher says so
        workers = [*states.values(), *(keeper.status for keeper in self._keepers.values())]
        away = frozenset(name for name, keeper in self._keepers.items() if keeper.away)
        return ServiceStatus(self._incarnation, workers, reports, away)

    async def engine_lost(self, name: str, reason: str, restarting: bool) -> None:
        """A keeper says that an engine is gone: the rollout has to know."""
        with contextlib.suppress(
            RayActorError
        ):  # a rollout that is gone needs no engines; its watcher says so
            await self._workers["rollout"].engine_lost.remote(name, reason, restarting)

    async def engine_back(self, name: str) -> None:
        with contextlib.suppress(RayActorError):
            await self._workers["rollout"].engine_back.remote(name, self._workers[name])

    async def engines_away(self, names: Collection[str]) -> None:
        """Tell the role's own worker which engines are lost now."""
        with contextlib.suppress(RayActorError):
            await self._workers[self._role.name].engines_away.remote(names)

    async def stop(self) -> None:
        """Ask the role's own worker for a tidy end."""
        name = self._role.name
        if self._states[name].state in ("starting", "running"):
            await self._workers[name].stop.remote()

    async def _end_with(self, lifeline: Any) -> None:
        """End when the driver is gone, who else would have ended this."""
        with contextlib.suppress(RayActorError):
            await lifeline.wait.remote()
        await self.end(ALONE_SECONDS)
        await asyncio.to_thread(serve.delete, serve.get_replica_context().app_name, _blocking=False)

    async def end(self, timeout: float) -> None:
        """Stop every worker and wait until they have let go of what they hold."""
        for keeper in self._keepers.values():
            keeper.close()
        running = [status for status in self._states.values()]
        running += [keeper.status for keeper in self._keepers.values()]
        for status in running:
            if status.state in ("starting", "running") and status.worker in self._workers:
                self._workers[status.worker].stop.remote()
        await asyncio.wait(self._watchers, timeout=timeout)


class _ActorLife:
    """The lives of an engine as Ray actors, one after another."""

    def __init__(self, service: RoleService, name: str) -> None:
        self._service = service
        self._name = name
        self._worker: Any = service._workers[name]

    async def begin(self) -> None:
        if self._worker is None:
            self._worker = self._service._create(self._name)
        await self._worker.build.remote()

    async def serve(self) -> None:
        await self._worker.run.remote()

    async def end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(ray.kill, worker)

    def loss(self, error: Exception) -> EngineLost | None:
        if isinstance(error, RayActorError):
            return EngineLost(self._name, process_died(error))
        return as_lost(self._name, error)
