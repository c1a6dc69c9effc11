"""Every role as its own Ray Serve application."""

import asyncio
import contextlib
import threading
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax.components.context import RunContext
from relax.orchestration.cluster import Daemons
from relax.orchestration.launcher import Poll, RoleFailed, WorkerStatus
from relax.orchestration.lifeline import Lifeline
from relax.orchestration.placement import bundles
from relax.orchestration.plan import SERVICE_CPUS, Plan
from relax.orchestration.service import RoleService, ServiceStatus

ANSWER_SECONDS = 60.0
"""A deployment that has not said for so long how it fares counts as dead."""

END_SECONDS = 10.0
"""Longest tidy end of a role's workers."""

STARTING_END_SECONDS = 2.0
"""The same before all of them are ready: one that is being built hears nothing, and has nothing to save."""


class RayLauncher:
    """Deploys the roles, polls them, and deletes them. Needs a Ray with Serve (see `cluster`)."""

    def __init__(self, plan: Plan, context: RunContext, daemons: Daemons) -> None:
        self._plan = plan
        self._daemons = daemons
        self._context = context
        self._handles: dict[str, Any] = {}
        self._incarnations: dict[str, str] = {}
        self._away: frozenset[str] = frozenset()
        self._ready = False
        self._group: PlacementGroup | None = None
        self._lifeline: Any | None = None

    def _name(self, role: str) -> str:
        return f"{self._context.run}-{role}"

    async def start(self) -> None:
        """In a thread of its own, for which nobody waits who gives up waiting: what it asks of Ray may take
        minutes, and ends with Ray.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def deploy() -> None:
            error: Exception | None = None
            try:
                self._deploy()
            except Exception as raised:  # noqa: BLE001 - raised again where it is waited for
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: it was given up
                loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=deploy, name="ray-deploy", daemon=True).start()
        await done

    def _deploy(self) -> None:
        options = self._placement()
        if self._context.config.ray.address is not None:
            self._lifeline = ray.remote(Lifeline).options(num_cpus=0).remote()
        targets = [
            serve.RunTarget(
                target=serve.deployment(
                    name=role.name,
                    ray_actor_options={"num_cpus": SERVICE_CPUS},
                    health_check_period_s=10,
                    health_check_timeout_s=30,
                )(RoleService).bind(role, self._context, options, self._lifeline),
                name=self._name(role.name),
                route_prefix=None,
            )
            for role in self._plan.roles
        ]
        handles = serve.run_many(targets, wait_for_applications_running=False)
        self._handles = {role.name: handle for role, handle in zip(self._plan.roles, handles, strict=True)}

    def _placement(self) -> dict[str, dict[str, Any]]:
        """Ray options by worker: workers that belong on one node share a bundle of one placement group."""
        wanted = bundles(self._plan)
        if not wanted:
            return {}
        self._group = ray.util.placement_group([bundle.resources for bundle in wanted], strategy="PACK")
        seconds = self._context.config.ray.start_seconds
        if not self._group.wait(seconds):
            listed = "; ".join(
                f"{bundle.cpus:g} CPUs{f' and {bundle.gpus} GPUs' if bundle.gpus else ''} for {bundle.role}"
                for bundle in wanted
            )
            raise RoleFailed(
                f"within {seconds:g} s (ray.start_seconds) the Ray cluster had no room for what has to be on "
                f"one node: {listed}; start more nodes, lower rollout.replicas, ray.cpus_per_worker or the "
                f"actor's ranks, or use mode=async"
            )
        return {
            worker: {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, number)}
            for number, bundle in enumerate(wanted)
            for worker in bundle.workers
        }

    async def poll(self) -> Poll:
        if (dead := self._daemons.dead()) is not None:
            raise RoleFailed(f"{dead} of the embedded Ray died; its logs were in Ray's temporary folder")
        statuses = await asyncio.gather(*(self._status(role.name) for role in self._plan.roles))
        poll = Poll()
        for status in statuses:
            poll.reports += status.reports
            poll.workers |= {worker.worker: worker for worker in status.workers}
        self._ready = self._ready or poll.ready
        await self._tell_away(frozenset().union(*(status.away for status in statuses)))
        return poll

    async def _tell_away(self, away: frozenset[str]) -> None:
        """The actor does not wait for engines that are lost."""
        if away != self._away and "actor" in self._incarnations:
            self._away = away
            with contextlib.suppress(RayError, RayServeException):  # the next poll says so
                await self._handles["actor"].engines_away.remote(sorted(away))

    async def _status(self, role: str) -> ServiceStatus:
        seconds = ANSWER_SECONDS if role in self._incarnations else self._context.config.start_seconds
        try:
            async with asyncio.timeout(seconds):
                status: ServiceStatus = await self._handles[role].status.remote()
        except TimeoutError:
            return _lost(role, f"the deployment of {role} has not answered for {seconds:g} s")
        except (RayError, RayServeException) as error:
            return _lost(role, f"the deployment of {role} died: {error}")
        known = self._incarnations.setdefault(role, status.incarnation)
        if status.incarnation != known:
            return _lost(role, f"the deployment of {role} died and its workers with it")
        return status

    async def stop(self) -> None:
        for role in ("rollout", "actor"):
            try:
                await self._handles[role].stop.remote()
            except (RayError, RayServeException) as error:
                raise RoleFailed(f"{role} could not be asked to stop: {error}") from error

    async def close(self) -> None:
        handles, self._handles = self._handles, {}
        answering = [] if self._daemons.dead() else self._incarnations
        seconds = END_SECONDS if self._ready else STARTING_END_SECONDS
        ending = [
            asyncio.ensure_future(_end(handles[role], seconds)) for role in answering if role in handles
        ]
        if ending:
            await asyncio.wait(ending, timeout=2 * seconds)
        for task in ending:
            task.cancel()
        if self._context.config.ray.address is not None:  # an embedded Ray takes its applications with it
            for role in handles:
                await asyncio.to_thread(serve.delete, self._name(role), _blocking=False)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)


async def _end(handle: Any, seconds: float) -> None:
    with contextlib.suppress(RayError, RayServeException):  # one that is dead has nothing left to let go of
        await handle.end.remote(seconds)


def _lost(role: str, why: str) -> ServiceStatus:
    return ServiceStatus("", [WorkerStatus(role, "failed", why)], [])
