"""Where two ranges differ, and by how much: the hot part of encoding.

Blocks are compared into one small buffer, and looked into while they are still in the cache. The difference
of two values is that of their bit patterns as integers, modulo 2**bits. For floating-point formats that is
the distance in units in the last place as long as the sign stays; and it is exact for every bit pattern, NaNs
and -0.0 included, because nothing is ever computed in floating point.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Positions = NDArray[np.intp]
Values = NDArray[np.unsignedinteger]

DTYPES: Final[dict[int, np.dtype[np.unsignedinteger]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
}
# Half a megabyte of each range: large enough for numpy's calls not to count, small enough for a cache.
_BLOCK_BYTES: Final = 1 << 19


def difference(base: Bytes, new: Bytes, unit: int) -> tuple[Positions, Values]:
    """Positions (in units, ascending) at which whole units of `base` and `new` differ, and new - base there.

    Args:
        base, new: of equal length; a tail shorter than `unit` is not looked at.
        unit: bytes of one value: 1, 2 or 4.
    """
    dtype = DTYPES[unit]
    whole = len(base) // unit * unit
    old, young = base[:whole].view(dtype), new[:whole].view(dtype)
    size = _BLOCK_BYTES // unit
    unequal = np.empty(min(len(old), size), np.bool_)
    positions, differences = [np.empty(0, np.intp)], [np.empty(0, dtype)]
    for start in range(0, len(old), size):
        before, after = old[start : start + size], young[start : start + size]
        marks = unequal[: len(before)]
        np.not_equal(before, after, out=marks)
        hits = np.flatnonzero(marks)
        differences.append(after[hits] - before[hits])
        hits += start
        positions.append(hits)
    return np.concatenate(positions), np.concatenate(differences)
