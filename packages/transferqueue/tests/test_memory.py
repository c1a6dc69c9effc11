"""The memory of a store by itself: what is free, what has pages, and what is given back."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import transferqueue as tq
from transferqueue.controller.backing import Backing, InFiles, InMemory, Spilling
from transferqueue.controller.free_ranges import Holes
from transferqueue.controller.memory import Memory
from transferqueue.controller.reclaim import Reclaim
from transferqueue.controller.timers import Timers
from transferqueue.transport.arenas import ArenaMap

MIB = 1 << 20


class Clock(Timers):
    """Time that is told what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def now(self) -> float:  # type: ignore[override]
        return self.time

    def pass_by(self, seconds: float) -> None:
        self.time += seconds
        self.run(self.time)


class Unit:
    """Punches as a storage unit does."""

    def __init__(self) -> None:
        self.arenas = ArenaMap()

    def punch(self, arena: int, start: int, stop: int, done: Callable[[str], None]) -> bool:
        self.arenas.punch(arena, start, stop)
        done("")
        return True


def pages(memory: Memory) -> int:
    """Bytes that the arenas take of the system."""
    return sum(os.fstat(memory.arena(number)[1]).st_blocks * 512 for number in memory.arenas)


def store(backing: Backing) -> tuple[Memory, Unit, Clock]:
    unit, clock = Unit(), Clock()

    def made(number: int) -> None:
        here, descriptor = memory.arena(number)
        unit.arenas.add(number, here.nbytes, os.dup(descriptor))

    memory = Memory(backing, made)
    Reclaim(memory, unit, clock, window=10.0, kept=8 * MIB)
    return memory, unit, clock


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_a_burst_does_not_hold_memory_for_ever(kind: str, tmp_path: Path) -> None:
    memory, unit, clock = store(InMemory() if kind == "memory" else InFiles(tmp_path))
    grants = [memory.take(16 * MIB, 1, None) for _ in range(12)]
    for grant in grants:
        unit.arenas.write(grant.arena, grant.start, grant.stop)[:] = 1
    for grant in grants[1:]:
        memory.end(grant)
    assert pages(memory) >= 192 * MIB
    for _ in range(4):
        clock.pass_by(10.1)
    assert pages(memory) <= 16 * MIB + 8 * MIB + 4096
    assert memory.free == memory.capacity - 16 * MIB
    first = grants[0]
    assert (unit.arenas.read(first.arena, first.start, first.stop) == 1).all()
    again = [memory.take(16 * MIB, 1, None) for _ in range(11)]
    for grant in again:
        unit.arenas.write(grant.arena, grant.start, grant.stop)[:] = 2
    assert (unit.arenas.read(first.arena, first.start, first.stop) == 1).all()
    assert pages(memory) >= 192 * MIB
    unit.arenas.close()
    memory.close()


def test_what_is_used_again_and_again_is_kept() -> None:
    memory, unit, clock = store(InMemory())
    for _ in range(8):
        grants = [memory.take(16 * MIB, 1, None) for _ in range(8)]
        for grant in grants:
            unit.arenas.write(grant.arena, grant.start, grant.stop)[:] = 1
        for grant in grants:
            memory.end(grant)
        clock.pass_by(5.1)
        assert pages(memory) >= 128 * MIB
    unit.arenas.close()
    memory.close()


def test_memory_is_preferred_to_files(tmp_path: Path) -> None:
    backing = Spilling(64 * MIB, tmp_path)
    memory = Memory(backing, lambda number: None)
    grants = [memory.take(8 * MIB, 1, None) for _ in range(16)]
    spilled = [grant for grant in grants if backing.is_filled(grant.arena)]
    assert len(spilled) == 8
    for grant in grants:
        memory.end(grant)
    assert not backing.is_filled(memory.take(8 * MIB, 1, None).arena)
    assert list(tmp_path.iterdir()) == []  # its files have no name
    memory.close()


def test_holes_are_what_lies_in_them() -> None:
    generator = np.random.default_rng(7)
    holes, model = Holes(), np.zeros(200, bool)
    for _ in range(2_000):
        start, stop = sorted(generator.integers(0, 201, 2).tolist())
        if start == stop:
            continue
        inside = np.zeros(200, bool)
        for begin, end in holes.within(start, stop):
            inside[begin:end] = True
        assert (inside[start:stop] == model[start:stop]).all()
        assert inside.sum() == model[start:stop].sum()
        if generator.random() < 0.5:
            assert sum(e - b for b, e in holes.fill(start, stop)) == model[start:stop].sum()
            model[start:stop] = False
        elif not model[start:stop].any():
            holes.add(start, stop)
            model[start:stop] = True
        assert holes.nbytes == model.sum()


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    class FullDisk(InFiles):
        def fill(self, descriptor: int, arena: int, start: int, stop: int) -> None:
            raise OSError(28, "No space left on device", str(tmp_path))

    memory, unit, clock = store(FullDisk(tmp_path))
    grant = memory.take(32 * MIB, 1, None)
    memory.end(grant)
    for _ in range(3):
        clock.pass_by(10.1)
    free = memory.free
    with pytest.raises(tq.Full, match=str(tmp_path)):
        memory.take(60 * MIB, 1, None)
    assert memory.free == free
    unit.arenas.close()
    memory.close()
