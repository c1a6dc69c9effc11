"""The jagged frame: all columns of a batch in one buffer, and the description that travels beside it.

Every column is up to five sections, each starting at a multiple of 64 bytes: values, offsets (int64), shapes
(int64, of rows that differ in several dimensions), valid (one byte a row), index (int64). Where they start
follows from their sizes, so the description holds counts and no positions. A decoder trusts nothing: every
size is derived, bounded by the buffer, and offsets, shapes, mask and index are checked before use.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import xxhash

from ..errors import Corrupt
from .column import Column, frozen
from .spec import BYTES, CONTAINERS, DTYPES, FLAT, ITEMS, ColumnPlan, FieldSpec, Kind, Nesting, storage

ALIGNMENT = 64


class ColumnHeader(msgspec.Struct, frozen=True, array_like=True):
    """Describes one column of a frame; see `ColumnPlan` for the counts."""

    name: str
    spec: FieldSpec
    total: int
    stored: int
    has_valid: bool
    shared: bool
    length: int | None = None
    kind: Kind = Kind()
    nesting: Nesting = FLAT


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """Describes a frame: the rows of every column, the columns, and the xxh3 checksum of the buffer (0 where
    none was taken).
    """

    rows: int
    columns: list[ColumnHeader]
    checksum: int


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Where everything goes in a frame that is not written yet.

    Attributes:
        header: the description, its checksum still 0.
        nbytes: size of the frame, a multiple of 64.
    """

    header: FrameHeader
    nbytes: int
    _sizes: list["_Sizes"]


_Sizes = tuple[int, int, int, int, int]  # of a column: bytes of values, offsets, shapes, valid, index


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next section may begin."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def _sections(header: ColumnHeader, rows: int) -> _Sizes:
    spec, stored = header.spec, header.stored
    how = storage(spec)
    return (
        how.nbytes * header.total,
        0 if spec.scalar or header.length is not None else 8 * (stored + 1),
        8 * stored * how.dims,
        stored if header.has_valid else 0,
        8 * rows if header.shared else 0,
    )


def layout(rows: int, plans: Mapping[str, ColumnPlan]) -> FrameLayout:
    """Where the columns of `plans` lie in a frame; copies nothing."""
    headers = [
        ColumnHeader(
            name,
            plan.spec,
            plan.total,
            plan.stored,
            plan.valid is not None,
            plan.index is not None,
            plan.length,
            plan.kind,
            plan.nesting,
        )
        for name, plan in plans.items()
    ]
    sizes = [_sections(header, rows) for header in headers]
    nbytes = sum([aligned(size) for column in sizes for size in column if size])
    return FrameLayout(FrameHeader(rows, headers, 0), nbytes, sizes)


def write(layout: FrameLayout, plans: Mapping[str, ColumnPlan], out: np.ndarray) -> None:
    """Copies every part once to its place in `out` and zeroes the gaps, so that no stale memory leaves the
    process.

    Args:
        layout: what `layout` gave for these very plans.
        plans: the columns.
        out: uint8 ``[layout.nbytes]``, writable, contiguous, its start at a multiple of 64 bytes. The copy of
            a large part holds no GIL.
    """
    if layout.nbytes <= _SMALL and _write_small(layout, plans, out):
        return
    at = 0
    for (values, *others), plan in zip(layout._sizes, plans.values(), strict=True):
        if values:
            how = storage(plan.spec)
            plan.fill(np.ndarray((plan.total, *how.step), how.dtype, out, at))
            at = _close(out, at, values)
        for nbytes, section in zip(others, _sections_of(plan), strict=True):
            if nbytes and section is not None:
                np.ndarray(section.shape, section.dtype, out, at)[...] = section
                at = _close(out, at, nbytes)


def _sections_of(plan: ColumnPlan) -> tuple[np.ndarray | None, ...]:
    return plan.offsets, plan.shapes, plan.valid, plan.index


def _close(out: np.ndarray, at: int, nbytes: int) -> int:
    """Zeroes the gap behind a section and returns where the next begins."""
    end = at + nbytes
    following = aligned(end)
    if end != following:
        out[end:following] = 0
    return following


def _write_small(layout: FrameLayout, plans: Mapping[str, ColumnPlan], out: np.ndarray) -> bool:
    """As `write`, by one join of buffers: for small parts that takes a seventh of numpy's time.

    Returns:
        Whether it was possible: a tensor or a strided array is no buffer.
    """
    buffers: list[Any] = []
    for (values, *others), plan in zip(layout._sizes, plans.values(), strict=True):
        if values:
            buffers += plan.parts
            buffers.append(_ZEROES[: -values % ALIGNMENT])
        for nbytes, section in zip(others, _sections_of(plan), strict=True):
            if nbytes:
                buffers.append(section)
                buffers.append(_ZEROES[: -nbytes % ALIGNMENT])
    try:
        joined = b"".join(buffers)
    except TypeError:
        return False
    out[...] = np.frombuffer(joined, np.uint8)
    return True


_SMALL = 1 << 16
_ZEROES = bytes(ALIGNMENT)


