"""What leader and ranks say to each other over a tether: small msgspec structs, one a frame."""

from typing import Any

import msgspec


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank's first word. `host` is where its address is known to others."""

    token: str
    rank: int
    pid: int
    host: str


class Job(msgspec.Struct, frozen=True, tag=True):
    """What a rank has to do, the leader's answer to `Hello`.

    Attributes:
        rank, world_size: the rank's place.
        store: host and port of torch's store, where process groups meet.
        backend: registered name or import path of the rank backend.
        folder: the Hugging Face model folder.
        settings: of `TrainerSettings`.
        actor: the `actor` section of the configuration, dumped.
        algorithm: name and settings, for `relax.algorithms.build`.
        device: kind of device, `cpu` or `cuda`.
        seed, torch_threads, trains: as in `RankSpec`.
        timeout: seconds that a collective, or silence, may last.
    """

    rank: int
    world_size: int
    store: tuple[str, int]
    backend: str
    folder: str
    settings: dict[str, Any]
    actor: dict[str, Any]
    algorithm: tuple[str, dict[str, Any]]
    device: str
    seed: int
    torch_threads: int | None
    trains: bool
    timeout: float


class Here(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded what it needs to join the groups."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank is built, and stands there: data-parallel rank and size, and whether it speaks."""

    data_rank: int
    data_size: int
    speaks: bool


class Call(msgspec.Struct, frozen=True, tag=True):
    """The leader begins call `number`: collectives follow."""

    number: int


class Raised(msgspec.Struct, frozen=True, tag=True):
    """A rank failed and ends.

    Attributes:
        verb: what it was doing.
        error: type and message.
        trace: the traceback.
        consequence: the error only says that another rank is gone.
    """

    verb: str
    error: str
    trace: str
    consequence: bool


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Sent now and then by both sides."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The leader's last word; with a `fault`, because of it: whatever goes on is given up."""

    fault: str = ""


ToLeader = Hello | Here | Ready | Raised | Alive
ToRank = Job | Call | Alive | End
