"""The index of a delta: ascending positions as gaps of one or two bytes, or as a bitmap where they are dense.

A gap that is too long for its width is bridged by entries that change nothing (difference 0) at the longest
gap. Decoding is then one running sum and no branch, whatever the gaps are.
"""

import numpy as np
from numpy.typing import NDArray

from dcs.delta.difference import Positions, Values
from dcs.delta.format import BITMAP, GAPS8, GAPS16, CorruptDelta

Gaps = NDArray[np.uint8] | NDArray[np.uint16]
_DTYPES = {GAPS8: np.dtype("<u1"), GAPS16: np.dtype("<u2")}


def narrowest(positions: Positions) -> int:
    """`GAPS8` or `GAPS16`, whichever takes fewer bytes for ascending positions."""
    if not len(positions):
        return GAPS8
    bridges = (
        int(positions[-1]) // 255
    )  # at least this many windows of 255 are crossed, so at most as many bridges
    if bridges <= len(positions) // 2:
        return GAPS8
    gaps = np.diff(positions, prepend=0)
    bridges = int((np.maximum(gaps - 1, 0) // 255).sum())
    return GAPS8 if bridges <= len(positions) // 2 else GAPS16


def to_gaps(positions: Positions, differences: Values, kind: int) -> tuple[Gaps, Values]:
    """The gaps of ascending positions, and the differences with a 0 for every bridge.

    The first entry is a position; each other one is at least 1.
    """
    dtype = _DTYPES[kind]
    longest = np.iinfo(dtype).max
    gaps = np.diff(positions, prepend=0)
    far = np.flatnonzero(gaps > longest)
    if not len(far):
        return gaps.astype(dtype), differences
    bridges = np.zeros(len(gaps), np.intp)
    bridges[far] = (gaps[far] - 1) // longest
    gaps[far] -= bridges[far] * longest
    places = np.cumsum(bridges)
    total = len(gaps) + int(places[-1])
    places += np.arange(len(gaps))
    bridged = np.full(total, longest, dtype)
    bridged[places] = gaps
    spread = np.zeros(total, differences.dtype)
    spread[places] = differences
    return bridged, spread


def from_gaps(section: bytes, kind: int) -> Gaps:
    return np.frombuffer(section, _DTYPES[kind])


def to_positions(gaps: Gaps) -> Positions:
    """The positions that these gaps lead to."""
    return np.cumsum(gaps, dtype=np.intp)


def checked_positions(gaps: Gaps, units: int) -> Positions:
    """The same for gaps that a peer sent; raises `CorruptDelta` unless they ascend within `units`."""
    positions = to_positions(gaps)
    if len(gaps) > 1 and not gaps[1:].all():
        raise CorruptDelta("a delta names the same position twice")
    if len(positions) and positions[-1] >= units:
        raise CorruptDelta(f"a delta names position {positions[-1]} of a range of {units} values")
    return positions


def to_bitmap(positions: Positions, units: int) -> NDArray[np.uint8]:
    marks = np.zeros(units, np.uint8)
    marks[positions] = 1
    return np.packbits(marks, bitorder="little")


def bitmap_positions(section: bytes, units: int, count: int) -> Positions:
    """The positions of a bitmap that a peer sent; raises `CorruptDelta` unless they are `count`, in range."""
    bitmap = np.frombuffer(section, np.uint8)
    marks = np.unpackbits(bitmap, bitorder="little").view(np.bool_)
    positions = np.flatnonzero(marks)
    if len(positions) != count or (count and positions[-1] >= units):
        raise CorruptDelta(
            f"the bitmap of a delta has {len(positions)} marks, expected {count} within {units}"
        )
    return positions


__all__ = [
    "BITMAP",
    "GAPS8",
    "GAPS16",
    "Gaps",
    "bitmap_positions",
    "checked_positions",
    "from_gaps",
    "narrowest",
    "to_bitmap",
    "to_gaps",
    "to_positions",
]
