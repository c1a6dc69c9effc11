"""The memory of a store: arenas, the ranges granted to clients, the blocks that lie in them, and who looks
at those.
"""

import os
import secrets
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import Full, InvalidArgument
from ..wire.messages import ArenaHere, Handle, Range
from ..wire.node import Arena as ArenaAndDescriptor
from .free_ranges import FreeRanges

SLAB_BYTES = 1 << 20
ARENA_BYTES = 1 << 28
_ALIGNMENT = 64
_PAGE = 4096


class Block:
    """What one put or update wrote.

    Attributes:
        number: names it between controller and clients.
        fields: bit set of the fields it holds.
        samples: by row, the id of the sample; None when that is gone.
        living: rows whose sample is still there.
        pins: replies naming it whose views are still alive.
    """

    __slots__ = ("arena", "fields", "grant", "living", "number", "pins", "samples", "start", "stop")

    def __init__(self, number: int, where: Range, fields: int, samples: Sequence[int]) -> None:
        self.number = number
        self.grant = where.grant
        self.arena = where.arena
        self.start = where.start
        self.stop = where.stop
        self.fields = fields
        self.samples: list[int | None] = list(samples)
        self.living = len(samples)
        self.pins = 0

    @property
    def handle(self) -> Handle:
        return Handle(self.number, self.grant, self.arena, self.start, self.stop)

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


@dataclass(slots=True)
class _Arena:
    nbytes: int
    descriptor: int
    free: FreeRanges


class Backing(Protocol):
    """Makes arenas."""

    def make(self, arena: int, nbytes: int) -> int:
        """A descriptor of `nbytes` of memory that processes can share. OSError if there is no room."""
        ...