def encode(rows: int, plans: Mapping[str, ColumnPlan]) -> tuple[FrameHeader, np.ndarray]:
    """Copies every column once into one fresh buffer (uint8) and describes it, with a checksum."""
    plan = layout(rows, plans)
    room = np.empty(plan.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    buffer = room[start : start + plan.nbytes]
    write(plan, plans, buffer)
    return FrameHeader(rows, plan.header.columns, xxhash.xxh3_64_intdigest(buffer)), buffer


def decode(header: FrameHeader, payload: Any, *, verify: bool = True) -> dict[str, Column]:
    """The columns of a frame as read-only views of `payload` (any buffer); the views keep it alive.

    Args:
        header: its description.
        payload: the frame. One that does not start at a multiple of 8 bytes is copied.
        verify: whether to compare the checksum; the description is always checked.

    Raises:
        Corrupt: the checksum or the description does not fit the bytes.
    """
    buffer = np.frombuffer(payload, np.uint8) if len(payload) else np.empty(0, np.uint8)
    if verify and xxhash.xxh3_64_intdigest(buffer) != header.checksum:
        raise Corrupt(
            f"a frame of {len(buffer)} bytes does not match its checksum; it was changed on the way"
        )
    if buffer.ctypes.data % 8:  # a small message may lie anywhere in the receive buffer
        buffer = buffer.copy()
    buffer.flags.writeable = False
    columns: dict[str, Column] = {}
    at = 0
    for column in header.columns:
        sections: list[np.ndarray] = []
        for nbytes in _checked(column, header.rows, len(buffer) - at):
            sections.append(buffer[at : at + nbytes] if nbytes else _EMPTY)
            at += aligned(nbytes)
        columns[column.name] = _column(column, sections)
    if at != len(buffer) or len(columns) != len(header.columns):
        raise Corrupt(f"a frame of {len(buffer)} bytes is described as {at}")
    return columns


def _checked(column: ColumnHeader, rows: int, left: int) -> _Sizes:
    spec, total, stored, length = column.spec, column.total, column.stored, column.length
    sane = 0 <= rows < _LIMIT and 0 <= total < _LIMIT and 0 <= stored < _LIMIT
    sane = sane and _possible(spec, column.kind) and (column.shared or stored == rows)
    sane = sane and not (spec.scalar and total != stored)
    sane = sane and (column.nesting == FLAT or _fits(column.nesting, column.name))
    if length is not None:
        sane = sane and not spec.scalar and not spec.varying
        sane = sane and 0 < length < _LIMIT and total == length * stored
        sane = sane and (stored == 0 or storage(spec).nbytes > 0)
    if not sane:
        raise Corrupt(f"column {column.name!r} is described inconsistently ({column})")
    sizes = _sections(column, rows)
    if sum([aligned(size) for size in sizes if size]) > left:
        raise Corrupt(f"column {column.name!r} is described as {sum(sizes)} bytes where {left} are left")
    return sizes


_LIMIT = 1 << 48


@lru_cache(maxsize=4096)
def _possible(spec: FieldSpec, kind: Kind) -> bool:
    plain = not spec.scalar and not spec.trailing
    return (
        spec.dtype in DTYPES
        and len(spec.trailing) < 30
        and all(-1 <= size < _LIMIT for size in spec.trailing)
        and math.prod(max(size, 1) for size in spec.trailing) < _LIMIT
        and not (spec.scalar and spec.trailing)
        and (plain or spec.dtype not in BYTES)
        and kind.container in CONTAINERS
        and kind.item in ITEMS
        and (kind.ragged == 1 or (2 <= kind.ragged <= 1 + len(spec.trailing) and spec.varying))
        and 0 <= kind.width < 1 << 31
    )


def _fits(nesting: Nesting, name: str) -> bool:
    splits = (*nesting.splits, len(name))
    return (
        len(nesting.levels) == len(splits)
        and min(nesting.levels) >= 0
        and all(0 <= a < b <= len(name) and name[a] == "/" for a, b in pairwise(splits))
    )


_EMPTY = frozen(np.empty(0, np.uint8))


def _column(column: ColumnHeader, sections: list[np.ndarray]) -> Column:
    spec = column.spec
    how = storage(spec)
    values = sections[0].view(how.dtype)
    if how.step:
        values = values.reshape(column.total, *how.step)
    offsets = shapes = valid = index = None
    if not spec.scalar and column.length is None:
        offsets = sections[1].view(np.int64)
        if offsets[0] != 0 or offsets[-1] != column.total or (offsets[1:] < offsets[:-1]).any():
            raise Corrupt(f"the offsets of column {column.name!r} do not increase from 0 to {column.total}")
        if spec.varying:
            shapes = sections[2].view(np.int64).reshape(column.stored, 1 + len(spec.trailing))
            _check_shapes(column, shapes, np.diff(offsets))
    if column.has_valid:
        if (sections[3] > 1).any():
            raise Corrupt(f"the mask of column {column.name!r} holds more than 0 and 1")
        valid = sections[3].view(np.bool_)
    if column.shared:
        index = sections[4].view(np.int64)
        if len(index) and (index.min() < -1 or index.max() >= column.stored):
            raise Corrupt(f"the index of column {column.name!r} points outside its {column.stored} rows")
    return Column(
        spec,
        values,
        offsets,
        valid,
        index,
        column.length,
        shapes=shapes,
        kind=column.kind,
        nesting=column.nesting,
    )


def _check_shapes(column: ColumnHeader, shapes: np.ndarray, lengths: np.ndarray) -> None:
    # in floats first: sizes that wrap around 64 bits could multiply to the right length
    fits = (shapes >= 0).all() and (shapes < 1 << 48).all()
    fits = fits and (np.prod(shapes, axis=1, dtype=np.float64) < 1 << 52).all()
    if not fits or (np.prod(shapes, axis=1) != lengths).any():
        raise Corrupt(f"the shapes of the rows of column {column.name!r} do not fit their lengths")
    for size, sizes in zip(column.spec.trailing, shapes.T[1:], strict=True):
        if size >= 0 and (sizes[lengths > 0] != size).any():
            raise Corrupt(f"a row of column {column.name!r} is not {column.spec}")
