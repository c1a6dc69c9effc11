"""Where two ranges differ, and by how much: the hot part of encoding.

Whole machine words are compared first, into a small buffer that stays in the cache, and only the few words
that differ are looked into. The difference of two values is that of their bit patterns as integers, modulo
2**bits. For floating-point formats that is the distance in units in the last place as long as the sign stays;
it is exact for every bit pattern, NaNs and -0.0 included, because nothing is ever computed in floating point.
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
_WORD: Final = np.dtype("<u8")
_BLOCK_WORDS: Final = 1 << 16


def difference(base: Bytes, new: Bytes, unit: int) -> tuple[Positions, Values]:
    """Positions (in units, ascending) at which whole units of `base` and `new` differ, and new - base there.

    Args:
        base, new: of equal length; a tail shorter than `unit` is not looked at.
        unit: bytes of one value: 1, 2 or 4.
    """
    dtype = DTYPES[unit]
    per_word = _WORD.itemsize // unit
    words = len(base) // _WORD.itemsize
    old_words, new_words = base[: words * 8].view(_WORD), new[: words * 8].view(_WORD)
    differing = _differing(old_words, new_words)
    inside = new_words[differing].view(dtype) - old_words[differing].view(dtype)
    hits = np.flatnonzero(inside)
    positions = differing[hits // per_word] * per_word
    positions += hits % per_word
    differences = inside[hits]
    rest = slice(words * 8, len(base) - len(base) % unit)
    last = new[rest].view(dtype) - base[rest].view(dtype)
    if last.any():
        hits = np.flatnonzero(last)
        positions = np.concatenate((positions, hits + words * per_word))
        differences = np.concatenate((differences, last[hits]))
    return positions, differences


def _differing(old: NDArray[np.uint64], new: NDArray[np.uint64]) -> Positions:
    unequal = np.empty(min(len(old), _BLOCK_WORDS), np.bool_)
    found = [np.empty(0, np.intp)]
    for start in range(0, len(old), _BLOCK_WORDS):
        stop = min(start + _BLOCK_WORDS, len(old))
        block = unequal[: stop - start]
        np.not_equal(old[start:stop], new[start:stop], out=block)
        hits = np.flatnonzero(block)
        hits += start
        found.append(hits)
    return np.concatenate(found)
