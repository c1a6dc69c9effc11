"""What lies in the memory of a store: blocks, and the grants under which they are written."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..scheduling.samples import Sample
from ..wire.messages import Handle, Range


class Block:
    """What one put or update wrote.

    Attributes:
        number: names it between controller and clients.
        fields: bit set of the fields it holds.
        samples: by row, the sample; None when that is gone.
        living: rows whose sample is still there.
        pins: replies naming it whose views are still alive.
    """

    __slots__ = ("arena", "fields", "grant", "living", "number", "pins", "samples", "start", "stop")

    def __init__(self, number: int, where: Range, fields: int, samples: Sequence[Sample | None]) -> None:
        self.number = number
        self.grant = where.grant
        self.arena = where.arena
        self.start = where.start
        self.stop = where.stop
        self.fields = fields
        self.samples = list(samples)
        self.living = len(samples) - self.samples.count(None)
        self.pins = 0

    @property
    def handle(self) -> Handle:
        return Handle(self.number, self.grant, self.arena, self.start, self.stop, len(self.samples))

    @property
    def range(self) -> Range:
        return Range(self.grant, self.arena, self.start, self.stop)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Grant:
    """Memory that a client writes to.

    Attributes:
        owner: the session; None for the controller's own.
        unit: the storage unit it is written through; None: in place.
        slab: it is for many small puts, and goes on after each.
        named: ranges that were committed, sorted; they are not the client's any more.
        written: ranges that the unit reported; only of grants that have a unit.
        abandoned: named ranges that no block came of; free when the grant ends.
    """

    number: int
    owner: int | None
    arena: int
    start: int
    stop: int
    unit: int | None
    slab: bool = False
    named: list[tuple[int, int]] = field(default_factory=list)
    written: set[tuple[int, int]] = field(default_factory=set)
    abandoned: list[tuple[int, int]] = field(default_factory=list)

    @property
    def range(self) -> Range:
        return Range(self.number, self.arena, self.start, self.stop)

    @property
    def unnamed(self) -> list[tuple[int, int]]:
        """What is still its owner's."""
        at, parts = self.start, []
        for start, stop in self.named:
            if at < start:
                parts.append((at, start))
            at = stop
        if at < self.stop:
            parts.append((at, self.stop))
        return parts

    @property
    def writable(self) -> Range | None:
        """The part that may still be written, of a grant through a unit: not what came of earlier writes."""
        start = self.start
        for begin, end in self.named:
            if begin != start or (begin, end) not in self.written:
                break
            start = end
        return Range(self.number, self.arena, start, self.stop) if start < self.stop else None
