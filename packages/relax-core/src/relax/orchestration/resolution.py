"""A run held against a cluster that is only described: what would be where, how full, and what is wrong.

Nothing is started and no model is loaded: config.json is enough. What only the nodes can tell, such as an
environment with SGLang or the data on their disk, becomes a note.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from relax.config import ConfigError, RunConfig, check
from relax.config.cluster import Cluster, Node
from relax.config.sizes import bytes_of
from relax.orchestration import memory
from relax.orchestration.memory import USABLE, Estimate
from relax.orchestration.misfits import misfits
from relax.orchestration.model_folder import TINY
from relax.orchestration.model_shape import ModelShape, read_shape
from relax.orchestration.placement import Bundle, Placed, bundles, place
from relax.orchestration.plan import Plan, plan
from relax.orchestration.preflight import check_names
from relax.orchestration.routing_check import replayed_routing
from relax.orchestration.suitability import unsuitable

GIB = 2**30


@dataclass(frozen=True)
class Resolution:
    """What became of a configuration.

    Attributes:
        plan: the roles.
        placed: every node, with what would be on it.
        estimates: what one GPU of each role holds.
        notes: what is to be known before a start, and no fault.
        faults: what cannot work; none when the configuration resolves.
    """

    plan: Plan
    placed: tuple[Placed, ...]
    estimates: tuple[Estimate, ...]
    notes: tuple[str, ...]
    faults: tuple[str, ...]

    def places(self) -> Table:
        """Which node has what."""
        table = Table(title="what runs where", title_justify="left")
        for column in ("node", "role", "workers", "CPUs", "GPUs"):
            table.add_column(column)
        for placed in self.placed:
            rows = [(b.role, ", ".join(b.workers), f"{b.cpus:g}", str(b.gpus)) for b in placed.bundles]
            rows.append(("free", "", f"{placed.free_cpus:g}", str(placed.free_gpus)))
            for number, row in enumerate(rows):
                table.add_row("" if number else placed.node.name, *row, end_section=number == len(rows) - 1)
        bundled = {worker for p in self.placed for b in p.bundles for worker in b.workers}
        for role in self.plan.roles:
            rest = [worker for worker in (*role.workers, *role.ranks) if worker not in bundled]
            if rest:
                table.add_row("any", role.name, ", ".join(rest), f"{role.cpus_per_worker * len(rest):g}", "0")
        return table

    def memories(self) -> Table:
        """What one GPU of each role holds, term by term."""
        table = Table(title="memory of one GPU, estimated", title_justify="left")
        for column in ("role", "what", "how", "GiB"):
            table.add_column(column)
        for estimate in self.estimates:
            for number, term in enumerate(estimate.terms):
                role = "" if number else estimate.role
                table.add_row(role, term.what, term.formula, f"{term.nbytes / GIB:.1f}")
            table.add_row("", "together", "", f"{estimate.nbytes / GIB:.1f}", end_section=True)
        return table


def resolve_on(config: RunConfig, cluster: Cluster, known: Path | None = None) -> Resolution:
    """Hold a configuration against a cluster.

    Args:
        known: folder of folders with a config.json each, for a model that is not on this machine.

    Raises:
        ConfigError: combinations of keys that work nowhere, or a model whose config.json is not to be had.
    """
    check(config)
    check_names(config)
    folder, notes = _model(config, known)
    shape = read_shape(folder)
    faults = [*unsuitable(config, shape), *misfits(config, folder)]
    try:
        replayed_routing(config, folder)
    except ConfigError as error:
        faults.append(str(error))
    resolved = plan(config)
    nodes = _reached(config, cluster, notes, faults)
    placed, left = place(bundles(resolved), nodes)
    faults += _unplaced(config, resolved, left, nodes)
    faults += _cpus(config, resolved, nodes)
    estimates = []
    if not any(fault.startswith(("actor.backend =", "rollout.engine =")) for fault in faults):
        estimates = list(_estimates(config, resolved, shape, placed))
        faults += _too_large(config, resolved, estimates, placed)
        faults += _cache(config, shape, placed)
        faults += _host_memory(config, shape, placed)
    return Resolution(
        resolved,
        tuple(placed),
        tuple(estimates),
        (*notes, *_not_here(config), *_worth_knowing(config, placed)),
        tuple(faults),
    )


def _model(config: RunConfig, known: Path | None) -> tuple[Path, list[str]]:
    """The folder whose config.json says how large the model is."""
    path = config.model.path
    if path in TINY:
        raise ConfigError(
            f"model.path = {path!r} is made when a run starts and fits everywhere; name the model that the "
            f"cluster is for, or leave --cluster out"
        )
    folder = Path(path)
    if (folder / "config.json").is_file():
        return folder, []
    if known is not None and (known / folder.name / "config.json").is_file():
        there = known / folder.name
        return there, [f"model.path = {path!r} is not on this machine; its sizes are those of {there}"]
    looked = f", nor is there {known / folder.name / 'config.json'}" if known is not None else ""
    raise ConfigError(
        f"model.path = {path!r} is not on this machine{looked}: put the model's config.json there, so that "
        f"its size is known"
    )


def _reached(config: RunConfig, cluster: Cluster, notes: list[str], faults: list[str]) -> list[Node]:
    """The nodes that the run's launcher uses."""
    several = len(cluster.nodes) > 1
    if config.launcher == "ray" and config.ray.address is not None:
        if config.mode == "colocate" and config.actor.device == "cuda":
            faults.append(
                "mode = colocate with actor.device = cuda and a ray.address: roles that take turns share "
                "GPUs on one machine only, with ray.address=null; use mode=async on a cluster"
            )
        return list(cluster.nodes)
    if several:
        key = "launcher = local" if config.launcher == "local" else "ray.address = null"
        notes.append(
            f"{key}: the run uses the machine that it is started on, so only {cluster.nodes[0].name} of "
            f"{len(cluster.nodes)} nodes; set launcher=ray ray.address=auto to use all"
        )
    return [cluster.nodes[0]]


