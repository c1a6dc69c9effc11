"""Rows of several columns as one: `runs` of rows, `gather` into a plan, `assemble` into a column without a
copy.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from msgspec.structs import replace

from ..errors import InvalidArgument, SchemaMismatch
from .column import Column, frozen
from .restoring import item_of as _item
from .spec import FLAT, ColumnPlan, FieldSpec, Kind, Nesting

__all__ = ["Column", "ColumnPlan", "FieldSpec", "Run", "assemble", "gather", "lay_out", "runs"]

Run = tuple[Column, int, int]  # rows start..stop of a column


def runs(rows: Iterable[tuple[Column, int]]) -> Iterator[Run]:
    """Consecutive rows of one column as ``(column, start, stop)``."""
    last: Column | None = None
    start = stop = 0
    for column, row in rows:
        if column is last and row == stop:
            stop += 1
            continue
        if last is not None:
            yield last, start, stop
        last, start, stop = column, row, row + 1
    if last is not None:
        yield last, start, stop


def assemble(pieces: Sequence[Run], rows: int) -> Column:
    """The column of the rows of `pieces`, one run after the other, without copying any.

    One run is a slice. Several are a column that takes each row from where it lies; only a use of its
    ``values``, ``offsets``, ``valid`` or ``index`` lays them out, once.

    Args:
        pieces: ``(column, start, stop)`` in order. Columns of spec "none" mix with any other; values that
            samples share stay shared.
        rows: how many they are together.

    Raises:
        SchemaMismatch: the columns are not of one field.
        InvalidArgument: the runs have another number of rows.
    """
    found = sum(stop - start for _, start, stop in pieces)
    if found != rows:
        raise InvalidArgument(f"the runs have {found} rows together where {rows} are expected")
    spec = _common_spec(pieces)
    flat = _flattened(pieces)
    pieces = [run for run in flat if run[1] < run[2]] or [run for run in flat if run[0].spec == spec][:1]
    if len(pieces) == 1 and pieces[0][0].spec == spec:
        column, start, stop = pieces[0]
        return column.slice(start, stop)
    return _Joined(spec, pieces)


class _Joined(Column):
    """Rows where they lie; laid out on first use of the arrays.

    Two threads may lay out at once: both get equal columns and the last one stays.
    """

    __slots__ = ("_common_kind", "_pieces", "_rows", "_starts", "_whole")

    def __init__(self, spec: FieldSpec, pieces: Sequence[Run]) -> None:
        self.spec = spec
        self._pieces = pieces
        ends = list(accumulate((stop - start for _, start, stop in pieces), initial=0))
        self._rows = ends.pop()
        self._starts = ends
        self._whole: Column | None = None
        self._common_kind: Kind | None = None

    def _laid_out(self) -> Column:
        if self._whole is None:
            self._whole = lay_out(gather(self._pieces, self.spec))
        return self._whole

    @property
    def kind(self) -> Kind:
        if self._common_kind is None:
            self._common_kind = _common_kind(self._pieces)
        return self._common_kind

    @property
    def nesting(self) -> Nesting:
        return _common_nesting(self._pieces)

    @property
    def shapes(self) -> np.ndarray | None:
        return self._laid_out().shapes if self.spec.varying else None

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        shapes = {column.slice(start, stop).row_shape for column, start, stop in self._pieces}
        if len(shapes) != 1:
            return None if shapes else self._laid_out().row_shape
        return shapes.pop()

    def pieces(self) -> list[Column]:
        return [column.slice(start, stop) for column, start, stop in self._pieces]

    def without_index(self) -> Column:
        return self._laid_out().without_index()

    def _array(self, copy: bool) -> np.ndarray:
        if self.index is not None or (self._whole is not None and not copy):
            return self._laid_out()._array(copy)
        plan = gather(self._pieces, self.spec)
        if not copy:
            return self._laid_out().values
        values = np.empty((plan.total, *plan.spec.step), plan.spec.stored)
        plan.fill(values)
        return values

    @property
    def values(self) -> np.ndarray:
        return self._laid_out().values

    @property
    def offsets(self) -> np.ndarray:
        return self._laid_out().offsets

    @property
    def valid(self) -> np.ndarray | None:
        if all(column.valid is None and column.dtype != "none" for column, _, _ in self._pieces):
            return None
        return self._laid_out().valid

    @property
    def index(self) -> np.ndarray | None:
        if all(column.index is None for column, _, _ in self._pieces):
            return None
        return self._laid_out().index

    @property
    def stored(self) -> int:
        return self._rows if self.index is None else self._laid_out().stored

    def _lengths(self, start: int, stop: int) -> np.ndarray:
        pieces = self._between(start, stop)
        if not pieces:
            return np.zeros(0, np.int64)
        return np.concatenate(
            [
                np.zeros(last - first, np.int64) if column.dtype == "none" else column._lengths(first, last)
                for column, first, last in pieces
            ]
        )

    def _between(self, start: int, stop: int) -> list[Run]:
        """The runs of rows ``start:stop``."""
        if start >= stop:
            return []
        found: list[Run] = []
        at = bisect_right(self._starts, start) - 1
        while at < len(self._pieces) and self._starts[at] < stop:
            column, first, last = self._pieces[at]
            offset = first - self._starts[at]
            found.append((column, max(first, start + offset), min(last, stop + offset)))
            at += 1
        return found

    def slice(self, start: int, stop: int) -> Column:
        if not 0 <= start <= stop <= self._rows:
            raise IndexError(f"rows {start}:{stop} of a column with {self._rows} rows")
        if start == 0 and stop == self._rows:
            return self
        return _Joined(self.spec, self._between(start, stop))

    def __len__(self) -> int:
        return self._rows

    def _row(self, at: int) -> Any:
        which = bisect_right(self._starts, at) - 1
        column, start, _ = self._pieces[which]
        return column._row(at - self._starts[which] + start)


def _common_spec(pieces: Sequence[Run], spec: FieldSpec | None = None) -> FieldSpec:
    """The spec that all columns fit; a dimension that is free in one is free in all."""
    for column, _, _ in pieces:
        other = column.spec
        if other == spec or other.dtype == "none":
            continue
        joined = other if spec is None else _joined_spec(spec, other)
        if joined is None:
            raise SchemaMismatch(
                f"rows of {other} and of {spec} cannot be joined; the field was updated with both",
                field="",
                got=str(other),
                expected=str(spec),
            )
        spec = joined
    return spec or FieldSpec("none")


def _joined_spec(one: FieldSpec, other: FieldSpec) -> FieldSpec | None:
    if one.accepts(other):
        return one
    if other.accepts(one):
        return other
    if one.varying and other.varying:
        free = FieldSpec(
            one.dtype,
            tuple(a if a == b else -1 for a, b in zip(one.trailing, other.trailing, strict=False)),
        )
        return free if free.accepts(one) and free.accepts(other) else None
    return None


def _common_kind(pieces: Sequence[Run]) -> Kind:
    """The kind of all pieces that have values; where they differ, a list of what holds them all."""
    kinds = list(dict.fromkeys(column.kind for column, _, _ in pieces if column.dtype != "none"))
    if len(kinds) == 1 and kinds[0].container in ("list", "tuple", "objects"):
        return kinds[0]
    missing = any(column.dtype == "none" for column, _, _ in pieces)
    if len(kinds) == 1 and not missing:
        return kinds[0]
    if not kinds:
        return pieces[0][0].kind if pieces else Kind("list", "python")
    containers = {kind.container for kind in kinds}
    if containers == {"array"} and not missing:  # of text, of different widths
        return Kind("array", kinds[0].item, width=max(kind.width for kind in kinds))
    if containers <= {"tensor", "nested"} and not missing and all(kind.ragged == 1 for kind in kinds):
        return Kind("nested", "tensor")
    items = {_item(column) for column, _, _ in pieces if column.dtype != "none"}
    ranked = ("tensor", "array", "scalar", "bytearray", "python")
    item = next(item for item in ranked if item in items)
    return Kind("list", "python" if item == "bytearray" and len(items) > 1 else item)


def _common_nesting(pieces: Sequence[Run]) -> Nesting:
    found = {column.nesting for column, _, _ in pieces}
    return found.pop() if len(found) == 1 else FLAT


def _flattened(pieces: Sequence[Run]) -> list[Run]:
    """The runs with those of joined columns taken apart."""
    flat: list[Run] = []
    for column, start, stop in pieces:
        if isinstance(column, _Joined):
            flat += column._between(start, stop)
        else:
            flat.append((column, start, stop))
    return flat


def gather(pieces: Sequence[Run], spec: FieldSpec | None = None) -> ColumnPlan:
    """The rows of several columns of one field, one after the other, still shared where they were.

    Args:
        pieces: ``(column, start, stop)`` in the order wanted. Columns of spec "none" mix with any other.
        spec: of the result; None finds it in the columns.
    """
    spec = _common_spec(pieces, spec)
    pieces = _flattened(pieces)
    if any(column.index is not None for column, _, _ in pieces):
        return _gather_shared(pieces, spec)
    total = sum(stop - start for _, start, stop in pieces)
    parts: list[np.ndarray] = []
    valid: np.ndarray | None = None
    steps = None if spec.scalar else np.zeros(total + 1, np.int64)
    shapes = np.zeros((total, 1 + len(spec.trailing)), np.int64) if spec.varying else None
    at = 0
    for column, start, stop in pieces:
        end = at + stop - start
        column, start, stop = _as_spec(column, start, stop, spec)
        if column.valid is not None:
            valid = np.ones(total, bool) if valid is None else valid
            valid[at:end] = column.valid[start:stop]
        if column._offsets is None:
            step = column._length or 1
            parts.append(column.values[start * step : stop * step])
            if steps is not None:
                steps[at + 1 : end + 1] = step
        else:
            offsets = column._offsets
            parts.append(column.values[offsets[start] : offsets[stop]])
            if steps is not None:
                np.subtract(offsets[start + 1 : stop + 1], offsets[start:stop], out=steps[at + 1 : end + 1])
        if shapes is not None and column.shapes is not None:
            shapes[at:end] = column.shapes[start:stop]
        at = end
    if valid is not None and valid.all():
        valid = None
    length = pieces[0][0]._length if pieces and not spec.varying else None
    if length is not None and any(column._length != length for column, _, _ in pieces):
        length = None
    return ColumnPlan(
        spec,
        parts,
        sum(map(len, parts)),
        total,
        None if steps is None or length else np.cumsum(steps, out=steps),
        valid,
        length=length,
        shapes=shapes,
        kind=_common_kind(pieces),
        nesting=_common_nesting(pieces),
    )


def _as_spec(column: Column, start: int, stop: int, spec: FieldSpec) -> Run:
    """The same rows as a column laid out as `spec` has it, on the same memory."""
    if column.spec.dtype == "none" and spec.dtype != "none":
        rows = stop - start
        values = np.zeros((rows if spec.scalar else 0, *spec.step), spec.stored)
        offsets = None if spec.scalar else np.zeros(rows + 1, np.int64)
        shapes = np.zeros((rows, 1 + len(spec.trailing)), np.int64) if spec.varying else None
        return Column(spec, values, offsets, np.zeros(rows, bool), shapes=shapes), 0, rows
    if spec.varying and not column.spec.varying:
        rows = stop - start
        part = column.slice(start, stop)
        lengths = np.diff(part.offsets)
        shapes = np.empty((rows, 1 + len(spec.trailing)), np.int64)
        shapes[:, 0] = lengths
        shapes[:, 1:] = part.spec.trailing
        offsets = part.offsets * math.prod(part.spec.trailing)
        flat = Column(spec, part.values.reshape(-1), offsets, part.valid, shapes=shapes)
        return flat, 0, rows
    return column, start, stop


def _gather_shared(pieces: Sequence[Run], spec: FieldSpec) -> ColumnPlan:
    """As `gather` where values are shared: a stored row is taken once however many rows refer to it."""
    taken: dict[tuple[int, int], int] = {}
    stored: list[tuple[Column, int]] = []
    index: list[int] = []
    bare = {id(column): column.without_index() for column, _, _ in pieces}
    for column, start, stop in pieces:
        rows = range(start, stop) if column.index is None else column.index[start:stop].tolist()
        for at in rows:
            key = (id(column), at)
            if at >= 0 and key not in taken:
                taken[key] = len(stored)
                stored.append((bare[id(column)], at))
            index.append(taken[key] if at >= 0 else -1)
    plan = gather(list(runs(stored)), spec)
    return replace(
        plan, index=np.asarray(index, np.int64), kind=_common_kind(pieces), nesting=_common_nesting(pieces)
    )


def lay_out(plan: ColumnPlan) -> Column:
    """The column a plan describes, in arrays of its own."""
    values = np.empty((plan.total, *plan.spec.step), plan.spec.stored)
    plan.fill(values)
    return Column(
        plan.spec,
        frozen(values),
        plan.offsets,
        plan.valid,
        plan.index,
        plan.length,
        shapes=plan.shapes,
        kind=plan.kind,
        nesting=plan.nesting,
    )
