"""The memory of a store: arenas, the ranges granted to clients, the blocks that lie in them, and who looks
at those.
"""

import os
import secrets
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import Full, InvalidArgument
from ..scheduling.samples import Sample
from ..wire.messages import ArenaHere, Range
from ..wire.node import Arena as ArenaAndDescriptor
from . import events
from .backing import Backing
from .blocks import Block, Grant
from .free_ranges import FreeRanges, Holes

SLAB_BYTES = 1 << 20
_ALIGNMENT = 64
_PAGE = 4096


@dataclass(slots=True)
class _Arena:
    """A segment. `holes` are parts of `free`."""

    nbytes: int
    descriptor: int
    free: FreeRanges = field(default_factory=FreeRanges)
    holes: Holes = field(default_factory=Holes)


class Memory:
    """All of it. Nothing here waits or sends.

    Args:
        backing: where arenas come from.
        made: told of every new arena.

    Attributes:
        recorder: told of every change, if set.
        used: bytes of blocks.
        least_idle: the least bytes that were free, but have pages, since this was set.
        most_taken: the most bytes that were not free since this was set.
    """

    def __init__(self, backing: Backing, made: Callable[[int], None]) -> None:
        self._backing = backing
        self._made = made
        self._arenas: dict[int, _Arena] = {}
        self.grants: dict[int, Grant] = {}
        self.blocks: dict[int, Block] = {}
        self.pins: dict[int, Counter[int]] = {}
        self.recorder: Callable[[events.StoreEvent], None] | None = None
        # Drawn, so that what an earlier store left in a file can never be taken for ours.
        self.next_grant = secrets.randbits(40) << 20
        self.next_block = 1
        self.used = 0
        self.capacity = 0
        self.least_idle = 0
        self.most_taken = 0
        self._settled = True

    # -- arenas ----------------------------------------------------------------------------------------------

    def arena(self, number: int) -> ArenaAndDescriptor:
        """An arena to tell a client or unit of."""
        arena = self._arenas[number]
        return ArenaHere(number, arena.nbytes), arena.descriptor

    @property
    def arenas(self) -> Sequence[int]:
        return list(self._arenas)

    @property
    def free(self) -> int:
        return sum(arena.free.nbytes for arena in self._arenas.values())

    @property
    def idle(self) -> int:
        """Bytes that are free, but have pages."""
        return sum(arena.free.nbytes - arena.holes.nbytes for arena in self._arenas.values())

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
        ordinary = self._backing.arena_bytes
        nbytes = max(ordinary, -(-span // ordinary) * ordinary)
        try:
            descriptor = self._backing.make(number, nbytes)
        except OSError as error:
            raise _no_room(span, error) from error
        self.add_arena(number, nbytes, descriptor)
        arena = self._arenas[number]
        arena.free.add(0, nbytes)
        if not self._backing.is_filled(number):
            arena.holes.add(0, nbytes)
        if self.recorder is not None:
            self.recorder(events.ArenaMade(number, nbytes))
        self._made(number)
        start = arena.free.take(span)
        assert start is not None
        return number, start

    def add_arena(self, number: int, nbytes: int, descriptor: int) -> None:
        """Takes over an arena that is there, with nothing of it free."""
        self._arenas[number] = _Arena(nbytes, descriptor)
        self.capacity += nbytes

    def _fill(self, number: int, start: int, stop: int) -> None:
        """Gives pages to what was taken. Full if there is no room for them; it is free again then."""
        arena = self._arenas[number]
        holes = arena.holes.fill(start, stop)
        if not holes:
            return
        try:
            for begin, end in holes:
                self._backing.fill(arena.descriptor, number, begin, end)
        except OSError as error:
            for begin, end in holes:
                arena.holes.add(begin, end)
            arena.free.add(start, stop)
            raise _no_room(stop - start, error) from error

    def _give(self, number: int, start: int, stop: int) -> None:
        """Makes a range free."""
        if self._settled:
            self._arenas[number].free.add(start, stop)

    # -- grants ----------------------------------------------------------------------------------------------

    def take(self, span: int, owner: int | None, unit: int | None, *, slab: bool = False) -> Grant:
        """Grants `span` bytes (rounded up). Raises Full if the system has no memory left."""
        unit_of_size = _PAGE if span >= 16 * _PAGE else _ALIGNMENT
        span = -(-span // unit_of_size) * unit_of_size
        arena, start = self._find(span)
        self._fill(arena, start, start + span)
        self.least_idle = min(self.least_idle, self.idle)
        self.most_taken = max(self.most_taken, self.capacity - self.free)
        return self.grant(Range(self.next_grant, arena, start, start + span), owner, unit, slab)

    def grant(self, where: Range, owner: int | None, unit: int | None, slab: bool) -> Grant:
        """Grants a range that has been taken."""
        grant = Grant(where.grant, owner, where.arena, where.start, where.stop, unit, slab)
        self.next_grant = max(self.next_grant, where.grant + 1)
        self.grants[grant.number] = grant
        if self.recorder is not None:
            self.recorder(events.GrantMade(where, owner, unit, slab))
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
            # A client also meets this when it repeats to a new life of the controller what an earlier one
            # refused: refusals are not in the journal. In other memory it hears the refusal again.
            raise InvalidArgument("a put names memory that is not its own", grant=where.grant)
        named.insert(at, (where.start, where.stop))
        return grant

    def discard(self, where: Range) -> None:
        """Frees a named range that no block came of."""
        grant = self.grants.get(where.grant)
        if grant is not None and grant.unit is not None:
            grant.abandoned.append((where.start, where.stop))  # its bytes may still be on their way
        else:
            self._give(where.arena, where.start, where.stop)
        if grant is not None and self.recorder is not None:
            self.recorder(events.RangeDiscarded(where))

    def written(self, grant: Grant, where: Range) -> None:
        """A unit has filled a range of its grant."""
        grant.written.add((where.start, where.stop))
        if self.recorder is not None:
            self.recorder(events.RangeWritten(where))

    def end(self, grant: Grant) -> None:
        """Frees what was not named."""
        if self.grants.pop(grant.number, None) is None:
            return
        for start, stop in (*grant.unnamed, *grant.abandoned):
            self._give(grant.arena, start, stop)
        if self.recorder is not None:
            self.recorder(events.GrantEnded(grant.number))

    def grants_of(self, owner: int | None) -> list[Grant]:
        return [grant for grant in self.grants.values() if grant.owner == owner]

    def writable(self, unit: int) -> list[Range]:
        """What may still be written through a unit."""
        parts = [grant.writable for grant in self.grants.values() if grant.unit == unit]
        return [part for part in parts if part is not None]

    # -- blocks ----------------------------------------------------------------------------------------------

    def block(self, where: Range, fields: int, samples: Sequence[Sample]) -> Block:
        """Makes a named range a block, where these samples lie from now on."""
        block = self._add(Block(self.next_block, where, fields, samples))
        for row, sample in enumerate(samples):
            sample.places.append((block, row))
        if self.recorder is not None:
            ids = events.ids_in_runs([sample.id for sample in samples])
            self.recorder(events.BlockMade(block.number, where, fields, ids))
        return block

    def move(self, block: Block, rows: Sequence[int], where: Range) -> Block:
        """Lets samples lie where rows of a block were copied to. Those that are gone meanwhile stay gone.

        Returns:
            The new block.
        """
        samples = [block.samples[row] for row in rows]
        smaller = self._add(Block(self.next_block, where, block.fields, samples))
        if self.recorder is not None:
            self.recorder(events.BlockMoved(block.number, list(rows), smaller.number, where))
        for at, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            if sample is not None:
                sample.places[sample.places.index((block, row))] = (smaller, at)
                self.row_gone(block, row)
        return smaller

    def add_block(self, number: int, where: Range, fields: int, rows: int) -> Block:
        """A block of samples that will be put into it one by one."""
        block = Block(number, where, fields, [None] * rows)
        return self._add(block)

    def _add(self, block: Block) -> Block:
        self.next_block = max(self.next_block, block.number + 1)
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
        self._give(block.arena, block.start, block.stop)

    # -- pins ------------------------------------------------------------------------------------------------

    def pin(self, session: int, blocks: Iterable[Block]) -> list[int]:
        """Keeps blocks in place for a client; returns their numbers."""
        pins = self.pins.setdefault(session, Counter())
        numbers: list[int] = []
        for block in blocks:
            block.pins += 1
            pins[block.number] += 1
            numbers.append(block.number)
        if numbers and self.recorder is not None:
            self.recorder(events.Pinned(session, numbers))
        return numbers

    def unpin(self, session: int, numbers: Iterable[int]) -> None:
        """The client looks at these no more. Numbers it does not hold are ignored."""
        pins = self.pins.get(session)
        if pins is None:
            return
        gone: list[int] = []
        for number in numbers:
            if pins[number] > 1:
                pins[number] -= 1
            elif pins.pop(number, 0) == 0:
                continue
            gone.append(number)
            self.let_go(self.blocks[number])
        if gone and self.recorder is not None:
            self.recorder(events.Unpinned(session, gone))

    def set_pins(self, session: int, numbers: Iterable[int]) -> None:
        """Replaces what is known of a client's pins by what it says itself."""
        told = Counter(number for number in numbers if number in self.blocks)
        stale = self.pins.get(session, Counter())
        if told == stale:
            self.pins[session] = told
            return
        for number, count in told.items():
            self.blocks[number].pins += count
        self.pins[session] = told
        for number, count in stale.items():
            block = self.blocks[number]
            block.pins -= count
            if not block.pins and not block.living:
                self._free(block)
        if self.recorder is not None:
            self.recorder(events.PinsTold(session, list(told.elements())))

    def unpin_all(self, session: int) -> None:
        self.set_pins(session, ())
        self.pins.pop(session, None)

    def holders(self) -> list[int]:
        """Sessions that pin or were granted something."""
        return list({*self.pins, *(g.owner for g in self.grants.values() if g.owner is not None)})

    # -- pages -----------------------------------------------------------------------------------------------

    def surplus(self, nbytes: int, piece: int) -> list[Grant]:
        """Takes free ranges with pages, `nbytes` in all and at most `piece` each, so that their pages can be
        given back; see `hollow`. What was made last comes first.
        """
        grants: list[Grant] = []
        nbytes -= nbytes % _PAGE
        for number, arena in reversed(self._arenas.items()):
            for whole in list(arena.free):
                at, end = -(-whole[0] // _PAGE) * _PAGE, whole[1] // _PAGE * _PAGE
                for hole in (*arena.holes.within(*whole), (end, end)):
                    while at < (stop := min(at + piece, hole[0] // _PAGE * _PAGE, at + nbytes)):
                        arena.free.cut(at, stop, whole)
                        grants.append(self.grant(Range(self.next_grant, number, at, stop), None, None, False))
                        nbytes -= stop - at
                        whole = (stop, whole[1])
                        at = stop
                    at = max(at, -(-hole[1] // _PAGE) * _PAGE)
                if not nbytes:
                    return grants
        return grants

    def hollow(self, grant: Grant) -> None:
        """Ends a grant whose pages were given back."""
        self._arenas[grant.arena].holes.add(grant.start, grant.stop)
        self.end(grant)

    # -- an earlier life -------------------------------------------------------------------------------------

    def unsettle(self) -> None:
        """Nothing is given out, and what is free is not told, until `settle`."""
        self._settled = False

    def settle(self) -> None:
        """Finds out what is free: all that no block, grant or abandoned range has."""
        taken: dict[int, list[tuple[int, int]]] = {number: [] for number in self._arenas}
        for block in self.blocks.values():
            taken[block.arena].append((block.start, block.stop))
        for grant in self.grants.values():
            taken[grant.arena] += (*grant.unnamed, *grant.abandoned)
        for number, arena in self._arenas.items():
            at = 0
            for start, stop in (*sorted(taken[number]), (arena.nbytes, arena.nbytes)):
                if at < start:
                    arena.free.add(at, start)
                    arena.holes.add(at, start)  # which of it has pages is not known any more
                at = max(at, stop)
        self._settled = True

    def close(self) -> None:
        for arena in self._arenas.values():
            os.close(arena.descriptor)
        self._arenas.clear()


def _no_room(span: int, error: OSError) -> Full:
    return Full(f"no memory for {span} bytes more: {error}; consume faster or lower max_bytes")