def _unplaced(config: RunConfig, resolved: Plan, left: list[Bundle], nodes: list[Node]) -> Iterator[str]:
    most = max(node.gpus for node in nodes)
    there = sum(node.gpus for node in nodes)
    wanted = sum(role.gpus for role in resolved.roles)
    told = set()
    for bundle in left:
        if bundle.gpus > most and bundle.role not in told:
            told.add(bundle.role)
            yield f"{_too_wide(config, bundle)}, and the largest node has {most} GPUs; lower it"
    if wanted > there:
        parts = ", ".join(f"{role.gpus} by {role.name}" for role in resolved.roles if role.gpus)
        yield (
            f"too few GPUs: the run reserves {wanted} ({parts}), and the nodes have {there}; lower "
            f"rollout.replicas or the actor's ranks, or add nodes"
        )
    elif stray := [bundle for bundle in left if bundle.role not in told]:
        first = stray[0]
        yield (
            f"no node has {first.gpus} GPUs and {first.cpus:g} CPUs left for {', '.join(first.workers)} of "
            f"{first.role}, which belong on one node, though {there} GPUs are there and {wanted} reserved; "
            f"choose sizes that fill nodes"
        )


def _too_wide(config: RunConfig, bundle: Bundle) -> str:
    if bundle.role in ("actor", "reference"):
        return (
            f"actor.tensor_parallel = {config.actor.tensor_parallel}: a tensor-parallel group exchanges "
            f"every layer's activations, so all of it belongs on one node"
        )
    if bundle.role == "rollout" and config.rollout.engine == "sglang":
        return f"rollout.sglang: one server takes {bundle.gpus} GPUs of one node (tensor x pipeline x data)"
    return f"{bundle.role} take {bundle.gpus} GPUs of one node together"


def _cpus(config: RunConfig, resolved: Plan, nodes: list[Node]) -> Iterator[str]:
    there = sum(node.cpus for node in nodes)
    if resolved.cpus > there:
        yield (
            f"too few CPUs: the roles reserve {resolved.cpus:g} (ray.cpus_per_worker = "
            f"{config.ray.cpus_per_worker:g} a worker), the nodes have {there:g}; lower ray.cpus_per_worker"
        )


def _estimates(
    config: RunConfig, resolved: Plan, shape: ModelShape, placed: list[Placed]
) -> Iterator[Estimate]:
    if config.actor.device == "cuda":
        yield memory.actor(config, shape)
        if config.reference:
            yield memory.reference(config, shape)
    rollout = next(role for role in resolved.roles if role.name == "rollout")
    if rollout.gpus_per_engine or (resolved.together and config.actor.device == "cuda"):
        smallest = min((p.node.gpu_memory for p in placed if p.node.gpus), default=0)
        yield memory.engine(config, shape, smallest)[0]


def _too_large(
    config: RunConfig, resolved: Plan, estimates: list[Estimate], placed: list[Placed]
) -> Iterator[str]:
    sizes = {estimate.role: estimate for estimate in estimates}
    told = set()
    for node in placed:
        room = int(USABLE * node.node.gpu_memory)
        for bundle in node.bundles:
            parts = bundle.role.split(" and ")
            need = sum(sizes[part].nbytes for part in parts if part in sizes)
            if bundle.gpus and need > room and bundle.role not in told:
                told.add(bundle.role)
                terms = ", ".join(
                    f"{term.what} {term.nbytes / GIB:.1f}"
                    for part in parts
                    if part in sizes
                    for term in sizes[part].terms
                )
                yield (
                    f"{bundle.role} on {node.node.name}: a GPU would hold {need / GIB:.1f} GiB ({terms}); "
                    f"{USABLE:.0%} of its {node.node.gpu_memory / GIB:.1f} GiB are {room / GIB:.1f}; "
                    f"{_way_out(config, bundle.role)}"
                )


