"""A cluster described by a file, for `relax doctor --cluster`: its nodes, with what each of them has."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import Field, ValidationError, field_validator

from relax.config.base import ConfigError, Settings
from relax.config.sizes import bytes_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

EXAMPLE = "nodes: [{name: node, count: 2, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]"

NODES = 4096
"""Most nodes of a cluster."""

SHOWN = 60
"""Characters of a value that is refused."""

MOST_DIGITS = 30
"""Of a size; far beyond what there is, and within what can be reckoned with."""


class NodeSettings(Settings):
    """One kind of node."""

    name: str = Field(max_length=253, pattern=r"^[A-Za-z0-9_.:-]+$")
    """Letters, digits and what host names have. With a `count` above 1 a number is added to it."""
    count: int = Field(default=1, ge=1, le=NODES)
    cpus: float = Field(gt=0)
    gpus: int = Field(default=0, ge=0, le=1024)
    gpu_memory: int | str | None = None
    """Of one GPU, as its maker counts it: a size such as `80GB`, or bytes, from 1 GiB on."""
    memory: int | str
    """Of the node, the same way: `1TiB`."""

    @field_validator("gpu_memory", "memory", mode="before")
    @classmethod
    def _size(cls, size: object) -> object:
        if size is None:
            return None
        text = str(size).strip()
        if text.endswith("%"):
            raise ValueError(f"{size!r} is a share of this machine's memory; give the node's, such as '80GB'")
        if len(text) > MOST_DIGITS:
            raise ValueError("no node has so much")
        bare = re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None
        if bare and float(text) < 1 << 30:
            raise ValueError(f"{text} has no unit, and so few bytes no node has; write '{text}GiB'")
        found = int(float(text)) if bare else bytes_of(text)
        if found < 1 << 30:
            raise ValueError(f"{size!r} is less than 1 GiB, which no node has")
        return found


class ClusterSettings(Settings):
    """All kinds of nodes."""

    nodes: list[NodeSettings] = Field(min_length=1)


@dataclass(frozen=True)
class Node:
    """One node. Sizes are in bytes; `gpu_memory` is that of one GPU."""

    name: str
    cpus: float
    gpus: int
    gpu_memory: int
    memory: int


@dataclass(frozen=True)
class Cluster:
    """The nodes, and the file that they were read from."""

    file: str
    nodes: tuple[Node, ...]

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)


def load_cluster(file: Path) -> Cluster:
    """Read a cluster's file.

    Raises:
        ConfigError: there is none, it is not YAML, or a node lacks something.
    """
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cluster {file}: it cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--cluster {file}: it is not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"--cluster {file}: its lists are too deep for a cluster's file") from None
    try:
        settings = ClusterSettings.model_validate(content)
    except ValidationError as error:
        faults = [_fault(item) for item in error.errors()]
        raise ConfigError(
            f"--cluster {file}: it does not describe a cluster:\n  "
            + "\n  ".join(faults)
            + f"\nsuch a file looks like {EXAMPLE}"
        ) from None
    if (together := sum(kind.count for kind in settings.nodes)) > NODES:
        raise ConfigError(f"--cluster {file}: {together} nodes together are more than {NODES}; lower a count")
    nodes = tuple(_nodes(settings))
    names = Counter(node.name for node in nodes)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"--cluster {file}: two nodes are called {min(twice)}; give each its own name")
    for node in nodes:
        if node.gpus and not node.gpu_memory:
            raise ConfigError(
                f"--cluster {file}: node {node.name} has {node.gpus} GPUs and no gpu_memory; say how much "
                f"one of them has, such as gpu_memory: 80GB"
            )
    return Cluster(str(file), nodes)


def _fault(item: "ErrorDetails") -> str:
    """What is wrong at one place of the file, in words."""
    where, (*_, key) = ".".join(map(str, item["loc"])) or "the file", item["loc"] or ("",)
    found = repr(item["input"])
    found = found if len(found) <= SHOWN else f"{found[:SHOWN]}..."
    if item["type"] == "extra_forbidden":
        known = list((NodeSettings if len(item["loc"]) > 1 else ClusterSettings).model_fields)
        near = difflib.get_close_matches(str(key), known, 1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(known)}"
        return f"{where} = {found}: there is no such key; {hint}"
    if item["type"] in ("model_type", "dict_type"):
        return f"{where} = {found}: keys and values are expected"
    if item["type"] == "string_pattern_mismatch":
        return f"{where} = {found}: letters, digits, dots, dashes, colons and underscores are expected"
    if item["type"] == "missing":
        return f"{where}: it is missing"
    return f"{where} = {found}: {item['msg'].removeprefix('Value error, ')}"


def _nodes(settings: ClusterSettings) -> Iterator[Node]:
    for kind in settings.nodes:
        for number in range(kind.count):
            yield Node(
                f"{kind.name}-{number}" if kind.count > 1 else kind.name,
                kind.cpus,
                kind.gpus,
                0 if kind.gpu_memory is None else bytes_of(kind.gpu_memory),
                bytes_of(kind.memory),
            )
