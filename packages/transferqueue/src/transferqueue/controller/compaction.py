"""Half-dead blocks: the samples still there are copied into a smaller one, so that memory held is never more
than about twice what is alive.
"""

from typing import Any

from ..errors import Full
from ..wire.messages import Range
from .blocks import Block, Grant
from .memory import Memory
from .units import Units

_WORTH_IT = 1 << 18  # bytes; smaller blocks die as a whole soon enough


class Compaction:
    """Has storage units copy, and moves the samples when they have."""

    def __init__(self, memory: Memory, units: Units) -> None:
        self._memory = memory
        self._units = units
        self._moving: set[int] = set()

    def consider(self, block: Block) -> None:
        """Compacts the block if half of its rows are gone since it was made."""
        if (
            block.nbytes < _WORTH_IT
            or not 0 < block.living <= len(block.samples) // 2
            or block.number in self._moving
        ):
            return
        rows = [row for row, sample in enumerate(block.samples) if sample is not None]
        try:
            # A row may hold most of the bytes: the whole of the block is asked for, the rest given back.
            grant = self._memory.take(block.nbytes, None, None)
        except Full:
            return  # it stays as it is
        self._moving.add(block.number)
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
        if not error and any(block.samples[row] is not None for row in rows):
            where = Range(grant.number, grant.arena, grant.start, grant.start + int(values["nbytes"]))
            grant.named.append((where.start, where.stop))
            self._memory.move(block, rows, where)
        self._memory.end(grant)
        self._memory.let_go(block)