class Memory:
    """All of it. Nothing here waits or sends.

    Args:
        backing: where arenas come from.
        made: told of every new arena.
    """

    def __init__(self, backing: Backing, made: Callable[[int], None]) -> None:
        self._backing = backing
        self._made = made
        self._arenas: dict[int, _Arena] = {}
        self.grants: dict[int, Grant] = {}
        self.blocks: dict[int, Block] = {}
        self._pins: dict[int, Counter[int]] = {}
        # Drawn, so that what an earlier store left in a file can never be taken for ours.
        self._next_grant = secrets.randbits(40) << 20
        self._next_block = 1
        self.used = 0

    # -- arenas ----------------------------------------------------------------------------------------------

    def arena(self, number: int) -> ArenaAndDescriptor:
        """An arena to tell a client or unit of."""
        arena = self._arenas[number]
        return ArenaHere(number, arena.nbytes), arena.descriptor

    @property
    def arenas(self) -> Sequence[int]:
        return list(self._arenas)

    @property
    def capacity(self) -> int:
        return sum(arena.nbytes for arena in self._arenas.values())

    @property
    def free(self) -> int:
        return sum(arena.free.nbytes for arena in self._arenas.values())

    @property
    def pinned_only(self) -> int:
        """Bytes of blocks that only readers still hold."""
        return sum(block.nbytes for block in self.blocks.values() if not block.living)

    def _find(self, span: int) -> tuple[int, int]:
        for number, arena in self._arenas.items():
            start = arena.free.take(span)
            if start is not None:
                return number, start
        number = len(self._arenas)
        nbytes = max(ARENA_BYTES, -(-span // ARENA_BYTES) * ARENA_BYTES)
        try:
            descriptor = self._backing.make(number, nbytes)
        except OSError as error:
            raise Full(
                f"no memory for {span} bytes more: {error}; consume faster or lower max_bytes"
            ) from error
        arena = self._arenas[number] = _Arena(nbytes, descriptor, FreeRanges())
        arena.free.add(0, nbytes)
        self._made(number)
        start = arena.free.take(span)
        assert start is not None
        return number, start

    # -- grants ----------------------------------------------------------------------------------------------

    def take(self, span: int, owner: int | None, unit: int | None) -> Grant:
        """Grants `span` bytes (rounded up). Raises Full if the system has no memory left."""
        unit_of_size = _PAGE if span >= 16 * _PAGE else _ALIGNMENT
        span = -(-span // unit_of_size) * unit_of_size
        arena, start = self._find(span)
        grant = Grant(self._next_grant, owner, arena, start, start + span, unit)
        self._next_grant += 1
        self.grants[grant.number] = grant
        return grant

    def name(self, where: Range, owner: int) -> Grant:
        """Takes a range out of a grant: it is the controller's now.

        Raises:
            InvalidArgument: the grant is over, another's, or the range is not all in it, aligned and unnamed.
        """
        grant = self.grants.get(where.grant)
        if grant is None or grant.owner != owner or grant.arena != where.arena:
            raise InvalidArgument("the memory of this put was given up; put again", grant=where.grant)
        named, at = grant.named, bisect(grant.named, (where.start, where.stop))
        if not (
            grant.start <= where.start < where.stop <= grant.stop
            and not (where.start | where.stop) % _ALIGNMENT
            and (at == 0 or named[at - 1][1] <= where.start)
            and (at == len(named) or where.stop <= named[at][0])
        ):
            raise InvalidArgument("a put names memory that is not its own")
        named.insert(at, (where.start, where.stop))
        return grant

    def discard(self, where: Range) -> None:
        """Frees a named range that no block came of."""
        grant = self.grants.get(where.grant)
        if grant is not None and grant.unit is not None:
            grant.abandoned.append((where.start, where.stop))  # its bytes may still be on their way
        else:
            self._arenas[where.arena].free.add(where.start, where.stop)

    def end(self, grant: Grant) -> None:
        """Frees what was not named."""
        if self.grants.pop(grant.number, None) is None:
            return
        free = self._arenas[grant.arena].free
        at = grant.start
        for start, stop in grant.named:
            free.add(at, start)
            at = stop
        free.add(at, grant.stop)
        for start, stop in grant.abandoned:
            free.add(start, stop)

    def grants_of(self, owner: int) -> list[Grant]:
        return [grant for grant in self.grants.values() if grant.owner == owner]

    def unwritten(self, unit: int) -> list[Range]:
        """The part of each grant through a unit that may still be written: not what has become of earlier
        writes.
        """
        parts: list[Range] = []
        for grant in self.grants.values():
            if grant.unit != unit:
                continue
            start = grant.start
            for begin, end in grant.named:
                if begin != start or (begin, end) not in grant.written:
                    break
                start = end
            if start < grant.stop:
                parts.append(Range(grant.number, grant.arena, start, grant.stop))
        return parts

    # -- blocks ----------------------------------------------------------------------------------------------

    def block(self, where: Range, fields: int, samples: Sequence[int]) -> Block:
        """Makes a named range a block."""
        block = Block(self._next_block, where, fields, samples)
        self._next_block += 1
        self.blocks[block.number] = block
        self.used += block.nbytes
        return block

    def row_gone(self, block: Block, row: int) -> None:
        """The sample of a row needs it no more."""
        block.samples[row] = None
        block.living -= 1
        if not block.living and not block.pins:
            self._free(block)

    def let_go(self, block: Block) -> None:
        """Takes back a pin that no client holds."""
        block.pins -= 1
        if not block.pins and not block.living:
            self._free(block)

    def _free(self, block: Block) -> None:
        del self.blocks[block.number]
        self.used -= block.nbytes
        self._arenas[block.arena].free.add(block.start, block.stop)

    # -- pins ------------------------------------------------------------------------------------------------

    def pin(self, session: int, blocks: Iterable[Block]) -> list[int]:
        """Keeps blocks in place for a client; returns their numbers."""
        pins = self._pins.setdefault(session, Counter())
        numbers: list[int] = []
        for block in blocks:
            block.pins += 1
            pins[block.number] += 1
            numbers.append(block.number)
        return numbers

    def unpin(self, session: int, numbers: Iterable[int]) -> None:
        """The client looks at these no more. Numbers it does not hold are ignored."""
        pins = self._pins.get(session)
        if pins is None:
            return
        for number in numbers:
            if pins[number] > 1:
                pins[number] -= 1
            elif pins.pop(number, 0) == 0:
                continue
            self.let_go(self.blocks[number])

    def set_pins(self, session: int, numbers: Iterable[int]) -> None:
        """Replaces what is known of a client's pins by what it says itself."""
        told = Counter(number for number in numbers if number in self.blocks)
        pins = self._pins.setdefault(session, Counter())
        for number, count in told.items():
            self.blocks[number].pins += count
        stale, self._pins[session] = pins, told
        for number, count in stale.items():
            block = self.blocks[number]
            block.pins -= count
            if not block.pins and not block.living:
                self._free(block)

    def unpin_all(self, session: int) -> None:
        self.set_pins(session, ())
        self._pins.pop(session, None)

    def holders(self) -> list[int]:
        """Sessions that pin or were granted something."""
        return list({*self._pins, *(g.owner for g in self.grants.values() if g.owner is not None)})

    def close(self) -> None:
        for arena in self._arenas.values():
            os.close(arena.descriptor)
        self._arenas.clear()
