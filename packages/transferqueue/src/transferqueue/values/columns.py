"""Rows of several columns as one: `runs` of rows, `gather` into a plan, `assemble` into a column without a
copy.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import InvalidArgument, SchemaMismatch
from .column import Column, frozen
from .spec import ColumnPlan, FieldSpec

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
    if len(pieces) == 1:
        column, start, stop = pieces[0]
        return column.slice(start, stop)
    return _Joined(_common_spec(pieces), [run for run in _flattened(pieces) if run[1] < run[2]])


class _Joined(Column):
    """Rows where they lie; laid out on first use of the arrays.

    Two threads may lay out at once: both get equal columns and the last one stays.
    """

    __slots__ = ("_pieces", "_rows", "_starts", "_whole")

    def __init__(self, spec: FieldSpec, pieces: Sequence[Run]) -> None:
        self.spec = spec
        self._pieces = pieces
        ends = list(accumulate((stop - start for _, start, stop in pieces), initial=0))
        self._rows = ends.pop()
        self._starts = ends
        self._whole: Column | None = None

    def _laid_out(self) -> Column:
        if self._whole is None:
            self._whole = lay_out(gather(self._pieces, self.spec))
        return self._whole

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
    if spec is None:
        specs = (column.spec for column, _, _ in pieces if column.spec.dtype != "none")
        spec = next(specs, FieldSpec("none"))
    for column, _, _ in pieces:
        if column.spec != spec and column.spec.dtype != "none":
            raise SchemaMismatch(
                f"rows of {column.spec} and of {spec} cannot be joined; the field was updated with both",
                field="",
                got=str(column.spec),
                expected=str(spec),
            )
    return spec


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
    parts: list[np.ndarray] = []
    valid: np.ndarray | None = None
    total = sum(stop - start for _, start, stop in pieces)
    at = 0
    for column, start, stop in pieces:
        part, part_valid = _piece(column, start, stop, spec)
        parts.append(part)
        if part_valid is not None:
            valid = np.ones(total, bool) if valid is None else valid
            valid[at : at + stop - start] = part_valid
        at += stop - start
    if valid is not None and valid.all():
        valid = None
    length = None if spec.scalar or not pieces else pieces[0][0]._length
    if length and all(column._length == length for column, _, _ in pieces):
        return ColumnPlan(spec, parts, total * length, total, None, valid, None, length)
    offsets = None
    if not spec.scalar:
        offsets = np.zeros(total + 1, np.int64)
        at = 0
        for column, start, stop in pieces:  # the stored lengths: a None row may have had a value
            if column.dtype != "none":
                np.subtract(
                    column.offsets[start + 1 : stop + 1],
                    column.offsets[start:stop],
                    out=offsets[at + 1 : at + 1 + stop - start],
                )
            at += stop - start
        np.cumsum(offsets, out=offsets)
    return ColumnPlan(spec, parts, sum(map(len, parts)), total, offsets, valid, None)


def _piece(column: Column, start: int, stop: int, spec: FieldSpec) -> tuple[np.ndarray, np.ndarray | None]:
    """Values and valid (None if all are) of some rows."""
    rows = stop - start
    if column.spec.dtype == "none" and spec.dtype != "none":
        values = np.zeros((rows if spec.scalar else 0, *spec.trailing), spec.stored)
        return values, np.zeros(rows, bool)
    valid = None if column.valid is None else column.valid[start:stop]
    if spec.scalar:
        return column.values[start:stop], valid
    if column._length is not None:
        return column.values[start * column._length : stop * column._length], valid
    offsets = column.offsets
    return column.values[offsets[start] : offsets[stop]], valid


def _gather_shared(pieces: Sequence[Run], spec: FieldSpec) -> ColumnPlan:
    """As `gather` where values are shared: a stored row is taken once however many rows refer to it."""
    taken: dict[tuple[int, int], int] = {}
    stored: list[tuple[Column, int]] = []
    index: list[int] = []
    bares: dict[int, Column] = {}
    for column, start, stop in pieces:
        bare = bares.get(id(column))
        if bare is None:
            bare = column
            if column.index is not None:
                bare = Column(column.spec, column.values, column._offsets, column.valid, None, column._length)
            bares[id(column)] = bare
        for row in range(start, stop):
            at = row if column.index is None else int(column.index[row])
            if at >= 0 and (id(column), at) not in taken:
                taken[id(column), at] = len(stored)
                stored.append((bare, at))
            index.append(taken[id(column), at] if at >= 0 else -1)
    return replace(gather(list(runs(stored)), spec), index=np.asarray(index, np.int64))


def lay_out(plan: ColumnPlan) -> Column:
    """The column a plan describes, in arrays of its own."""
    values = np.empty((plan.total, *plan.spec.trailing), plan.spec.stored)
    plan.fill(values)
    return Column(plan.spec, frozen(values), plan.offsets, plan.valid, plan.index, plan.length)
