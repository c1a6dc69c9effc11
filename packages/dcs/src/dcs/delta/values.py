"""The differences of a delta in as few bytes as they allow.

Three forms, each one an escape of the one before:

- `CODES`: two bits a difference, +1, -1, 0 (a bridge of the index), or "see narrow";
- `NARROW`: one signed byte, where -128 stands for "see wide";
- `WIDE`: the difference itself, in the width of the unit.
"""

from typing import Final

import numpy as np

from dcs.delta.difference import DTYPES, Values
from dcs.delta.format import CODES, NARROW, WIDE, CorruptDelta

_ESCAPE: Final = -128
_SEE_NARROW: Final = 3
# What each code stands for, and the four differences of each byte of codes (first code in the lowest bits).
_MEANING: Final = np.array((1, -1, 0, _ESCAPE), np.int8)
_QUADS: Final = _MEANING[(np.arange(256)[:, None] >> np.arange(0, 8, 2)) & 3].reshape(-1).view("<u4").copy()
# The code of a signed byte, by its bit pattern.
_CODE: Final = np.full(256, _SEE_NARROW, np.uint8)
_CODE[_MEANING[:3].view(np.uint8)] = (0, 1, 2)


def to_sections(differences: Values, unit: int) -> tuple[int, list[bytes]]:
    """The form that is smallest, and the sections `codes`, `narrow` and `wide`."""
    dtype = DTYPES[unit]
    signed = differences.view(f"<i{unit}")
    small = signed.astype(np.int8)
    fits = (small == signed) & (small != _ESCAPE) if unit > 1 else small != _ESCAPE
    far = np.flatnonzero(~fits)
    if len(far) * unit + len(signed) > len(signed) * unit and unit > 1:
        return WIDE, [b"", b"", differences.astype(dtype).tobytes()]
    small[far] = _ESCAPE
    wide = differences[far].astype(dtype).tobytes()
    codes = _CODE[small.view(np.uint8)]
    escapes = np.flatnonzero(codes == _SEE_NARROW)
    if len(escapes) + len(codes) // 4 >= len(codes):
        return NARROW, [b"", small.tobytes(), wide]
    padded = np.zeros((len(codes) + 3) // 4 * 4, np.uint8)
    padded[: len(codes)] = codes
    quads = padded.reshape(-1, 4)
    packed = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    return CODES, [packed.tobytes(), small[escapes].tobytes(), wide]


def from_sections(form: int, codes: bytes, narrow: bytes, wide: bytes, unit: int, count: int) -> Values:
    """The `count` differences of sections that a peer sent, of the sizes that the header gives them.

    Raises `CorruptDelta` where there are more or fewer escapes than values for them.
    """
    far = np.frombuffer(wide, DTYPES[unit])
    if form == WIDE:
        if len(far) != count or narrow:
            raise CorruptDelta(f"a delta has {len(far)} values for {count} changes")
        return far
    small = np.frombuffer(narrow, np.int8)
    escapes = np.flatnonzero(small == _ESCAPE)
    if len(escapes) != len(far):
        raise CorruptDelta(f"a delta has {len(escapes)} escapes to {len(far)} wide values")
    if form == CODES:
        # No code is out of the table, so `wrap` changes nothing but that numpy need not look for one.
        coded = _QUADS.take(np.frombuffer(codes, np.uint8), mode="wrap").view(np.int8)[:count]
        looked_up = np.flatnonzero(coded == _ESCAPE)
        if len(looked_up) != len(small):
            raise CorruptDelta(f"a delta has {len(looked_up)} escapes to {len(small)} narrow values")
        coded[looked_up] = small
        small, escapes = coded, looked_up[escapes]
    elif len(small) != count:
        raise CorruptDelta(f"a delta has {len(small)} values for {count} changes")
    values: Values = small.astype(f"<i{unit}").view(DTYPES[unit])
    values[escapes] = far
    return values
