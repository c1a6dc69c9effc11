"""Who sends what of the boxes that several sources hold: equal loads, in long parts."""

from __future__ import annotations

from dataclasses import dataclass

from dcs.layout import ALIGNMENT, ITEMSIZE
from dcs.plan.boxes import Box, Held, split, volume


@dataclass(frozen=True, slots=True)
class Cell:
    """A box of one destination tensor, with whoever holds all of it: by distinct source layout."""

    box: Box
    nbytes: int
    to: Held
    owners: dict[int, Held]


def aligned(nbytes: int) -> int:
    """Rounded down, so that parts begin where a cache line does."""
    return nbytes // ALIGNMENT * ALIGNMENT


def shares_of(load: list[int], total: int, grain: int) -> list[int]:
    """`total` bytes over sources with these loads (ascending), so that they end up level; no share is smaller
    than `grain`, but for one that is all.
    """
    for sharers in range(len(load), 0, -1):
        level = (total + sum(load[:sharers])) // sharers
        if sharers == 1 or level - load[sharers - 1] >= grain:
            shares = [aligned(level - have) for have in load[:sharers]]
            shares[0] += total - sum(shares)
            return shares
    raise AssertionError("load is never empty")


def dealt(cells: list[Cell], shares: list[int], grain: int) -> list[tuple[int, Cell, Box]]:
    """Cells in order to the holders of `shares` in order, split where a share ends: `(holder, cell, box)`."""
    found: list[tuple[int, Cell, Box]] = []
    place, left = 0, shares[0]
    for cell in cells:
        itemsize = ITEMSIZE[cell.to.dtype]
        small = max(grain // 4, itemsize)  # not worth a part of its own, at the end of a share
        box, size = cell.box, cell.nbytes
        while place + 1 < len(shares) and size > left + small:
            if left >= small:
                part, box = split(box, itemsize, left, grain)
                taken = volume(*part) * itemsize
                found.append((place, cell, part))
                left, size = left - taken, size - taken
            place += 1
            left += shares[place]
        found.append((place, cell, box))
        left -= size
    return found
