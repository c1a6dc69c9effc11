"""What is given out of shared memory, against models of it: no byte twice, and every byte comes back."""

import itertools
import os
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import transferqueue as tq
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transferqueue.controller.free_ranges import FreeRanges
from transferqueue.controller.memory import Memory
from transferqueue.wire.messages import Range

ARENA = 1 << 16
OWNERS = st.sampled_from([1, 2, 3, None])


class FreeRangesAgainstASet(RuleBasedStateMachine):
    """`FreeRanges` against the set of its free cells of 64 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = FreeRanges()
        self.free: set[int] = set()
        self.taken: list[tuple[int, int]] = [(0, 256)]

    @rule(nbytes=st.integers(1, 64))
    def take(self, nbytes: int) -> None:
        start = self.ranges.take(nbytes * 64)
        if start is None:
            # A range up to twice as large may be passed over, never a larger one.
            assert self.longest() < 2 * nbytes
            return
        cells = set(range(start // 64, start // 64 + nbytes))
        assert cells <= self.free
        self.free -= cells
        self.taken.append((start // 64, start // 64 + nbytes))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        start, stop = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        middle = data.draw(st.integers(start, stop))
        self.ranges.add(start * 64, middle * 64)
        if middle < stop:
            self.taken.append((middle, stop))
        self.free |= set(range(start, middle))

    def longest(self) -> int:
        longest = run = 0
        for cell in range(256):
            run = run + 1 if cell in self.free else 0
            longest = max(longest, run)
        return longest

    @invariant()
    def they_are_those_cells_and_joined(self) -> None:
        ranges = list(self.ranges)
        cells = [cell for start, stop in ranges for cell in range(start // 64, stop // 64)]
        assert sorted(self.free) == cells
        assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
        assert self.ranges.nbytes == 64 * len(cells)


TestFreeRanges = FreeRangesAgainstASet.TestCase

TestFreeRanges.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


class Backing:
    """Arenas without memory."""

    arena_bytes = ARENA

    def make(self, arena: int, nbytes: int) -> int:
        return os.open(os.devnull, os.O_RDONLY)

    def is_filled(self, arena: int) -> bool:
        return True

    def fill(self, descriptor: int, arena: int, start: int, stop: int) -> None:
        raise AssertionError("it is filled")


class MemoryAgainstItsParts(RuleBasedStateMachine):
    """Whatever clients do, every byte of every arena belongs to exactly one: a free range, what a grant has
    not named, a range that is named and not decided, or a block.
    """

    @initialize()
    def begin(self) -> None:
        self.made: list[int] = []
        self.memory = Memory(Backing(), self.made.append)  # type: ignore[arg-type]  # what of it is used
        self.named: list[Range] = []
        self.pins: dict[int, list[int]] = {1: [], 2: [], 3: []}

    def pick(self, data: st.DataObject, items: Any) -> Any:
        return data.draw(st.sampled_from(list(items)))

    @rule(
        span=st.integers(1, ARENA * 2),
        owner=st.sampled_from([1, 2, 3, None]),
        unit=st.sampled_from([0, None]),
    )
    def take(self, span: int, owner: int | None, unit: int | None) -> None:
        if len(self.made) < 40:
            grant = self.memory.take(span, owner, unit)
            assert grant.stop - grant.start >= span

    @precondition(lambda self: self.memory.grants)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        grant = self.pick(data, self.memory.grants.values())
        cells = (grant.stop - grant.start) // 64
        start = grant.start + 64 * data.draw(st.integers(-1, min(cells, 40)))
        stop = start + 64 * data.draw(st.integers(-1, 12))
        crooked = data.draw(st.sampled_from([0, 0, 0, 0, 1]))
        owner = data.draw(st.sampled_from([grant.owner, grant.owner, grant.owner, 9]))
        where = Range(grant.number, grant.arena, start + crooked, stop + crooked)
        own = owner == grant.owner and grant.start <= where.start < where.stop <= grant.stop and not crooked
        own = own and all(where.stop <= begin or end <= where.start for begin, end in grant.named)
        try:
            self.memory.name(where, owner)
        except tq.InvalidArgument:
            assert not own
        else:
            assert own
            self.named.append(where)

    @precondition(lambda self: self.named)
    @rule(data=st.data(), rows=st.integers(1, 3))
    def make_a_block(self, data: st.DataObject, rows: int) -> None:
        where = self.named.pop(data.draw(st.integers(0, len(self.named) - 1)))
        self.memory.block(where, 1, [SimpleNamespace(id=row, places=[]) for row in range(rows)])  # type: ignore[misc]

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.memory.discard(self.named.pop(data.draw(st.integers(0, len(self.named) - 1))))

    @precondition(lambda self: self.memory.grants)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        grant = self.pick(data, self.memory.grants.values())
        self.memory.end(grant)
        self.memory.end(grant)

    @precondition(lambda self: self.memory.blocks)
    @rule(data=st.data())
    def a_row_goes(self, data: st.DataObject) -> None:
        block = self.pick(data, self.memory.blocks.values())
        rows = [row for row, sample in enumerate(block.samples) if sample is not None]
        if rows:
            self.memory.row_gone(block, data.draw(st.sampled_from(rows)))

    @precondition(lambda self: self.memory.blocks)
    @rule(data=st.data(), session=st.sampled_from([1, 2, 3]))
    def pin(self, data: st.DataObject, session: int) -> None:
        block = self.pick(data, self.memory.blocks.values())
        self.pins[session] += self.memory.pin(session, [block])

    @rule(data=st.data(), session=st.sampled_from([1, 2, 3, 4]), times=st.integers(1, 2))
    def unpin(self, data: st.DataObject, session: int, times: int) -> None:
        """Also what was never pinned, and the same once more."""
        number = data.draw(st.sampled_from([*self.pins.get(session, ()), -1, 1, 10**9]))
        for _ in range(times):
            if number in self.pins.get(session, ()):
                self.pins[session].remove(number)
            self.memory.unpin(session, [number])

    @rule(data=st.data(), session=st.sampled_from([1, 2, 3]))
    def tell_pins(self, data: st.DataObject, session: int) -> None:
        """What a client says of itself counts, as far as the blocks are there."""
        there = [*self.memory.blocks, 10**9]
        told = data.draw(st.lists(st.sampled_from(there), max_size=4))
        self.memory.set_pins(session, told)
        self.pins[session] = [number for number in told if number != 10**9]

    @rule(session=st.sampled_from([1, 2, 3]))
    def a_client_goes(self, session: int) -> None:
        self.memory.unpin_all(session)
        self.pins[session] = []
        for grant in self.memory.grants_of(session):
            self.memory.end(grant)

    @invariant()
    def every_byte_belongs_to_one(self) -> None:
        memory = self.memory
        parts: dict[int, list[tuple[int, int]]] = {number: [] for number in self.made}
        for number, arena in memory._arenas.items():
            parts[number] += list(arena.free)
        for grant in memory.grants.values():
            parts[grant.arena] += (*grant.unnamed, *grant.abandoned)
        for where in self.named:
            parts[where.arena].append((where.start, where.stop))
        for block in memory.blocks.values():
            parts[block.arena].append((block.start, block.stop))
        for number, ranges in parts.items():
            at = 0
            for start, stop in sorted(ranges):
                assert start == at, (number, sorted(ranges))
                at = stop
            assert at == memory.arena(number)[0].nbytes
        assert memory.used == sum(block.nbytes for block in memory.blocks.values())

    @invariant()
    def pins_keep(self) -> None:
        held = [number for numbers in self.pins.values() for number in numbers]
        assert set(held) <= self.memory.blocks.keys()
        for number, block in self.memory.blocks.items():
            assert block.pins == held.count(number)
            assert block.living or block.pins

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for where in self.named:
            self.memory.discard(where)
        self.named = []
        for session in (1, 2, 3):
            self.a_client_goes(session)
        for grant in list(self.memory.grants.values()):
            self.memory.end(grant)
        for block in list(self.memory.blocks.values()):
            for row, sample in enumerate(block.samples):
                if sample is not None:
                    self.memory.row_gone(block, row)
        assert (self.memory.used, self.memory.blocks, self.memory.grants) == (0, {}, {})
        for arena in self.memory._arenas.values():
            assert list(arena.free) == [(0, arena.nbytes)]
        self.memory.close()


TestMemory = MemoryAgainstItsParts.TestCase

TestMemory.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
