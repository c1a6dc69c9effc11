"""The nodes of a cluster that is started for one run: whether all have come, each once, and are alike.

A node says which one it is, what code it has and what it was asked to run in the labels of its Ray
(`scripts/entrypoint/spmd-multinode.sh`). Roles are sent to it by name only, so other code there would be run.
"""

import hashlib
import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.config import ConfigError

RANK, CODE, WORDS = "relax-rank", "relax-code", "relax-words"

PACKAGES = ("relax", "agentic", "dcs", "omni_processor", "transferqueue")
LIBRARIES = ("torch", "transformers", "ray")

LOOK_SECONDS = 1.0
"""Between two looks at the nodes: Ray has no other way to say that one has joined."""


def labels_of(rank: int, file: Path | None, words: Sequence[str]) -> dict[str, str]:
    """What a node says of itself.

    Args:
        rank: which one it is, from 0.
        file: the configuration.
        words: what changes it.

    Raises:
        ConfigError: the file cannot be read.
    """
    asked = hashlib.sha256(repr(list(words)).encode())
    if file is not None:
        try:
            asked.update(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"{file}: it cannot be read: {error}") from error
    return {RANK: str(rank), CODE: _code(), WORDS: asked.hexdigest()[:12]}


def _code() -> str:
    """A digest of our packages, and of the versions of those that objects of theirs are sent for."""
    found = hashlib.sha256(platform.python_version().encode())
    for name in LIBRARIES:
        found.update(f"{name} {importlib.metadata.version(name)}".encode())
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        for folder in map(Path, folders):
            for file in sorted(folder.rglob("*.py")):
                found.update(str(file.relative_to(folder)).encode())
                found.update(file.read_bytes())
    return found.hexdigest()[:12]


@dataclass(frozen=True)
class Joined:
    """One node of a Ray. `rank` is None where it was not started for a run."""

    address: str
    alive: bool
    rank: int | None
    labels: Mapping[str, str]

    @classmethod
    def read(cls, node: Mapping[str, Any]) -> "Joined":
        """As `ray.nodes()` has it."""
        labels = {str(name): str(value) for name, value in (node.get("Labels") or {}).items()}
        rank = labels.get(RANK, "")
        return cls(node["NodeManagerAddress"], node["Alive"], int(rank) if rank.isdigit() else None, labels)


def await_nodes(look: Callable[[], Sequence[Mapping[str, Any]]], count: int, seconds: float) -> None:
    """Wait until a Ray has as many nodes.

    Args:
        look: `ray.nodes`.
        count: of nodes.
        seconds: longest wait.

    Raises:
        ConfigError: they did not come, by rank; two have the same rank; one has other code, or was asked to
            run something else, than the node of rank 0.
    """
    deadline = time.monotonic() + seconds
    while True:
        joined = [Joined.read(node) for node in look()]
        there = [node for node in joined if node.alive]
        _check_alike(there)
        if len(there) >= count:
            return
        if time.monotonic() >= deadline:
            raise ConfigError(_missing(joined, count, seconds))
        time.sleep(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))


def _check_alike(there: Sequence[Joined]) -> None:
    first = next((node for node in there if node.rank == 0), None)
    by_rank: dict[int, Joined] = {}
    for node in there:
        if node.rank is None:
            continue
        twin = by_rank.setdefault(node.rank, node)
        if twin is not node:
            raise ConfigError(
                f"NODE_RANK = {node.rank}: two nodes have it, {twin.address} and {node.address}; give each "
                f"its own, from 0 to NNODES-1"
            )
        for label, what, way_out in (
            (
                CODE,
                "other code (relax, its packages, Python, torch, transformers or Ray)",
                "install the same",
            ),
            (WORDS, "another configuration or other words after it", "start all nodes alike"),
        ):
            if first is not None and node.labels.get(label) != first.labels.get(label):
                raise ConfigError(
                    f"the node of rank {node.rank} ({node.address}) has {what} than that of rank 0 "
                    f"({first.address}); {way_out}"
                )


def _missing(joined: Sequence[Joined], count: int, seconds: float) -> str:
    there = [node for node in joined if node.alive]
    ranks = {node.rank for node in there if node.rank is not None}
    lacking = sorted(set(range(count)) - ranks)
    named = f": no node of rank {', '.join(map(str, lacking))}" if ranks else ""
    left = [node for node in joined if not node.alive and node.rank in lacking]
    gone = f" ({', '.join(f'rank {node.rank} at {node.address} had joined and left' for node in left)})"
    return (
        f"within {seconds:g} s (ray.start_seconds) {len(there)} of {count} nodes (ray.nodes) had joined"
        f"{named}{gone if left else ''}; look at what their launchers said"
    )
