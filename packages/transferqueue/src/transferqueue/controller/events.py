"""What the journal keeps: every change of the controller's state as a small message, and the whole of it as
one.

A change of a partition is a `scheduling.events.Event`. Memory that becomes free is not told: it follows from
the samples and pins that go.
"""

from typing import Any

import msgspec

from ..scheduling.events import Event
from ..scheduling.state import PartitionState
from ..wire.messages import OpenPartition, Range, UnitAddress

FORMAT = 1


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An event is a tagged array: its type's name, then its fields."""


class PartitionOpened(_Event, frozen=True):
    """A new partition; they are numbered as they come."""

    body: OpenPartition


class Changed(_Event, frozen=True):
    """A change of partition `number`."""

    number: int
    event: Event


class ArenaMade(_Event, frozen=True):
    arena: int
    nbytes: int


class GrantMade(_Event, frozen=True):
    range: Range
    owner: int | None
    unit: int | None
    slab: bool


class RangeDiscarded(_Event, frozen=True):
    """A range of a grant is not its owner's any more, and no block came of it."""

    range: Range


class RangeWritten(_Event, frozen=True):
    """A unit has filled a range of a grant, which may not have been committed yet."""

    range: Range


class GrantEnded(_Event, frozen=True):
    grant: int


class BlockMade(_Event, frozen=True):
    """A range is a block now. `ids` are its rows' samples, as pairs of a first id and how many follow."""

    block: int
    range: Range
    fields: int
    ids: list[int]


class BlockMoved(_Event, frozen=True):
    """Rows of a block lie in a smaller one now."""

    source: int
    rows: list[int]
    block: int
    range: Range


class Pinned(_Event, frozen=True):
    client: int
    blocks: list[int]


class Unpinned(_Event, frozen=True):
    client: int
    blocks: list[int]


class PinsTold(_Event, frozen=True):
    """A client that came back has said what it looks at."""

    client: int
    blocks: list[int]


class ClientKnown(_Event, frozen=True):
    """A client holds something for the first time. `pid` is 0 for one of another host; `born` tells it from
    another process of that pid.
    """

    client: int
    pid: int
    born: int


class ClientGone(_Event, frozen=True):
    client: int


class UnitKnown(_Event, frozen=True):
    """A storage unit listens there, and its successors do."""

    address: UnitAddress


class Kept(_Event, frozen=True):
    """An answer that a client may ask for again.

    Attributes:
        low: requests of the client below this are finished.
        reply: the encoded `Reply`.
        partition, rows: what the request was about.
    """

    client: int
    low: int
    request: int
    reply: bytes
    partition: int
    rows: int


class Voided(_Event, frozen=True):
    """An answer was taken back; asked again, the request is a new one."""

    client: int
    request: int


StoreEvent = (
    PartitionOpened | Changed | ArenaMade | GrantMade | RangeDiscarded | RangeWritten | GrantEnded |
    BlockMade | BlockMoved | Pinned | Unpinned | PinsTold | ClientKnown | ClientGone | UnitKnown |
    Kept | Voided
)  # fmt: skip


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What changed in one turn of the controller, `now` on its monotonic clock."""

    now: float
    events: list[StoreEvent]


# -- the whole -----------------------------------------------------------------------------------------------


class ShelfState(msgspec.Struct, frozen=True, array_like=True):
    body: OpenPartition
    serial: int
    partition: PartitionState


class BlockState(msgspec.Struct, frozen=True, array_like=True):
    number: int
    range: Range
    fields: int
    rows: int


class GrantState(msgspec.Struct, frozen=True, array_like=True):
    range: Range
    owner: int | None
    unit: int | None
    slab: bool
    named: list[tuple[int, int]]
    written: list[tuple[int, int]]
    abandoned: list[tuple[int, int]]


class ClientState(msgspec.Struct, frozen=True, array_like=True):
    number: int
    pid: int
    born: int
    low: int
    pins: list[int]
    answers: list[Kept]


class StoreState(msgspec.Struct, frozen=True, array_like=True):
    """All that a controller knows.

    Attributes:
        format: of this message.
        incarnation: of the store; another one knows none of its clients.
        generation: of the sample ids.
        boot: of the operating system; `now` is its monotonic clock, `wall` the time of day then.
        next_grant, next_block: numbers to give next.
        arenas: number and bytes.
    """

    format: int
    incarnation: int
    generation: int
    boot: str
    now: float
    wall: float
    next_grant: int
    next_block: int
    units: list[UnitAddress]
    arenas: list[tuple[int, int]]
    shelves: list[ShelfState]
    blocks: list[BlockState]
    grants: list[GrantState]
    clients: list[ClientState]


def number_of(thing: Any) -> int:
    """How a block is written among the places of a sample."""
    return thing.number


encode = msgspec.msgpack.Encoder(enc_hook=number_of).encode
decode_turn = msgspec.msgpack.Decoder(Turn).decode
decode_state = msgspec.msgpack.Decoder(StoreState).decode


def ids_in_runs(ids: list[int]) -> list[int]:
    """Ids as pairs of a first one and how many follow each other."""
    runs: list[int] = []
    following = -1
    for sample in ids:
        if sample == following:
            runs[-1] += 1
        else:
            runs += (sample, 1)
        following = sample + 1
    return runs


def ids_of_runs(runs: list[int]) -> list[int]:
    """The ids again."""
    return [
        sample
        for first, count in zip(runs[::2], runs[1::2], strict=True)
        for sample in range(first, first + count)
    ]
