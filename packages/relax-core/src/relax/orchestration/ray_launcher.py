"""Every role as its own Ray Serve application."""

import asyncio
from typing import Any

from ray import serve

from relax.components.context import RunContext
from relax.orchestration.launcher import Poll, RoleFailed, WorkerStatus
from relax.orchestration.plan import SERVICE_CPUS, Plan
from relax.orchestration.service import RoleService, ServiceStatus


class RayLauncher:
    """Deploys the roles, polls them, and deletes them. Needs a Ray with Serve (see `cluster`)."""

    def __init__(self, plan: Plan, context: RunContext) -> None:
        self._plan = plan
        self._context = context
        self._handles: dict[str, Any] = {}
        self._incarnations: dict[str, str] = {}
        self._deploying: asyncio.Task[None] | None = None

    def _name(self, role: str) -> str:
        return f"{self._context.run}-{role}"

    async def start(self) -> None:
        await asyncio.to_thread(self._deploy)

    def _deploy(self) -> None:
        targets = [
            serve.RunTarget(
                target=serve.deployment(
                    name=role.name,
                    ray_actor_options={"num_cpus": SERVICE_CPUS},
                    health_check_period_s=2,
                    health_check_timeout_s=30,
                )(RoleService).bind(role, self._context, {}),
                name=self._name(role.name),
                route_prefix=None,
            )
            for role in self._plan.roles
        ]
        handles = serve.run_many(targets, wait_for_ingress_deployment_creation=True)
        self._handles = {role.name: handle for role, handle in zip(self._plan.roles, handles, strict=True)}

    async def poll(self) -> Poll:
        statuses = await asyncio.gather(*(self._status(role.name) for role in self._plan.roles))
        poll = Poll()
        for status in statuses:
            poll.reports += status.reports
            poll.workers |= {worker.worker: worker for worker in status.workers}
        return poll

    async def _status(self, role: str) -> ServiceStatus:
        status: ServiceStatus = await self._handles[role].status.remote()
        known = self._incarnations.setdefault(role, status.incarnation)
        if status.incarnation != known:
            lost = WorkerStatus(role, "failed", f"the deployment of {role} died and its workers with it")
            return ServiceStatus(known, [lost], [])
        return status

    async def stop(self) -> None:
        for role in ("rollout", "actor"):
            try:
                await self._handles[role].stop.remote()
            except Exception as error:
                raise RoleFailed(f"{role} could not be asked to stop: {error}") from error

    async def close(self) -> None:
        if self._handles:
            self._handles = {}
            names = [self._name(role.name) for role in self._plan.roles]
            await asyncio.gather(*(asyncio.to_thread(serve.delete, name, _blocking=False) for name in names))
