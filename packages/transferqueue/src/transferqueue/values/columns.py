"""A column: the values of one field for a batch of samples, ragged by nature.

`Column` is what readers get: read-only numpy views of the bytes that arrived. `ColumnPlan` is a column that
is not laid
out yet: the pieces, to be copied once to where they belong (a frame to send, or one array).
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from ..errors import InvalidArgument, SchemaMismatch

_WIDTHS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
NUMERIC = frozenset(["bool", *(f"{kind}{bits}" for kind, widths in _WIDTHS.items() for bits in widths)])
# Stored as something numpy has: bfloat16 by its 16 bits, text and data by their bytes.
STORED_AS = {"bfloat16": "uint16", "str": "uint8", "bytes": "uint8", "data": "uint8", "none": "uint8"}
DTYPES = NUMERIC | STORED_AS.keys()


class FieldSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the first write of a field fixes.

    Attributes:
        dtype: a numpy name, "bfloat16", "str", "bytes", "data" (msgpack of plain data), or "none" where every
            row was None so far, which fits any field.
        trailing: the shape of a row behind its first, ragged dimension.
        scalar: the row has no dimension at all.
    """

    dtype: str
    trailing: tuple[int, ...] = ()
    scalar: bool = False

    @property
    def stored(self) -> np.dtype[Any]:
        """The numpy dtype of the bytes."""
        return np.dtype(STORED_AS.get(self.dtype, self.dtype))

    def __str__(self) -> str:
        if self.dtype in ("str", "bytes", "data", "none"):
            return self.dtype
        shape = "" if self.scalar else "[" + ", ".join(["*", *map(str, self.trailing)]) + "]"
        return f"{self.dtype}{shape}"


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """A column as pieces: ``concatenate(parts)`` are its values.

    Attributes:
        spec: dtype and shape of a row.
        parts: arrays ``[k, *trailing]`` of the stored dtype; a part is only read once.
        total: length of the concatenation.
        stored: rows that have values of their own.
        offsets: int64 ``[stored + 1]``, None for scalars.
        valid: bool ``[stored]``, False where the row is None; None if no row is.
        index: int64 ``[rows]``, the stored row of each row (-1: None); None if they are the same.
    """

    spec: FieldSpec
    parts: Sequence[np.ndarray]
    total: int
    stored: int
    offsets: np.ndarray | None
    valid: np.ndarray | None
    index: np.ndarray | None

    @property
    def rows(self) -> int:
        return self.stored if self.index is None else len(self.index)

    @property
    def values_nbytes(self) -> int:
        """Bytes of the values alone."""
        return row_nbytes(self.spec) * self.total

    def fill(self, out: np.ndarray) -> None:
        """Copies the parts into `out`, an array ``[total, *trailing]``."""
        if len(self.parts) == 1:
            out[...] = self.parts[0]
        elif self.parts:
            np.concatenate(self.parts, out=out)


def row_nbytes(spec: FieldSpec) -> int:
    """Bytes of one step of the first dimension."""
    count = spec.stored.itemsize
    for size in spec.trailing:
        count *= size
    return count


