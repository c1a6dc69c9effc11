"""Settings of what carries a run: the run folder, the bus, the weights, Ray, checkpoints and logs."""

import re
from typing import Literal

from pydantic import Field, field_validator

from relax.config.base import Settings


class RunSettings(Settings):
    name: str | None = None
    """Name of the run's folder; the configuration's name and the time when not given."""
    root: str = "runs"
    """Folder of the run folders."""

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError("a run's name is letters, digits, dots, dashes and underscores, at most 100")
        return name


class QueueSettings(Settings):
    """transferqueue, started with the run."""

    storage_units: int = Field(default=1, ge=1)
    """Processes that serve payload; one that dies is started again, and nothing is lost by that."""
    max_bytes: int | str = "25%"
    """Most payload held at once: bytes, a size such as `8GiB`, or a share of the memory that this machine (or
    container) has. Rollout waits beyond it. It has to hold the samples of one step.
    """
    wait_seconds: float = Field(default=600.0, gt=0)
    """Longest wait of rollout for room; then the run ends."""
    transport: Literal["auto", "shm", "zmq"] = "auto"
    """How samples travel between roles and queue: `shm`, memory that all of them map, `zmq`, messages over
    TCP, or `auto`, the first where it is possible.
    """
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the controller; 0 takes a free one."""

    @field_validator("max_bytes")
    @classmethod
    def _size(cls, size: int | str) -> int | str:
        from relax.config.sizes import bytes_of

        bytes_of(size)
        return size


class WeightSettings(Settings):
    """dcs, started with the run."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the coordinator; 0 takes a free one."""
    timeout_seconds: float = Field(default=120.0, gt=0)
    """Longest wait for engines to take a version, and for a coordinator that is being started again."""
    wires: list[Literal["shm", "tcp"]] = Field(default=["shm", "tcp"], min_length=1)
    """How a version may travel: `shm`, the trainer's copy of it mapped by engines on the same machine, or
    `tcp`. Mapped where that is possible, and by tcp else; with one of them only by that one.
    """
    streams: int = Field(default=4, ge=1, le=64)
    """TCP connections from an engine to a source on another machine; a long line needs several. On one
    machine there is one.
    """
    delta: bool | None = None
    """Send by tcp only what changed since the version before, bit for bit: true, false, or null, between
    machines only. What is mapped is never a difference.
    """


class RaySettings(Settings):
    """The Ray that holds the roles: started inside the command, or an existing cluster's `address`."""

    address: str | None = None
    """Of an existing cluster, or `auto` for the one that this machine belongs to."""
    host: str | None = None
    """With `address`: where this machine is reached by the other nodes, and its queue and weight coordinator
    listen, behind a token; found by itself when not given. Without, they listen on loopback.
    """
    nodes: int | None = Field(default=None, ge=1)
    """With `address`: wait for as many nodes, up to `start_seconds`. `spmd-multinode.sh` sets it; its nodes
    also have to have the same code and words.
    """
    num_cpus: int | None = Field(default=None, ge=1)
    """CPUs of the embedded Ray; those of the machine when not given."""
    cpus_per_worker: float = Field(default=0.2, gt=0)
    """CPUs a role's worker reserves (a reservation, not a limit)."""
    start_seconds: float = Field(default=180.0, gt=0)
    """Longest time until every role is ready; where `rollout.sglang.start_seconds` is longer, that counts."""


class CheckpointSettings(Settings):
    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""


class LogSettings(Settings):
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Live display on a terminal, plain lines elsewhere."""
    tensorboard: bool = True
    samples_per_step: int = Field(default=2, ge=0)
    """Samples of each step written to samples.jsonl."""
