"""The index of a delta: ascending positions as gaps of one or two bytes, or as a bitmap where they are dense.

A gap that is too long for its width is bridged by entries that change nothing (difference 0) at the longest
gap. Decoding is then one running sum and no branch, whatever the gaps are.
"""

import numpy as np
from numpy.typing import NDArray

from dcs.delta.difference import Positions, Values
from dcs.delta.format import GAPS8, GAPS16, CorruptDelta

Gaps = NDArray[np.uint8] | NDArray[np.uint16]
_DTYPES = {GAPS8: np.dtype("<u1"), GAPS16: np.dtype("<u2")}


def narrowest(positions: Positions) -> int:
    """`GAPS8` or `GAPS16`, whichever takes fewer bytes for ascending positions."""
    if not len(positions):
        return GAPS8
    # Each bridge leads 255 further, so there are no more than this; mostly that settles it.
    if int(positions[-1]) // 255 <= len(positions) // 2:
        return GAPS8
    bridges = int((np.maximum(_distances(positions) - 1, 0) // 255).sum())
    return GAPS8 if bridges <= len(positions) // 2 else GAPS16


def to_gaps(positions: Positions, differences: Values, kind: int) -> tuple[Gaps, Values]:
    """The gaps of ascending positions, and the differences with a 0 for every bridge.

    The first entry is a position; each other one is at least 1.
    """
    dtype = _DTYPES[kind]
    longest = int(np.iinfo(dtype).max)
    gaps = _distances(positions)
    far = np.flatnonzero(gaps > longest)
    if not len(far):
        return gaps.astype(dtype), differences
    bridges = (gaps[far] - 1) // longest
    gaps[far] -= bridges * longest
    total = len(gaps) + int(bridges.sum())
    changes = np.ones(total, np.bool_)
    changes[np.repeat(far, bridges) + np.arange(total - len(gaps))] = False
    bridged = np.full(total, longest, dtype)
    bridged[changes] = gaps
    spread = np.zeros(total, differences.dtype)
    spread[changes] = differences
    return bridged, spread


def _distances(positions: Positions) -> Positions:
    """From each position to the next one, the first from 0."""
    distances = np.empty_like(positions)
    distances[:1] = positions[:1]
    np.subtract(positions[1:], positions[:-1], out=distances[1:])
    return distances


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