class Column:
    """The values of one field for a batch of samples.

    Attributes:
        spec: dtype and shape of a row.
        values: read-only numpy array ``[total, *trailing]``: the rows end to end. bfloat16 shows as uint16
            bits; text, bytes and data show as uint8.
        valid: bool ``[stored]``, False where the row is None, or None if every row has a value.
        index: for values that samples share: int64 ``[rows]``, which stored row is row i (-1: None);
            `values`, `offsets` and `valid` then speak of stored rows. None for the ordinary column, where
            stored rows are the rows.
    """

    __slots__ = ("_offsets", "index", "spec", "valid", "values")

    def __init__(
        self,
        spec: FieldSpec,
        values: np.ndarray,
        offsets: np.ndarray | None,
        valid: np.ndarray | None = None,
        index: np.ndarray | None = None,
    ) -> None:
        self.spec = spec
        self.values = values
        self._offsets = offsets
        self.valid = valid
        self.index = index

    @property
    def dtype(self) -> str:
        """The field's dtype by name, "bfloat16", "str", "bytes", "data" or "none"."""
        return self.spec.dtype

    @property
    def stored(self) -> int:
        """Rows that have values of their own; fewer than ``len(column)`` where samples share values."""
        return len(self.values) if self._offsets is None else len(self._offsets) - 1

    @property
    def offsets(self) -> np.ndarray:
        """int64 ``[stored + 1]``: stored row i is ``values[offsets[i]:offsets[i + 1]]``."""
        if self._offsets is None:
            return np.arange(len(self.values) + 1, dtype=np.int64)
        return self._offsets

    @property
    def lengths(self) -> np.ndarray:
        """int64 ``[rows]``: the ragged length of each row, 0 for None, 1 for a scalar."""
        lengths = np.diff(self.offsets)
        if self.valid is not None:
            lengths = np.where(self.valid, lengths, 0)
        if self.index is None:
            return lengths
        return (
            np.where(self.index < 0, 0, lengths[self.index])
            if len(lengths)
            else np.zeros(len(self), np.int64)
        )

    def __len__(self) -> int:
        return self.stored if self.index is None else len(self.index)

    def __getitem__(self, row: int) -> Any:
        """Row `row`: an array view, a numpy scalar, str, bytes, plain data, or None."""
        count = len(self)
        at = int(row)
        if at < 0:
            at += count
        if not 0 <= at < count:
            raise IndexError(f"row {row} of a column with {count} rows")
        if self.index is not None:
            at = int(self.index[at])
        if at < 0 or (self.valid is not None and not self.valid[at]):
            return None
        if self._offsets is None:
            return self.values[at]
        chunk = self.values[self._offsets[at] : self._offsets[at + 1]]
        match self.spec.dtype:
            case "str":
                return str(chunk.data, "utf-8")
            case "bytes":
                return chunk.tobytes()
            case "data":
                return msgspec.msgpack.decode(chunk.data)
            case _:
                return chunk

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def tolist(self) -> list[Any]:
        """All rows as a list, each as `column[i]` gives it."""
        return list(self)

    def expand(self) -> "Column":
        """The same rows with shared values repeated, so that ``offsets`` is ``[rows + 1]``. Copies; no-op if
        not shared.
        """
        if self.index is None:
            return self
        lengths = self.lengths
        missing = self.index < 0
        if self.valid is not None and self.stored:
            missing = missing | ~self.valid[self.index]
        valid = ~missing if missing.any() else None
        if self._offsets is None:
            values = np.zeros(len(self), self.values.dtype)
            values[~missing] = self.values[self.index[~missing]]
            return Column(self.spec, _frozen(values), None, valid)
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        parts = [self.values[self._offsets[i] : self._offsets[i + 1]] for i in self.index if i >= 0]
        values = np.concatenate(parts) if parts else self.values[:0]
        return Column(self.spec, _frozen(values), _frozen(offsets), valid)

    def to_torch(self) -> Any:
        """The values as one torch tensor ``[total, *trailing]``: a private, writable copy; bfloat16 is
        torch.bfloat16.

        Rows are ``tensor.split(column.lengths.tolist())``, sequence boundaries ``column.offsets``. A None row
        adds nothing, a None scalar adds a 0. Values shared by samples are repeated.

        Raises:
            InvalidArgument: the column holds text, bytes or plain data.
        """
        if self.spec.dtype in ("str", "bytes", "data", "none"):
            raise InvalidArgument(
                f"a column of {self.spec.dtype} has no tensor; use its rows", dtype=self.spec.dtype
            )
        import torch

        tensor = torch.from_numpy(np.array(self.expand().values, copy=True, order="C"))
        return tensor.view(torch.bfloat16) if self.spec.dtype == "bfloat16" else tensor

    def __repr__(self) -> str:
        return f"Column({self.spec}, {len(self)} rows, {self.values.nbytes} bytes)"


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


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


