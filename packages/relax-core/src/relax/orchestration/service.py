"""A role as a Ray Serve deployment: it creates the role's workers, watches them, says how they fare."""

import asyncio
import traceback
import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from relax.components.context import RunContext
from relax.ops.reports import Report
from relax.orchestration.launcher import State, WorkerStatus
from relax.orchestration.plan import RolePlan
from relax.orchestration.worker import RoleWorker


@dataclass(frozen=True)
class ServiceStatus:
    """What a deployment says. `incarnation` changes when Serve had to start it anew, its workers lost."""

    incarnation: str
    workers: list[WorkerStatus]
    reports: list[Report]


class RoleService:
    """Supervises the workers of one role. Control plane only: no sample passes through it."""

    def __init__(self, role: RolePlan, context: RunContext, options: dict[str, Any]) -> None:
        self._role = role
        self._incarnation = uuid.uuid4().hex
        worker_class = ray.remote(RoleWorker)
        self._workers: dict[str, Any] = {}
        self._up: set[str] = set()
        engines = [name for name in role.workers if name.startswith("engine-")]
        for name in (*engines, *(worker for worker in role.workers if worker not in engines)):
            pool = {engine: self._workers[engine] for engine in engines} if name == "rollout" else None
            self._workers[name] = worker_class.options(
                num_cpus=role.cpus_per_worker, max_restarts=0, max_concurrency=1000, **options
            ).remote(name, context, pool)
        self._states: dict[str, WorkerStatus] = {
            name: WorkerStatus(name, "starting") for name in self._workers
        }
        loop = asyncio.get_event_loop()
        self._watchers = [loop.create_task(self._watch(name)) for name in self._workers]

    async def _watch(self, name: str) -> None:
        worker = self._workers[name]
        try:
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
        for name, worker in self._workers.items():
            if name.startswith("engine-") or name not in self._up or self._states[name].state == "failed":
                continue
            try:
                reports += await worker.drain.remote()
            except RayActorError:
                continue  # its watcher says so
        return ServiceStatus(self._incarnation, list(self._states.values()), reports)

    async def stop(self) -> None:
        """Ask the role's own worker for a tidy end."""
        name = self._role.name
        if self._states[name].state in ("starting", "running"):
            await self._workers[name].stop.remote()

    async def end(self, timeout: float) -> None:
        """Stop every worker and wait until they have let go of what they hold."""
        for name, worker in self._workers.items():
            if self._states[name].state in ("starting", "running"):
                worker.stop.remote()
        await asyncio.wait(self._watchers, timeout=timeout)
