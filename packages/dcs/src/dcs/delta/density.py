"""How much of a range has changed, from a few pieces of it."""

from typing import Final

import numpy as np

from dcs.delta.difference import DTYPES, Bytes

_PIECES: Final = 64
_PIECE_BYTES: Final = 1024


def density(base: Bytes, new: Bytes, unit: int) -> float:
    """An estimate of the share of units in which `base` and `new` differ: 0 to 1.

    Reads at most 64 KiB of each, in pieces spread evenly, so it costs a hundredth of a diff of 4 MiB. Exact
    for ranges that are not larger than that.
    """
    size = len(base) // unit * unit
    if not size:
        return 0.0
    dtype = DTYPES[unit]
    if size <= _PIECES * _PIECE_BYTES:
        old, young = base[:size].view(dtype), new[:size].view(dtype)
        return float(np.count_nonzero(old != young)) / len(old)
    apart = size // _PIECES // unit * unit
    rows = (_PIECES, _PIECE_BYTES // unit)
    old = base[: apart * _PIECES].view(dtype).reshape(_PIECES, -1)[:, : rows[1]]
    young = new[: apart * _PIECES].view(dtype).reshape(_PIECES, -1)[:, : rows[1]]
    return float(np.count_nonzero(old != young)) / (rows[0] * rows[1])