def gather(pieces: Sequence[Run], spec: FieldSpec | None = None) -> ColumnPlan:
    """The rows of several columns of one field, one after the other, still shared where they were.

    Args:
        pieces: ``(column, start, stop)`` in the order wanted. Columns of spec "none" mix with any other.
        spec: of the result; None finds it in the columns.
    """
    if spec is None:
        spec = next(
            (column.spec for column, _, _ in pieces if column.spec.dtype != "none"), FieldSpec("none")
        )
    for column, _, _ in pieces:
        if column.spec != spec and column.spec.dtype != "none":
            raise SchemaMismatch(
                f"rows of {column.spec} and of {spec} cannot be joined; the field was updated with both",
                field="",
                got=str(column.spec),
                expected=str(spec),
            )
    if any(column.index is not None for column, _, _ in pieces):
        return _gather_shared(pieces, spec)
    parts: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    valid: np.ndarray | None = None
    total = sum(stop - start for _, start, stop in pieces)
    at = 0
    for column, start, stop in pieces:
        part, part_lengths, part_valid = _piece(column, start, stop, spec)
        parts.append(part)
        if part_lengths is not None:
            lengths.append(part_lengths)
        if part_valid is not None:
            valid = np.ones(total, bool) if valid is None else valid
            valid[at : at + stop - start] = part_valid
        at += stop - start
    if valid is not None and valid.all():
        valid = None
    return ColumnPlan(
        spec, parts, sum(map(len, parts)), total, _cumulative(spec, lengths, total), valid, None
    )


def _piece(
    column: Column, start: int, stop: int, spec: FieldSpec
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Values, lengths (None for scalars) and valid (None if all are) of some rows."""
    rows = stop - start
    if column.spec.dtype == "none" and spec.dtype != "none":
        values = np.zeros((rows if spec.scalar else 0, *spec.trailing), spec.stored)
        return values, None if spec.scalar else np.zeros(rows, np.int64), np.zeros(rows, bool)
    valid = None if column.valid is None else column.valid[start:stop]
    offsets = column._offsets
    if offsets is None:
        return column.values[start:stop], None, valid
    return column.values[offsets[start] : offsets[stop]], np.diff(offsets[start : stop + 1]), valid


def _gather_shared(pieces: Sequence[Run], spec: FieldSpec) -> ColumnPlan:
    """As `gather` where values are shared: a stored row is taken once however many rows refer to it."""
    taken: dict[tuple[int, int], int] = {}
    stored: list[tuple[Column, int]] = []
    index: list[int] = []
    for column, start, stop in pieces:
        bare = column
        if column.index is not None:
            bare = Column(column.spec, column.values, column._offsets, column.valid)
        for row in range(start, stop):
            at = row if column.index is None else int(column.index[row])
            if at >= 0 and (id(column), at) not in taken:
                taken[id(column), at] = len(stored)
                stored.append((bare, at))
            index.append(taken[id(column), at] if at >= 0 else -1)
    return replace(gather(list(runs(stored)), spec), index=np.asarray(index, np.int64))


def _cumulative(spec: FieldSpec, lengths: list[np.ndarray], stored: int) -> np.ndarray | None:
    if spec.scalar:
        return None
    offsets = np.zeros(stored + 1, np.int64)
    if lengths:
        np.cumsum(lengths[0] if len(lengths) == 1 else np.concatenate(lengths), out=offsets[1:])
    return offsets


def lay_out(plan: ColumnPlan) -> Column:
    """The column a plan describes, in arrays of its own."""
    values = np.empty((plan.total, *plan.spec.trailing), plan.spec.stored)
    plan.fill(values)
    return Column(plan.spec, _frozen(values), plan.offsets, plan.valid, plan.index)


def torch_if_loaded() -> Any:
    """The torch module if the program has imported it, else None: this package never imports it for
    itself.
    """
    return sys.modules.get("torch")
