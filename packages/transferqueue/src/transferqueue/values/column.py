"""A column: the values of one field for a batch of samples, ragged by nature.

Readers get read-only numpy views of the bytes that arrived.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import Corrupt, InvalidArgument
from . import restoring
from .copying import tensor_on
from .plain import unpack
from .spec import BYTES, FLAT, FieldSpec, Kind, Nesting, row_lengths, stored_lengths


class Column:
    """The values of one field for a batch of samples.

    Attributes:
        spec: dtype and shape of a row.
    """

    __slots__ = (
        "_index",
        "_kind",
        "_length",
        "_nesting",
        "_offsets",
        "_shapes",
        "_valid",
        "_values",
        "spec",
    )

    def __init__(
        self,
        spec: FieldSpec,
        values: np.ndarray,
        offsets: np.ndarray | None,
        valid: np.ndarray | None = None,
        index: np.ndarray | None = None,
        length: int | None = None,
        *,
        shapes: np.ndarray | None = None,
        kind: Kind | None = None,
        nesting: Nesting = FLAT,
    ) -> None:
        self.spec = spec
        self._values = values
        self._offsets = offsets
        self._valid = valid
        self._index = index
        self._length = length
        self._shapes = shapes
        self._kind = kind or Kind()
        self._nesting = nesting

    @property
    def dtype(self) -> str:
        """The field's dtype by name, "bfloat16", "float8_...", "str", "bytes", "data" or "none"."""
        return self.spec.dtype

    @property
    def kind(self) -> Kind:
        """What the producer held; see `restore`."""
        return self._kind

    @property
    def nesting(self) -> Nesting:
        """Where in nested mappings the producer had the field."""
        return self._nesting

    @property
    def values(self) -> np.ndarray:
        """Read-only numpy array ``[total, *trailing]``: the rows end to end. bfloat16 shows as uint16 bits,
        float8 as uint8; text, bytes and data show as uint8; rows that differ in several dimensions lie flat.
        """
        return self._values

    @property
    def valid(self) -> np.ndarray | None:
        """bool ``[stored]``, False where the row is None, or None if every row has a value."""
        return self._valid

    @property
    def index(self) -> np.ndarray | None:
        """For values that samples share: int64 ``[rows]``, which stored row is row i (-1: None); `values`,
        `offsets`, `shapes` and `valid` then speak of stored rows. None for the ordinary column, where stored
        rows are the rows.
        """
        return self._index

    @property
    def shapes(self) -> np.ndarray | None:
        """int64 ``[stored, dimensions]``, the shape of each row where ``spec.varying``; else None."""
        return self._shapes

    @property
    def stored(self) -> int:
        """Rows that have values of their own; fewer than ``len(column)`` where samples share values."""
        if self._offsets is not None:
            return len(self._offsets) - 1
        return len(self._values) // (self._length or 1)

    @property
    def offsets(self) -> np.ndarray:
        """int64 ``[stored + 1]``: stored row i is ``values[offsets[i]:offsets[i + 1]]``."""
        if self._offsets is None:
            return np.arange(self.stored + 1, dtype=np.int64) * (self._length or 1)
        return self._offsets

    @property
    def lengths(self) -> np.ndarray:
        """int64 ``[rows]``: the ragged length of each row, 0 for None, 1 for a scalar."""
        return self._lengths(0, len(self))

    @property
    def row_shape(self) -> tuple[int, ...] | None:
        """The shape that all rows have; None if they differ or one of them is None, or is no array."""
        spec = self.spec
        if spec.dtype in BYTES or (self._valid is not None and not self._valid.all()):
            return None
        if self._index is not None and (self._index < 0).any():
            return None
        if spec.scalar:
            return ()
        if self._length is not None:
            return (self._length, *spec.trailing)
        shapes = self._shapes
        if shapes is not None:
            if not len(shapes):
                return (0, *(max(size, 0) for size in spec.trailing))
            return tuple(shapes[0].tolist()) if (shapes == shapes[0]).all() else None
        lengths = np.diff(self.offsets)
        if not len(lengths):
            return (0, *spec.trailing)
        return (int(lengths[0]), *spec.trailing) if (lengths == lengths[0]).all() else None

    def _lengths(self, start: int, stop: int) -> np.ndarray:
        if self._index is not None:
            stored = stored_lengths(self._offsets, self._length, self._shapes, 0, self.stored)
            return row_lengths(stored, self._valid, self._index[start:stop])
        lengths = stored_lengths(self._offsets, self._length, self._shapes, start, stop)
        return row_lengths(lengths, None if self._valid is None else self._valid[start:stop], None)

    def pieces(self) -> list["Column"]:
        """Columns whose arrays exist already, which make up this one when put end to end."""
        return [self]

    def slice(self, start: int, stop: int) -> "Column":
        """Rows ``start:stop`` (``0 <= start <= stop <= len``) as a column on the same memory; shared values
        stay shared.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}:{stop} of a column with {len(self)} rows")
        if start == 0 and stop == len(self):
            return self
        values, offsets, valid, index, shapes = (
            self._values,
            self._offsets,
            self._valid,
            self._index,
            self._shapes,
        )
        if index is not None:
            index = index[start:stop]
        else:
            valid = None if valid is None else valid[start:stop]
            shapes = None if shapes is None else shapes[start:stop]
            if offsets is None:
                step = self._length or 1
                values = values[start * step : stop * step]
            else:
                offsets = offsets[start : stop + 1]
                first = int(offsets[0])
                values = values[first : int(offsets[-1])]
                offsets = frozen(offsets - first) if first else offsets
        return self._with(values, offsets, valid, index, self._length, shapes)

    def _with(
        self,
        values: np.ndarray,
        offsets: np.ndarray | None,
        valid: np.ndarray | None,
        index: np.ndarray | None,
        length: int | None,
        shapes: np.ndarray | None,
    ) -> "Column":
        return Column(
            self.spec,
            values,
            offsets,
            valid,
            index,
            length,
            shapes=shapes,
            kind=self.kind,
            nesting=self.nesting,
        )

    def without_index(self) -> "Column":
        """The stored rows as a column of their own."""
        if self._index is None:
            return self
        return self._with(self._values, self._offsets, self._valid, None, self._length, self._shapes)

    def __len__(self) -> int:
        return self.stored if self._index is None else len(self._index)

    def __getitem__(self, row: int) -> Any:
        """Row `row`: an array view, a numpy scalar, str, bytes, plain data, or None.

        Raises:
            IndexError: there is no such row.
            Corrupt: the bytes are not the text or plain data they are said to be.
        """
        count = len(self)
        at = int(row)
        if at < 0:
            at += count
        if not 0 <= at < count:
            raise IndexError(f"row {row} of a column with {count} rows")
        return self._row(at)

    def _row(self, at: int) -> Any:
        if self._index is not None:
            at = int(self._index[at])
        if at < 0 or (self._valid is not None and not self._valid[at]):
            return None
        if self._offsets is not None:
            chunk = self._values[self._offsets[at] : self._offsets[at + 1]]
        elif self._length is not None:
            chunk = self._values[at * self._length : (at + 1) * self._length]
        else:
            return self._values[at]
        match self.spec.dtype:
            case "str":
                try:
                    return str(chunk.data, "utf-8", "surrogatepass")
                except UnicodeDecodeError as error:
                    raise Corrupt(f"row {at} of a column of text is no UTF-8: {error}") from error
            case "bytes":
                return chunk.tobytes()
            case "data":
                return unpack(chunk.data)
            case _:
                return chunk if self._shapes is None else chunk.reshape(self._shapes[at])

    def __iter__(self) -> Iterator[Any]:
        return (self._row(row) for row in range(len(self)))

    def tolist(self) -> list[Any]:
        """All rows as a list, each as `column[i]` gives it."""
        return list(self)

    def expand(self) -> "Column":
        """The same rows with shared values repeated, so that ``offsets`` is ``[rows + 1]``. Copies; no-op if
        not shared.
        """
        index = self.index
        if index is None:
            return self
        whole, stored_valid, shapes = self.values, self.valid, self.shapes
        missing = index < 0
        if stored_valid is not None and self.stored:
            missing = missing | ~stored_valid[index]
        valid = ~missing if missing.any() else None
        if self.spec.scalar:
            values = np.zeros(len(self), whole.dtype)
            values[~missing] = whole[index[~missing]]
            return self._with(frozen(values), None, valid, None, None, None)
        starts = self.offsets
        lengths = np.zeros(len(self), np.int64)
        if self.stored:
            lengths = np.where(missing, 0, np.diff(starts)[index])
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        parts = [whole[starts[i] : starts[i + 1]] for i in index[~missing]]
        values = np.concatenate(parts) if parts else whole[:0]
        if shapes is not None:
            full = np.zeros((len(self), shapes.shape[1]), np.int64)
            full[~missing] = shapes[index[~missing]]
            shapes = frozen(full)
        return self._with(frozen(values), frozen(offsets), valid, None, None, shapes)

    def restore(self, *, copy: bool | None = None) -> Any:
        """The rows as the producer held them: a stacked numpy array or torch tensor ``[rows, ...]``, a nested
        tensor of jagged layout, or a list, tuple or object array of rows, each an array, a tensor, a number,
        str, bytes, plain data or None.

        Rows of several puts that held the same kind of thing are that kind again. Stacked rows stay stacked
        while they have one shape; tensors that differ in their first dimension become a nested tensor,
        anything else a list. Tensors come back on the CPU and without history.

        Args:
            copy: True makes everything the reader's own; False copies nothing that can be viewed. With None
                arrays are read-only views and tensors are copies, since torch knows no read-only tensor: a
                write to one that lies on a read-only mapping ends the process.

        Raises:
            InvalidArgument: torch is needed and missing, or ml_dtypes for numpy arrays of bfloat16 or float8.
        """
        return restoring.restore_column(self, copy)

    def to_torch(self, *, copy: bool = True) -> Any:
        """The values as one torch tensor ``[total, *trailing]`` of the field's dtype.

        Rows are ``tensor.split(column.lengths.tolist())``, sequence boundaries ``column.offsets``. A None row
        adds nothing, a None scalar adds a 0. Values shared by samples are repeated.

        Args:
            copy: True gives a private, writable tensor. False gives one on the column's own memory, to be
                read only: a write to it ends the process where that memory is a read-only mapping.

        Raises:
            InvalidArgument: the column holds text, bytes or plain data, or torch is not installed.
        """
        if self.spec.dtype in BYTES:
            raise InvalidArgument(
                f"a column of {self.spec.dtype} has no tensor; use its rows", dtype=self.spec.dtype
            )
        return tensor_on(self._array(copy), self.spec.dtype)

    def _array(self, copy: bool) -> np.ndarray:
        """The values with shared ones repeated, and the reader's own if `copy`."""
        if self.index is not None:
            return self.expand().values if not copy else np.array(self.expand().values)
        return np.array(self.values, order="C") if copy else self.values

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec}, {len(self)} rows)"


def frozen(array: np.ndarray) -> np.ndarray:
    """The array, made read-only."""
    array.flags.writeable = False
    return array
