"""How much of a range has changed, and what a delta of it would take, from a few pieces of it."""

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
    return share(sample(base, unit), sample(new, unit), unit)


def sample(range_: Bytes, unit: int) -> Bytes:
    """At most 64 KiB of whole units out of a range: the same places for every range of one length."""
    size = len(range_) // unit * unit
    if size <= _PIECES * _PIECE_BYTES:
        return range_[:size]
    apart = size // _PIECES // unit * unit
    return range_[: apart * _PIECES].reshape(_PIECES, apart)[:, :_PIECE_BYTES].reshape(-1)


def share(base: Bytes, new: Bytes, unit: int) -> float:
    """The share of units in which two ranges of whole units differ; 0 for empty ones."""
    if not len(base):
        return 0.0
    dtype = DTYPES[unit]
    differing = int(np.count_nonzero(base.view(dtype) != new.view(dtype)))
    return differing * unit / len(base)
