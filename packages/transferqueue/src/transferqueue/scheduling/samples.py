"""The metadata of one sample, and what a consumer gets of several."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from .groups import Group

MAX_LENGTH = 1 << 40  # of one sample; sums of it, over however many, stay within 64 bits
MAX_NBYTES = 1 << 40  # of one sample
MAX_MEMBERS = 1 << 31  # of one group


class Row(msgspec.Struct, array_like=True):
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
    places: list[Any] = []


class Sample(msgspec.Struct, gc=False, eq=False):
    """One row's metadata: no cycle leads through it, so the collector need not look at a million of them.

    Attributes:
        written: bit set of fields.
        ready, leased, acked: bit sets of tasks. A sample that is in none of a task's three is unready for it.
        queued: bit set of tasks whose queue has an entry for it, alive or not; the queue's own.
        places: where the payload lies; owned by the caller, never read here.
        born: when it was put, on the caller's clock.
        holds: rounds that will still hand it out as a copy; its payload stays for so long.
    """

    id: int
    order: int
    priority: int
    version: int
    group: Group | None
    nbytes: int
    written: int
    length: int
    born: float
    places: list[Any]
    ready: int = 0
    leased: int = 0
    acked: int = 0
    queued: int = 0
    holds: int = 0


def within(value: int, limit: int) -> int:
    """The nearest of what a put may say: an old journal may hold what is refused now."""
    return min(max(value, 0), limit - 1)


def missing(samples: Iterable[Sample], mask: int) -> list[int]:
    """The ids of the samples for which not all fields of the bit set are written."""
    return [sample.id for sample in samples if mask & ~sample.written]


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A sample that is ready, as a user's own sampler sees it.

    Attributes:
        group: the key of its group, or None.
        age: seconds since it was put.
    """

    id: int
    group: str | None
    version: int
    priority: int
    length: int
    age: float


@dataclass(slots=True)
class Lease:
    """What one fetch was served.

    Attributes:
        id: the fencing token for ack, nack and extend; 0 for a dummy, which has none.
        samples: in the order served. Those of a dummy may be gone for everyone else: take what you need of
            them before you take `Partition.freed`.
        is_last: it completes a global batch, or the stream ends with it.
        dummy: a copy of a sample that is not this consumer's, so that every rank has equally many
            micro-batches.
        seat: the sequence of rounds, the rank and the member in it, and the round; None outside rounds.
    """

    id: int
    task: str
    samples: list[Sample]
    is_last: bool = False
    dummy: bool = False
    seat: tuple[int, int, int, int] | None = None

    @property
    def ids(self) -> list[int]:
        return [sample.id for sample in self.samples]
