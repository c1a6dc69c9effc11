"""Half-dead blocks: the samples still there are copied into a smaller one, so that memory held is never more
than about twice what is alive.
"""

from typing import Any

from ..errors import Full
from ..wire.messages import Range
from .blocks import Block, Grant
from .memory import Memory
from .timers import Timers
from .units import Units

_WORTH_IT = 1 << 18  # bytes; smaller blocks die as a whole soon enough
_PATIENCE = 1.0  # seconds


class Compaction:
    """Has storage units copy, and moves the samples when they have."""

    def __init__(self, memory: Memory, units: Units, timers: Timers) -> None:
        self._memory = memory
        self._units = units
        self._timers = timers
        self._moving: set[int] = set()

    def consider(self, block: Block) -> None:
        """Compacts the block if half of its rows are gone since it was made, and stay so for a while: one
        that is being consumed is soon gone as a whole.
        """
        if block.nbytes >= _WORTH_IT and _is_half_dead(block) and block.number not in self._moving:
            self._moving.add(block.number)
            self._wait(block)

    def _wait(self, block: Block) -> None:
        living = block.living
        self._timers.at(self._timers.now() + _PATIENCE, lambda: self._compact(block, living))

    def _compact(self, block: Block, living: int) -> None:
        if not block.living:
            self._moving.discard(block.number)
            return
        if block.living != living:  # it goes on dying
            self._wait(block)
            return
        rows = [row for row, sample in enumerate(block.samples) if sample is not None]
        try:
            # A row may hold most of the bytes: the whole of the block is asked for, the rest given back.
            grant = self._memory.take(block.nbytes, None, None)
        except Full:
            self._moving.discard(block.number)
            return  # it stays as it is
        block.pins += 1  # it must not go while it is read
        if not self._units.compact(
            block.range,
            rows,
            grant.range,
            lambda error, values: self._compacted(block, rows, grant, error, values),
        ):
            self._compacted(block, rows, grant, "no storage unit", {})

    def _compacted(
        self, block: Block, rows: list[int], grant: Grant, error: str, values: dict[str, Any]
    ) -> None:
        self._moving.discard(block.number)
        smaller: Block | None = None
        if not error and any(block.samples[row] is not None for row in rows):
            where = Range(grant.number, grant.arena, grant.start, grant.start + int(values["nbytes"]))
            grant.named.append((where.start, where.stop))
            smaller = self._memory.move(block, rows, where)
        self._memory.end(grant)
        self._memory.let_go(block)
        if smaller is not None:
            self.consider(smaller)  # more of it may have gone while it was copied


def _is_half_dead(block: Block) -> bool:
    return 0 < block.living <= len(block.samples) // 2
