"""A column: the values of one field for a batch of samples, ragged by nature.

Readers get read-only numpy views of the bytes that arrived.
"""

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from ..errors import InvalidArgument
from .spec import FieldSpec, row_lengths


class Column:
    """The values of one field for a batch of samples.

    Attributes:
        spec: dtype and shape of a row.
    """

    __slots__ = ("_index", "_length", "_offsets", "_valid", "_values", "spec")

    def __init__(
        self,
        spec: FieldSpec,
        values: np.ndarray,
        offsets: np.ndarray | None,
        valid: np.ndarray | None = None,
        index: np.ndarray | None = None,
        length: int | None = None,
    ) -> None:
        self.spec = spec
        self._values = values
        self._offsets = offsets
        self._valid = valid
        self._index = index
        self._length = length

    @property
    def dtype(self) -> str:
        """The field's dtype by name, "bfloat16", "str", "bytes", "data" or "none"."""
        return self.spec.dtype

    @property
    def values(self) -> np.ndarray:
        """Read-only numpy array ``[total, *trailing]``: the rows end to end. bfloat16 shows as uint16 bits;
        text, bytes and data show as uint8.
        """
        return self._values

    @property
    def valid(self) -> np.ndarray | None:
        """bool ``[stored]``, False where the row is None, or None if every row has a value."""
        return self._valid

    @property
    def index(self) -> np.ndarray | None:
        """For values that samples share: int64 ``[rows]``, which stored row is row i (-1: None); `values`,
        `offsets` and `valid` then speak of stored rows. None for the ordinary column, where stored rows are
        the rows.
        """
        return self._index

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

    def _lengths(self, start: int, stop: int) -> np.ndarray:
        if self._index is not None:
            return row_lengths(np.diff(self.offsets), self._valid, self._index[start:stop])
        if self._offsets is not None:
            lengths = np.diff(self._offsets[start : stop + 1])
        else:
            lengths = np.full(stop - start, self._length or 1, np.int64)
        return row_lengths(lengths, None if self._valid is None else self._valid[start:stop], None)

    def slice(self, start: int, stop: int) -> "Column":
        """Rows ``start:stop`` (``0 <= start <= stop <= len``) as a column on the same memory; shared values
        stay shared.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}:{stop} of a column with {len(self)} rows")
        if start == 0 and stop == len(self):
            return self
        if self._index is not None:
            return Column(
                self.spec, self._values, self._offsets, self._valid, self._index[start:stop], self._length
            )
        valid = None if self._valid is None else self._valid[start:stop]
        if self._offsets is not None:
            offsets = self._offsets[start : stop + 1]
            first = int(offsets[0])
            values = self._values[first : int(offsets[-1])]
            return Column(self.spec, values, frozen(offsets - first) if first else offsets, valid)
        if self._length is None:
            return Column(self.spec, self._values[start:stop], None, valid)
        values = self._values[start * self._length : stop * self._length]
        return Column(self.spec, values, None, valid, None, self._length)

    def __len__(self) -> int:
        return self.stored if self._index is None else len(self._index)

    def __getitem__(self, row: int) -> Any:
        """Row `row`: an array view, a numpy scalar, str, bytes, plain data, or None."""
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
                return str(chunk.data, "utf-8")
            case "bytes":
                return chunk.tobytes()
            case "data":
                return msgspec.msgpack.decode(chunk.data)
            case _:
                return chunk

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
        whole, stored_valid = self.values, self.valid
        missing = index < 0
        if stored_valid is not None and self.stored:
            missing = missing | ~stored_valid[index]
        valid = ~missing if missing.any() else None
        if self.spec.scalar:
            values = np.zeros(len(self), whole.dtype)
            values[~missing] = whole[index[~missing]]
            return Column(self.spec, frozen(values), None, valid)
        stored_offsets = self.offsets
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        parts = [whole[stored_offsets[i] : stored_offsets[i + 1]] for i in index if i >= 0]
        values = np.concatenate(parts) if parts else whole[:0]
        return Column(self.spec, frozen(values), frozen(offsets), valid)

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
        return f"{type(self).__name__}({self.spec}, {len(self)} rows)"


def frozen(array: np.ndarray) -> np.ndarray:
    """The array, made read-only."""
    array.flags.writeable = False
    return array


def torch_if_loaded() -> Any:
    """The torch module if the program has imported it, else None: this package never imports it for
    itself.
    """
    return sys.modules.get("torch")
