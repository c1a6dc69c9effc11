"""What would run where: every role of a run with its processes and its share of the machine."""

import os
from dataclasses import dataclass

from rich.table import Table

from relax.backends.inference.sglang.flags import gpus as gpus_of_a_server
from relax.config import ConfigError, RunConfig
from relax.ops.quantities import counted

SERVICE_CPUS = 0.05
"""CPUs that a role's Serve deployment reserves for itself: it only supervises."""


@dataclass(frozen=True)
class RolePlan:
    """One role: its deployment, and the workers that the deployment supervises.

    Attributes:
        ranks: processes of its trainer beside the first worker, which leads them.
        gpus_per_rank: GPUs that the leader and each rank reserve.
        gpus_per_engine: GPUs that each engine reserves; 0 where it shares those of the actor.
        ranks_together: consecutive ranks, the leader's first, that have to be on one node.
    """

    name: str
    workers: tuple[str, ...]
    cpus_per_worker: float
    about: str
    ranks: tuple[str, ...] = ()
    gpus_per_rank: int = 0
    gpus_per_engine: int = 0
    ranks_together: int = 1

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(worker for worker in self.workers if worker.startswith("engine-"))

    @property
    def worker_cpus(self) -> float:
        """Of workers and ranks, without the deployment."""
        return self.cpus_per_worker * (len(self.workers) + len(self.ranks))

    @property
    def cpus(self) -> float:
        return SERVICE_CPUS + self.worker_cpus

    @property
    def gpus(self) -> int:
        return self.gpus_per_rank * (1 + len(self.ranks)) + self.gpus_per_engine * len(self.engines)

    def gpus_of(self, worker: str) -> int:
        """GPUs that one of its workers or ranks reserves."""
        if worker in self.engines:
            return self.gpus_per_engine
        return self.gpus_per_rank if worker == self.name or worker in self.ranks else 0


@dataclass(frozen=True)
class Plan:
    """All roles of a run; every one starts at once. Those named in `together` share one place: they take
    turns.
    """

    roles: tuple[RolePlan, ...]
    together: frozenset[str] = frozenset()

    @property
    def cpus(self) -> float:
        return sum(role.cpus for role in self.roles)

    def table(self) -> Table:
        table = Table(title="what runs where", title_justify="left")
        gpus = any(role.gpus for role in self.roles)
        for column in ("role", "workers", "CPUs", *(["GPUs"] if gpus else []), "what"):
            table.add_column(column)
        for role in self.roles:
            workers = ", ".join((*role.workers, *role.ranks))
            table.add_row(
                role.name, workers, f"{role.cpus:g}", *([f"{role.gpus}"] if gpus else []), role.about
            )
        return table


def plan(config: RunConfig) -> Plan:
    """The roles a configuration asks for."""
    cpus = config.ray.cpus_per_worker
    engines = tuple(f"engine-{number}" for number in range(config.rollout.replicas))
    ranks = config.actor.ranks
    gpus = int(config.actor.device == "cuda")
    trains = (
        f"trains with {config.actor.backend}{f' on {ranks} ranks' if ranks > 1 else ''}, publishes weights"
    )
    together = config.actor.tensor_parallel
    roles = [
        RolePlan("actor", ("actor",), cpus, trains, _ranks("actor", ranks), gpus, ranks_together=together),
        RolePlan(
            "rollout",
            ("rollout", *engines),
            cpus,
            f"episodes on {counted(len(engines), f'{config.rollout.engine} engine')}",
            gpus_per_engine=0 if config.mode == "colocate" else engine_gpus(config),
        ),
        RolePlan("advantages", ("advantages",), cpus, f"{config.algorithm.name} advantages of whole groups"),
    ]
    if config.reference:
        # With `local` all roles share a process, and one process leads one gang: the reference is alone.
        beside = _ranks("reference", ranks) if config.launcher == "ray" else ()
        about = "logprobs under the initial policy"
        roles.insert(
            2,
            RolePlan("reference", ("reference",), cpus, about, beside, gpus, ranks_together=together),
        )
    return Plan(tuple(roles), frozenset({"actor", "rollout"}) if config.mode == "colocate" else frozenset())


def engine_gpus(config: RunConfig) -> int:
    """GPUs that one engine computes on. SGLang's own choice of a device is taken for one where the trainer
    has one too.
    """
    if config.rollout.engine == "sglang":
        settings = config.rollout.sglang
        device = settings.device if settings.device != "auto" else config.actor.device
        return gpus_of_a_server(settings) if device == "cuda" and not settings.urls else 0
    return int(config.rollout.device == "cuda")


def _ranks(role: str, count: int) -> tuple[str, ...]:
    return tuple(f"{role}-{rank}" for rank in range(1, count))


def check_cpus(plan: Plan, config: RunConfig) -> None:
    """Raise ConfigError when an embedded Ray would not have the CPUs the plan reserves."""
    if config.launcher != "ray" or config.ray.address is not None:
        return
    there = config.ray.num_cpus if config.ray.num_cpus is not None else float(os.cpu_count() or 1)
    if plan.cpus > there:
        raise ConfigError(
            f"too few CPUs: the roles reserve {plan.cpus:g} (ray.cpus_per_worker = "
            f"{config.ray.cpus_per_worker:g} for each "
            f"of {sum(len(role.workers) + len(role.ranks) for role in plan.roles)} workers) and Ray would "
            f"have {there:g} "
            f"({'ray.num_cpus' if config.ray.num_cpus is not None else 'this machine'}); lower "
            f"ray.cpus_per_worker or "
            "rollout.replicas, or raise ray.num_cpus"
        )
