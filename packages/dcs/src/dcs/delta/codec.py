"""Encode the difference of two ranges, apply it in place, and bring an older slot up with what it changed."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from dcs.delta import format as wire
from dcs.delta import gaps, values
from dcs.delta.density import sample, share
from dcs.delta.difference import DTYPES, Bytes, Positions, Values, difference
from dcs.delta.gaps import Gaps
from dcs.delta.kernel import Kernel, loaded

# A share of changed units above which a bitmap is used, and above which nothing beats the range itself.
BITMAP_ABOVE: Final = 0.06
DENSE_ABOVE: Final = 0.94

# How far samples have to be above the limit to be believed.
_SURELY: Final = 1.1
_LINE_BYTES: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
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
    gaps: Gaps
    values: Values
    tail: bytes

    @property
    def memory(self) -> int:
        """Bytes that are kept for this: about three for each changed half-precision value."""
        return self.gaps.nbytes + self.values.nbytes + len(self.tail)


def encode(base: Bytes, new: Bytes, unit: int, limit: int, *, compress: bool = True) -> bytes | None:
    """What makes `new` of `base`, or None when that takes more than `limit` bytes.

    Also None when nearly everything has changed (94% of the units): the range itself is then as good. Samples
    mostly tell before anything else is done. Safe to call from several threads.

    Args:
        base, new: contiguous uint8 ranges of equal length, below 4 GiB. Neither may change during the call.
        unit: bytes of one value of the tensors in the range: 1 (fp8), 2 (bf16, fp16) or 4 (fp32). A wrong one
            costs size, never exactness.
        limit: bytes that a delta may have, for example half of those of the range.
        compress: store with zstd what it makes an eighth smaller. False for links that are faster than that.
    """
    _check(base, unit)
    if len(new) != len(base):
        raise ValueError(
            f"ranges of {len(base)} and {len(new)} bytes have no delta: give two of equal length"
        )
    if limit < wire.overhead(len(base), unit) or _hopeless(base, new, unit, limit, compress):
        return None
    return _encoded(base, new, unit, limit, compress)


def _hopeless(base: Bytes, new: Bytes, unit: int, limit: int, compress: bool) -> bool:
    """Whether samples show that a delta would be too large; they cost a hundredth of finding that out."""
    old, young = sample(base, unit), sample(new, unit)
    changed = share(old, young, unit)
    if changed > DENSE_ABOVE:
        return True
    if changed <= BITMAP_ABOVE or 2 * len(old) > len(base):
        return False
    trial = _encoded(old, young, unit, 2 * len(old), compress)
    return trial is None or len(trial) * len(base) > _SURELY * limit * len(old)


def _encoded(base: Bytes, new: Bytes, unit: int, limit: int, compress: bool) -> bytes | None:
    units = len(base) // unit
    spare = limit - wire.overhead(len(base), unit)
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


def apply(
    payload: bytes | bytearray | memoryview, target: Bytes, *, behind: Changed | None = None
) -> Changed | None:
    """Turn `target`, which holds the base, into the new version, in place.

    Returns what has changed, for the other slot; None when that is so much (above 6%) that a copy of the
    whole range is cheaper. Nothing of the payload is referred to afterwards. A base other than the one that
    was encoded cannot be told here: the result is then wrong, as the hash of the chunk shows.

    Args:
        payload: what `encode` returned.
        target: writable contiguous uint8 range, as long as the one that was encoded.
        behind: what made the base, when `target` is still the version before the base. It is brought up
            first, as by `copy_changed`, at less cost than by two calls.

    Raises:
        CorruptDelta: the payload is damaged, or for a range of another length; `target` is as it was.
    """
    header, sections, tail = wire.unpack(payload, len(target))
    _check(target, header.unit)
    kernel = loaded()
    if kernel is not None and header.index != wire.BITMAP and target.flags.writeable:
        changed = _apply_compiled(kernel, header, sections, tail, target, behind)
        if changed is not None:
            return changed
    return _apply_numpy(header, sections, tail, target, behind)  # it says what is wrong with a delta, too


def _apply_compiled(
    kernel: Kernel,
    header: wire.Header,
    sections: list[bytes],
    tail: bytes,
    target: Bytes,
    behind: Changed | None,
) -> Changed | None:
    """As `apply`, from gaps; None, with `target` as it was, where anything is not as it should be."""
    index, codes, narrow, wide = sections
    unit = header.unit
    steps = gaps.from_gaps(index, header.index)
    if not kernel.leads(steps, len(target) // unit):
        return None
    result = kernel.decoded(header.form, codes, narrow, wide, unit, header.count)
    if result is None:
        return None
    before = None
    if behind is not None:
        _check_length(behind, target)
        if behind.unit != unit or not _is_sound(kernel, behind):
            return None
        before = behind.gaps, behind.values
    kernel.add(steps, result, target, before)
    target[len(target) - len(tail) :] = np.frombuffer(tail, np.uint8)
    return Changed(len(target), unit, steps, result, tail)


def _apply_numpy(
    header: wire.Header, sections: list[bytes], tail: bytes, target: Bytes, behind: Changed | None
) -> Changed | None:
    """As `apply`."""
    index, codes, narrow, wide = sections
    unit = header.unit
    units = len(target) // unit
    steps = None
    if header.index == wire.BITMAP:
        positions = gaps.bitmap_positions(index, units, header.count)
    else:
        steps = gaps.from_gaps(index, header.index)
        positions = gaps.checked_positions(steps, units)
    differences = values.from_sections(header.form, codes, narrow, wide, unit, header.count)
    if behind is None:
        _warm(target, len(positions))
    else:
        _check_length(behind, target)
        stale = gaps.to_positions(behind.gaps)
        _warm(target, len(positions) + len(stale))
        _restore(behind, stale, target)
    body = target[: units * unit].view(DTYPES[unit])
    # All positions are in range by now, so `wrap` changes nothing but that numpy need not look again.
    result = body.take(positions, mode="wrap", out=np.empty(len(positions), body.dtype))
    result += differences
    body[positions] = result
    target[units * unit :] = np.frombuffer(tail, np.uint8)
    return None if steps is None else Changed(len(target), unit, steps, result, tail)


def copy_changed(changed: Changed, target: Bytes, *, source: Bytes | None = None) -> None:
    """Make `target`, which equals some range but for what `changed` names, equal to it.

    Args:
        changed: what an `apply` to that range returned.
        target: writable contiguous uint8 range: that range as it was before that `apply`, or after it.
        source: take the values from there, rather than those that `apply` left. This is how a slot is taken
            back: `target` is the range that `apply` has changed, and `source` still holds the base.
    """
    _check_length(changed, target)
    _check(target, changed.unit)
    if source is not None:
        _check_length(changed, source)
        _check(source, changed.unit)
    whole = changed.nbytes // changed.unit * changed.unit
    kernel = loaded()
    if kernel is None or not target.flags.writeable or not _is_sound(kernel, changed):
        _copy_numpy(changed, target, source)
    elif source is None:
        kernel.put(changed.gaps, changed.values, target)
    else:
        kernel.take(changed.gaps, source, target, changed.unit)
    target[whole:] = np.frombuffer(changed.tail, np.uint8) if source is None else source[whole:]


def _copy_numpy(changed: Changed, target: Bytes, source: Bytes | None) -> None:
    """As `copy_changed`, but for the tail."""
    positions = gaps.to_positions(changed.gaps)
    whole = changed.nbytes // changed.unit * changed.unit
    dtype = DTYPES[changed.unit]
    new = changed.values if source is None else source[:whole].view(dtype)[positions]
    target[:whole].view(dtype)[positions] = new


def _is_sound(kernel: Kernel, changed: Changed) -> bool:
    """Whether the kernel may follow what a caller has kept: it writes wherever gaps lead."""
    return (
        changed.values.itemsize == changed.unit
        and len(changed.values) == len(changed.gaps)
        and changed.values.flags.c_contiguous
        and changed.gaps.flags.c_contiguous
        and changed.gaps.itemsize <= 2
        and kernel.leads(changed.gaps, changed.nbytes // changed.unit)
    )


def _restore(changed: Changed, positions: Positions, target: Bytes) -> None:
    whole = changed.nbytes // changed.unit * changed.unit
    target[:whole].view(DTYPES[changed.unit])[positions] = changed.values
    target[whole:] = np.frombuffer(changed.tail, np.uint8)


def _warm(target: Bytes, touches: int) -> None:
    """Read all of `target` when most of its cache lines are about to be touched anyway.

    A miss of a scattered access costs about three times what a line costs when all are read in turn.
    """
    if 3 * touches > len(target) // _LINE_BYTES:
        np.bitwise_or.reduce(target[: len(target) // 8 * 8].view(np.uint64))


def _check_length(changed: Changed, range_: Bytes) -> None:
    if len(range_) != changed.nbytes:
        raise ValueError(f"changes of a range of {changed.nbytes} bytes were given for one of {len(range_)}")


def _check(range_: Bytes, unit: int) -> None:
    if unit not in wire.UNITS:
        raise ValueError(f"a unit of {unit} bytes: expected 1, 2 or 4, the size of a value of the tensors")
    if range_.dtype != np.uint8 or range_.ndim != 1 or not range_.flags.c_contiguous or len(range_) >> 32:
        raise ValueError(
            f"not a range for a delta: {range_.dtype}{range_.shape}, expected one contiguous dimension of "
            "uint8, below 4 GiB"
        )
