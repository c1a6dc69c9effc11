"""The metadata of one sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .groups import Group, State


@dataclass(slots=True)
class Row:
    """What a put says about one sample.

    Attributes:
        places: where the payload lies; kept for the caller, never read here.
        length: what length samplers count, in tokens or whatever the producer measures.
    """

    id: int
    group: str | None
    version: int
    priority: int
    nbytes: int
    length: int = 0
    places: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Sample:
    """One row's metadata. `written` is a bit set of fields; `states` holds one state a task.

    Attributes:
        places: where the payload lies; owned by the caller, never read here.
        born: when it was put, on the caller's clock.
    """

    id: int
    order: int
    priority: int
    version: int
    group: Group | None
    nbytes: int
    written: int
    states: list[State]
    tasks_left: int
    length: int
    born: float
    places: list[Any]


@dataclass(slots=True)
class Lease:
    """Samples on loan to a consumer until `deadline`; `id` is the fencing token."""

    id: int
    task: str
    ids: dict[int, None]
    deadline: float
    owner: int


def missing(samples: Sequence[Sample], mask: int) -> list[int]:
    """The ids of the samples for which not all fields of the bit set are written."""
    return [sample.id for sample in samples if mask & ~sample.written]
