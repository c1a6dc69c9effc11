"""Every change of a partition as a small message; `replay` repeats them.

`Partition.recorder` is called with each event after the change it tells of. Applying the events in order to
an empty partition of the same tasks gives the same state; deadlines count from the `now` they are applied at.
"""

from typing import Any, Protocol

import msgspec

from ..values.columns import FieldSpec
from .samples import Row
from .wanted import Wanted


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An event is a tagged array: its type's name, then its fields. Durations are seconds from the event."""


class Put(_Event, frozen=True):
    rows: list[Row]
    specs: dict[str, FieldSpec]
    sizes: dict[str, int]
    ticket: int | None


class Updated(_Event, frozen=True):
    ids: list[int]
    specs: dict[str, FieldSpec]
    nbytes: list[int]
    lengths: list[int] | None
    places: list[list[Any]] | None


class Leased(_Event, frozen=True):
    lease: int
    task: str
    ids: list[int]
    owner: int
    seconds: float


class PlannedPart(msgspec.Struct, frozen=True, array_like=True):
    """What one rank gets in a round. A dummy has `lease` 0 and one id, the sample it copies."""

    lease: int
    ids: list[int]


class PlannedRound(msgspec.Struct, frozen=True, array_like=True):
    parts: list[PlannedPart]
    is_last: bool


class Planned(_Event, frozen=True):
    """Rounds added to a sequence; `issued` samples of its global batch are out with them."""

    sequence: int
    terms: Wanted
    rounds: list[PlannedRound]
    issued: int
    seconds: float


class Drained(_Event, frozen=True):
    """A sequence ends with the stream: each rank is told so after the same number of rounds."""

    sequence: int
    terms: Wanted
    seconds: float


class Told(_Event, frozen=True):
    """A rank has been told of the end of its sequence."""

    sequence: int
    rank: int
    member: int
    owner: int


class Handed(_Event, frozen=True):
    """A rank has got its part of the next round. `lease` is its fencing token; 0 for a dummy."""

    sequence: int
    rank: int
    member: int
    owner: int
    lease: int
    seconds: float


class TakenBack(_Event, frozen=True):
    """A part could not be delivered and waits to be asked for again."""

    sequence: int
    rank: int
    member: int
    lease: int


class Forgotten(_Event, frozen=True):
    """A sequence that nobody asked for any more has ended."""

    sequence: int


class Acked(_Event, frozen=True):
    lease: int


class Returned(_Event, frozen=True):
    """The samples of a lease are ready again. `lapsed`: because of its deadline."""

    lease: int
    lapsed: bool


class Extended(_Event, frozen=True):
    lease: int
    seconds: float


class Dropped(_Event, frozen=True):
    ids: list[int]
    reason: str


class GroupClosed(_Event, frozen=True):
    key: str
    count: int
    tombstones: int


class Watched(_Event, frozen=True):
    """A task has been asked for groups of this size for the first time."""

    task: str
    n: int


class Advanced(_Event, frozen=True):
    version: int


class Ended(_Event, frozen=True):
    """The partition is closed."""


class Admitted(_Event, frozen=True):
    ticket: int
    samples: int
    version: int
    owner: int
    seconds: float


class Unadmitted(_Event, frozen=True):
    ticket: int


class Released(_Event, frozen=True):
    """A client is gone: its leases and tickets are returned, and it has left its sequences."""

    owner: int


RoundEvent = Planned | Drained | Told | Handed | TakenBack | Forgotten
Event = (
    RoundEvent | Put | Updated | Leased | Acked | Returned |
    Extended | Dropped | GroupClosed | Watched | Advanced | Ended | Admitted | Unadmitted | Released
)  # fmt: skip


class Recorder(Protocol):
    """What a partition tells its changes to."""

    def __call__(self, event: Event, /) -> None: ...
