"""A cluster described by a file, for `relax doctor --cluster`: its nodes, with what each of them has."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import Field, ValidationError, field_validator

from relax.config.base import ConfigError, Settings
from relax.config.sizes import bytes_of

EXAMPLE = "nodes: [{name: node, count: 2, cpus: 96, gpus: 8, gpu_memory: 80GB, memory: 1TiB}]"


class NodeSettings(Settings):
    """One kind of node."""

    name: str = Field(min_length=1)
    """With a `count` above 1 a number is added to it."""
    count: int = Field(default=1, ge=1)
    cpus: float = Field(gt=0)
    gpus: int = Field(default=0, ge=0)
    gpu_memory: int | str | None = None
    """Of one GPU, as its maker counts it: bytes, or a size such as `80GB`."""
    memory: int | str
    """Of the node: bytes, or a size such as `1TiB`."""

    @field_validator("gpu_memory", "memory")
    @classmethod
    def _size(cls, size: int | str | None) -> int | str | None:
        if size is None:
            return None
        if str(size).strip().endswith("%"):
            raise ValueError(f"{size!r} is a share of this machine's memory; give the node's, such as '80GB'")
        bytes_of(size)
        return size


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
    try:
        settings = ClusterSettings.model_validate(content)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, item['loc'])) or 'the file'} = {item['input']!r}: {item['msg']}"
            for item in error.errors()
        ]
        raise ConfigError(
            f"--cluster {file}: it does not describe a cluster:\n  "
            + "\n  ".join(faults)
            + f"\nsuch a file looks like {EXAMPLE}"
        ) from None
    nodes = tuple(_nodes(settings))
    names = [node.name for node in nodes]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--cluster {file}: two nodes are called {min(twice)}; give each its own name")
    for node in nodes:
        if node.gpus and not node.gpu_memory:
            raise ConfigError(
                f"--cluster {file}: node {node.name} has {node.gpus} GPUs and no gpu_memory; say how much "
                f"one of them has, such as gpu_memory: 80GB"
            )
    return Cluster(str(file), nodes)


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
