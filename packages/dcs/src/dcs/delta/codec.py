"""Encode the difference of two ranges, apply it in place, and bring an older slot up with what it changed."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from dcs.delta import format as wire
from dcs.delta import gaps, values
from dcs.delta.density import density
from dcs.delta.difference import DTYPES, Bytes, Values, difference

# A share of changed units above which a bitmap is used, and above which nothing beats the range itself.
BITMAP_ABOVE: Final = 0.06
DENSE_ABOVE: Final = 0.94


@dataclass(frozen=True, slots=True)
class Changed:
    """What `apply` changed, kept so that the other slot can be given the same values.

    Attributes:
        nbytes: length of the range.
        unit: bytes of one value.
        gaps: distance of each changed position from the one before, in units.
        values: what `apply` has left at these positions.
        tail: the end of the range that fills no whole unit.
    """

    nbytes: int
    unit: int
    gaps: gaps.Gaps
    values: Values
    tail: bytes

    @property
    def memory(self) -> int:
        """Bytes that are kept for this: about three for each changed half-precision value."""
        return self.gaps.nbytes + self.values.nbytes + len(self.tail)


def encode(base: Bytes, new: Bytes, unit: int, limit: int, *, compress: bool = True) -> bytes | None:
    """What makes `new` of `base`, or None when that takes more than `limit` bytes.

    Also None when nearly everything has changed (94% of the units), as a few samples tell before anything
    else is done; the range itself is then as good. Safe to call from several threads.

    Args:
        base, new: contiguous uint8 ranges of equal length, below 4 GiB. Neither may change during the call.
        unit: bytes of one value of the tensors in the range: 1 (fp8), 2 (bf16, fp16) or 4 (fp32). A wrong one
            costs size, never exactness.
        limit: bytes that a delta may have, for example half of those of the range.
        compress: store with zstd what it makes smaller. False for links that are faster than that.
    """
    _check(base, unit)
    if len(new) != len(base):
        raise ValueError(
            f"ranges of {len(base)} and {len(new)} bytes have no delta: give two of equal length"
        )
    units = len(base) // unit
    spare = limit - wire.overhead(len(base), unit)
    if spare < 0 or density(base, new, unit) > DENSE_ABOVE:
        return None
    positions, differences = difference(base, new, unit)
    if len(positions) > DENSE_ABOVE * units:
        return None
    if len(positions) > BITMAP_ABOVE * units:
        kind, index = wire.BITMAP, gaps.to_bitmap(positions, units)
    else:
        kind = gaps.narrowest(positions)
        index, differences = gaps.to_gaps(positions, differences, kind)
    sections = [wire.stored(index.tobytes(), compress)]
    if len(sections[0]) > spare:
        return None
    form, parts = values.to_sections(differences, unit)
    sections += [wire.stored(part, compress) for part in parts]
    if sum(map(len, sections)) > spare:
        return None
    held = (len(sections[0]), len(sections[1]), len(sections[2]), len(sections[3]))
    header = wire.Header(
        unit, kind, form, len(base), len(differences), len(parts[1]), len(parts[2]) // unit, held
    )
    return wire.pack(header, sections, new[units * unit :].tobytes())


def apply(payload: bytes | bytearray | memoryview, target: Bytes) -> Changed | None:
    """Turn `target`, which holds the base, into the new version, in place.

    Returns what has changed, for `copy_changed`; None when that is so much (above 6%) that a copy of the
    whole range is cheaper. Nothing of the payload is referred to afterwards. A base other than the one that
    was encoded cannot be told here: the result is then wrong, as the hash of the chunk shows.

    Args:
        payload: what `encode` returned.
        target: writable contiguous uint8 range, as long as the one that was encoded.

    Raises:
        CorruptDelta: the payload is damaged, or for a range of another length; `target` is untouched.
    """
    header, (index, codes, narrow, wide), tail = wire.unpack(payload, len(target))
    unit = header.unit
    _check(target, unit)
    units = len(target) // unit
    steps = None
    if header.index == wire.BITMAP:
        positions = gaps.bitmap_positions(index, units, header.count)
    else:
        steps = gaps.from_gaps(index, header.index)
        positions = gaps.checked_positions(steps, units)
    differences = values.from_sections(header.form, codes, narrow, wide, unit, header.count)
    body = target[: units * unit].view(DTYPES[unit])
    result = body[positions]
    result += differences
    body[positions] = result
    if tail:
        target[units * unit :] = np.frombuffer(tail, np.uint8)
    return None if steps is None else Changed(len(target), unit, steps, result, tail)


def copy_changed(changed: Changed, target: Bytes, *, source: Bytes | None = None) -> None:
    """Make `target`, which equals some range but for what `changed` names, equal to it.

    Args:
        changed: what an `apply` to that range returned.
        target: writable contiguous uint8 range; before, the range as it was before that `apply` (or after
        it).
        source: take the values from there, rather than those that `apply` left. This is how a slot is taken
            back: `target` is the range that `apply` has changed, and `source` still holds the base.
    """
    if len(target) != changed.nbytes or (source is not None and len(source) != changed.nbytes):
        raise ValueError(
            f"changes of a range of {changed.nbytes} bytes cannot be copied to one of {len(target)}"
        )
    unit = changed.unit
    _check(target, unit)
    whole = changed.nbytes // unit * unit
    positions = gaps.to_positions(changed.gaps)
    body = target[:whole].view(DTYPES[unit])
    if source is None:
        body[positions] = changed.values
        target[whole:] = np.frombuffer(changed.tail, np.uint8)
    else:
        body[positions] = source[:whole].view(DTYPES[unit])[positions]
        target[whole:] = source[whole:]


def _check(range_: Bytes, unit: int) -> None:
    if unit not in wire.UNITS:
        raise ValueError(f"a unit of {unit} bytes: expected 1, 2 or 4, the size of a value of the tensors")
    if range_.dtype != np.uint8 or range_.ndim != 1 or not range_.flags.c_contiguous or len(range_) >> 32:
        raise ValueError(
            f"not a range for a delta: {range_.dtype}{range_.shape}, expected one contiguous dimension of "
            "uint8, below 4 GiB"
        )
