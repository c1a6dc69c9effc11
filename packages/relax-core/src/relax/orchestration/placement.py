"""Which workers belong on one node together, and which nodes of a cluster that is described they would go to.

The launcher asks Ray for the same bundles, so what fits here fits there; which of several nodes that fit Ray
takes is its own choice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from relax.config.cluster import Node
from relax.orchestration.plan import Plan, RolePlan


@dataclass(frozen=True)
class Bundle:
    """Workers that must be on one node: the ranks of a tensor-parallel group, or an engine with its server.

    Attributes:
        role: whose they are.
        cpus: that all of them reserve.
        gpus: as `cpus`.
    """

    role: str
    workers: tuple[str, ...]
    cpus: float
    gpus: int

    @property
    def resources(self) -> dict[str, float]:
        """As Ray names them."""
        return {"CPU": self.cpus, **({"GPU": float(self.gpus)} if self.gpus else {})}


def bundles(plan: Plan) -> tuple[Bundle, ...]:
    """What has to be placed as a whole; workers that reserve no GPU go anywhere and are in none, but where
    roles share their devices all of these are in one.
    """
    shared = [role for role in plan.roles if role.name in plan.together]
    found = []
    if shared:
        workers = tuple(worker for role in shared for worker in (*role.workers, *role.ranks))
        name = " and ".join(role.name for role in shared)
        cpus, gpus = sum(role.worker_cpus for role in shared), sum(role.gpus for role in shared)
        found.append(Bundle(name, workers, cpus, gpus))
    for role in plan.roles:
        if role not in shared and role.gpus:
            found += _bundles_of(role)
    return tuple(found)


def _bundles_of(role: RolePlan) -> Iterator[Bundle]:
    ranks = (role.name, *role.ranks) if role.gpus_per_rank else ()
    for first in range(0, len(ranks), role.ranks_together):
        group = ranks[first : first + role.ranks_together]
        yield Bundle(role.name, group, role.cpus_per_worker * len(group), role.gpus_per_rank * len(group))
    if role.gpus_per_engine:
        for engine in role.engines:
            yield Bundle(role.name, (engine,), role.cpus_per_worker, role.gpus_per_engine)


@dataclass
class Placed:
    """A node and what is on it."""

    node: Node
    bundles: list[Bundle] = field(default_factory=list)

    @property
    def free_gpus(self) -> int:
        return self.node.gpus - sum(bundle.gpus for bundle in self.bundles)

    @property
    def free_cpus(self) -> float:
        return self.node.cpus - sum(bundle.cpus for bundle in self.bundles)

    def fits(self, bundle: Bundle) -> bool:
        return bundle.gpus <= self.free_gpus and bundle.cpus <= self.free_cpus + 1e-9

    def holds(self, role: str) -> bool:
        return any(bundle.role == role for bundle in self.bundles)


def place(wanted: Sequence[Bundle], nodes: Sequence[Node]) -> tuple[list[Placed], list[Bundle]]:
    """Place bundles, the largest first, each where its role is already or else where it leaves least free.

    Returns:
        Every node with what is on it, and the bundles that no node has room for.
    """
    placed = [Placed(node) for node in nodes]
    left: list[Bundle] = []
    for bundle in sorted(wanted, key=lambda bundle: -bundle.gpus):
        room = [node for node in placed if node.fits(bundle)]
        if not room:
            left.append(bundle)
            continue
        best = min(room, key=lambda node: (not node.holds(bundle.role), node.free_gpus))
        best.bundles.append(bundle)
    return placed, left