def _way_out(config: RunConfig, role: str) -> str:
    if role == "rollout":
        if config.rollout.engine == "sglang":
            return "raise rollout.sglang.tensor_parallel, or lower rollout.sglang.memory_fraction"
        return "lower rollout.max_running or model.context_length, or model.dtype=bfloat16"
    if config.actor.backend == "megatron":
        return (
            "raise actor.tensor_parallel, pipeline_parallel or expert_parallel, set "
            "actor.megatron.distributed_optimizer=true and recompute=full, or lower actor.rank_tokens"
        )
    return (
        "raise actor.data_parallel with actor.fsdp=true, set actor.gradient_checkpointing=true and "
        "actor.dtype=bfloat16, or lower actor.rank_tokens"
    )


def _cache(config: RunConfig, shape: ModelShape, placed: list[Placed]) -> Iterator[str]:
    if config.rollout.engine != "sglang":
        return
    longest = memory.capacity(config, shape)
    for node in placed:
        if not any(bundle.role == "rollout" and bundle.gpus for bundle in node.bundles):
            continue
        estimate, tokens = memory.engine(config, shape, node.node.gpu_memory)
        if tokens < longest:
            yield (
                f"rollout on {node.node.name}: beside {estimate.terms[0].nbytes / GIB:.1f} GiB of weights a "
                f"server's cache holds {tokens:,} tokens, and one sequence may have {longest:,}; raise "
                f"rollout.sglang.tensor_parallel or memory_fraction, or lower model.context_length"
            )
            return


def _host_memory(config: RunConfig, shape: ModelShape, placed: list[Placed]) -> Iterator[str]:
    """A trainer's ranks freeze two versions between them, an engine takes one whole; the queue is on the
    first node.
    """
    version = memory.published(config, shape)
    ranks = max(1, config.actor.ranks)
    for number, node in enumerate(placed):
        trainers = sum(len(b.workers) for b in node.bundles if b.role == "actor")
        engines = sum(len(b.workers) for b in node.bundles if b.role == "rollout")
        size = config.queue.max_bytes
        share = "%" in str(size)
        queue = node.node.memory * float(str(size).rstrip("% ")) / 100 if share else bytes_of(size)
        frozen, staged = 2 * version * trainers / ranks, version * engines
        need = frozen + staged + (queue if number == 0 else 0)
        if need > node.node.memory:
            yield (
                f"{node.node.name} has {node.node.memory / GIB:.0f} GiB and would hold {need / GIB:.0f}: "
                f"{frozen / GIB:.0f} of frozen versions (2 x {version / GIB:.1f} x {trainers}/{ranks}), "
                f"{staged / GIB:.0f} that {engines} engines take in"
                + (f", {queue / GIB:.0f} of samples (queue.max_bytes = {size})" if number == 0 else "")
                + "; lower queue.max_bytes or rollout.replicas"
            )


def _not_here(config: RunConfig) -> Iterator[str]:
    """What this machine lacks, and the nodes need."""
    wanted = {}
    if config.actor.backend == "megatron":
        wanted["megatron.core"] = "actor.backend = megatron (relax-core[megatron])"
        if config.actor.megatron.transformer_engine is not False and config.actor.device == "cuda":
            wanted["transformer_engine"] = (
                "layers of Transformer Engine; without, actor.megatron.transformer_engine counts as false"
            )
    if config.rollout.engine == "sglang" and config.rollout.sglang.python is None:
        wanted["sglang"] = "rollout.engine = sglang, unless rollout.sglang.python names another environment"
    for name, why in wanted.items():
        if not _installed(name):
            yield f"{name} is not installed on this machine; the nodes need it for {why}"
    if ":" not in config.data.path and not Path(config.data.path).exists():
        yield (
            f"data.path = {config.data.path!r} is not on this machine; its columns and the length of its "
            f"prompts are looked at when the run starts"
        )


def _installed(name: str) -> bool:
    """Whether a module can be found; the packages around it are, but it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _worth_knowing(config: RunConfig, placed: list[Placed]) -> Iterator[str]:
    used = [node for node in placed if node.bundles]
    if idle := sum(node.free_gpus for node in placed):
        yield f"{idle} GPUs are not used"
    if len(used) > 1:
        yield "run.root has to be a folder that all nodes share: roles write their records there"
    actor = config.actor
    spans = sum(node.holds("actor") for node in placed)
    if spans > 1 and actor.context_parallel > 1:
        yield "the actor is on several nodes: context-parallel groups may span them, and exchange keys there"
    if actor.device == "cuda" and config.rollout.engine == "transformers" and config.rollout.device == "cpu":
        yield "rollout.engine = transformers computes on CPUs; set rollout.device=cuda for a GPU a replica"
