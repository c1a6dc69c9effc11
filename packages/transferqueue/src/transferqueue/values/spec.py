"""What a field is (`FieldSpec`) and a column that is not laid out yet (`ColumnPlan`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np

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
        return stored_dtype(self.dtype)

    def __str__(self) -> str:
        if self.dtype in ("str", "bytes", "data", "none"):
            return self.dtype
        shape = "" if self.scalar else "[" + ", ".join(["*", *map(str, self.trailing)]) + "]"
        return f"{self.dtype}{shape}"


@lru_cache(maxsize=256)
def stored_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype in which values of the dtype called `name` are stored."""
    return np.dtype(STORED_AS.get(name, name))


def row_nbytes(spec: FieldSpec) -> int:
    """Bytes of one step of the first dimension."""
    count = spec.stored.itemsize
    for size in spec.trailing:
        count *= size
    return count


@dataclass(frozen=True)
class ColumnPlan:
    """A column as pieces: ``concatenate(parts)`` are its values.

    Attributes:
        spec: dtype and shape of a row.
        parts: arrays ``[k, *trailing]`` of the stored dtype; a part is only read once.
        total: length of the concatenation.
        stored: rows that have values of their own.
        offsets: int64 ``[stored + 1]``; None for scalars and where all rows are of one length.
        valid: bool ``[stored]``, False where the row is None; None if no row is.
        index: int64 ``[rows]``, the stored row of each row (-1: None); None if they are the same.
        length: the length (1 or more) of every stored row; None for scalars and where `offsets` tell.
    """

    spec: FieldSpec
    parts: Sequence[np.ndarray]
    total: int
    stored: int
    offsets: np.ndarray | None
    valid: np.ndarray | None
    index: np.ndarray | None
    length: int | None = None

    @property
    def rows(self) -> int:
        return self.stored if self.index is None else len(self.index)

    @property
    def values_nbytes(self) -> int:
        """Bytes of the values alone."""
        return row_nbytes(self.spec) * self.total

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 ``[rows]``: the ragged length of each row, 0 for None, 1 for a scalar."""
        if self.offsets is not None:
            lengths = np.diff(self.offsets)
        else:
            lengths = np.full(self.stored, self.length or 1, np.int64)
        return row_lengths(lengths, self.valid, self.index)

    def fill(self, out: np.ndarray) -> None:
        """Copies the parts into `out`, an array ``[total, *trailing]``."""
        if len(self.parts) == 1:
            out[...] = self.parts[0]
        elif self.parts:
            np.concatenate(self.parts, out=out)


def row_lengths(lengths: np.ndarray, valid: np.ndarray | None, index: np.ndarray | None) -> np.ndarray:
    """The lengths of rows from those of stored rows: 0 where the row is None."""
    if valid is not None:
        lengths = np.where(valid, lengths, 0)
    if index is None:
        return lengths
    if not len(lengths):
        return np.zeros(len(index), np.int64)
    return np.where(index < 0, 0, lengths[index])
