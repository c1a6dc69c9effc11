"""What a field is (`FieldSpec`), how a producer gave it (`Kind`, `Nesting`), and a column that is not laid
out yet (`ColumnPlan`).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .copying import copy_parts

_WIDTHS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
NUMERIC = frozenset(["bool", *(f"{kind}{bits}" for kind, widths in _WIDTHS.items() for bits in widths)])
# Numbers that numpy has no dtype of its own for, stored by their bits.
_FLOAT8 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
BITS = {"bfloat16": "uint16", **{f"float8_{form}": "uint8" for form in _FLOAT8}}
BYTES = ("str", "bytes", "data", "none")
STORED_AS = BITS | dict.fromkeys(BYTES, "uint8")
DTYPES = NUMERIC | STORED_AS.keys()


class FieldSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the first write of a field fixes.

    Attributes:
        dtype: a numpy name, "bfloat16", "float8_...", "str", "bytes", "data" (msgpack of plain data), or
            "none" where every row was None so far, which fits any field.
        trailing: the shape of a row behind its first, ragged dimension; -1 for a dimension that is as ragged
            as the first.
        scalar: the row has no dimension at all.
    """

    dtype: str
    trailing: tuple[int, ...] = ()
    scalar: bool = False

    @property
    def stored(self) -> np.dtype[Any]:
        """The numpy dtype of the bytes."""
        return stored_dtype(self.dtype)

    @property
    def varying(self) -> bool:
        """Whether rows differ in more than their first dimension. Such rows are stored flat, and their shapes
        beside them.
        """
        return -1 in self.trailing

    @property
    def step(self) -> tuple[int, ...]:
        """The values' shape behind their first dimension: `trailing`, or nothing where rows lie flat."""
        return () if -1 in self.trailing else self.trailing

    def accepts(self, other: "FieldSpec") -> bool:
        """Whether rows of `other` may be written to a field of this spec."""
        if other == self or other.dtype == "none":
            return True
        return (
            other.dtype == self.dtype
            and not self.scalar
            and not other.scalar
            and len(other.trailing) == len(self.trailing)
            and all(mine in (-1, theirs) for mine, theirs in zip(self.trailing, other.trailing, strict=True))
        )

    def __str__(self) -> str:
        if self.dtype in BYTES:
            return self.dtype
        dims = ["*", *("*" if size < 0 else str(size) for size in self.trailing)]
        return self.dtype if self.scalar else f"{self.dtype}[{', '.join(dims)}]"


@lru_cache(maxsize=256)
def stored_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype in which values of the dtype called `name` are stored."""
    return np.dtype(STORED_AS.get(name, name))


class Storage(NamedTuple):
    """How a spec's rows are stored; what is asked of every column of every frame, worked out once a spec."""

    dtype: np.dtype[Any]
    step: tuple[int, ...]  # the values' shape behind their first dimension
    nbytes: int  # of one step of the first dimension
    dims: int  # numbers in the shape of a row where that varies, else 0


@lru_cache(maxsize=4096)
def storage(spec: FieldSpec) -> Storage:
    """How rows of `spec` are stored."""
    dtype, step = spec.stored, spec.step
    return Storage(
        dtype, step, dtype.itemsize * math.prod(step), 1 + len(spec.trailing) if spec.varying else 0
    )


CONTAINERS = frozenset(["array", "tensor", "nested", "list", "tuple", "objects", "constant"])
ITEMS = frozenset(["array", "tensor", "scalar", "python", "bytearray"])


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """What the producer held, so that a reader can have the same. No part of a field's schema.

    Attributes:
        container: "array" (numpy ``[rows, ...]``), "tensor" (torch ``[rows, ...]``), "nested" (a torch nested
            tensor of jagged layout), "list", "tuple", "objects" (a numpy array of objects), "constant" (one
            value for all rows, as tensordict has it).
        item: what a row is where the container does not say: "array", "tensor", "scalar" (numpy), "python"
            (int, str, bytes, dict ...), "bytearray".
        ragged: the ragged dimension of a nested tensor.
        width: bytes of an item of a numpy array of fixed-width text or bytes; 0 where the width is free.
    """

    container: str = "list"
    item: str = "array"
    ragged: int = 1
    width: int = 0


class Nesting(msgspec.Struct, frozen=True, array_like=True):
    """Where in the producer's mapping of mappings a field was.

    Attributes:
        splits: positions in the field's name of the "/" that stand between a mapping's name and its key.
        levels: one number for each mapping on the way, outermost first: 0 for a dict, else a tensordict's
            number of batch dimensions.
    """

    splits: tuple[int, ...] = ()
    levels: tuple[int, ...] = (0,)


FLAT = Nesting()


class ColumnPlan(msgspec.Struct, frozen=True):
    """A column as pieces: ``concatenate(parts)`` are its values.

    Attributes:
        spec: dtype and shape of a row.
        parts: numpy arrays or torch tensors ``[k, *spec.step]``; a single one may have any shape with as many
            elements. Each is only read once.
        total: length of the concatenation.
        stored: rows that have values of their own.
        offsets: int64 ``[stored + 1]``; None for scalars and where all rows are of one length.
        valid: bool ``[stored]``, False where the row is None; None if no row is.
        index: int64 ``[rows]``, the stored row of each row (-1: None); None if they are the same.
        length: the length (1 or more) of every stored row; None for scalars and where `offsets` tell.
        shapes: int64 ``[stored, 1 + len(trailing)]`` where ``spec.varying``, else None.
        kind: what the producer held.
        nesting: where in nested mappings it was.
    """

    spec: FieldSpec
    parts: Sequence[Any]
    total: int
    stored: int
    offsets: np.ndarray | None
    valid: np.ndarray | None
    index: np.ndarray | None = None
    length: int | None = None
    shapes: np.ndarray | None = None
    kind: Kind = Kind()
    nesting: Nesting = FLAT

    @property
    def rows(self) -> int:
        return self.stored if self.index is None else len(self.index)

    @property
    def lengths(self) -> np.ndarray:
        """int64 ``[rows]``: the ragged length of each row, 0 for None, 1 for a scalar."""
        return row_lengths(
            stored_lengths(self.offsets, self.length, self.shapes, 0, self.stored), self.valid, self.index
        )

    def fill(self, out: np.ndarray) -> None:
        """Copies the parts into `out`, an array ``[total, *spec.step]``."""
        copy_parts(self.parts, out)


def stored_lengths(
    offsets: np.ndarray | None, length: int | None, shapes: np.ndarray | None, start: int, stop: int
) -> np.ndarray:
    """int64 ``[stop - start]``: the lengths of some stored rows."""
    if shapes is not None:
        return shapes[start:stop, 0]
    if offsets is not None:
        return offsets[start + 1 : stop + 1] - offsets[start:stop]
    return np.full(stop - start, length or 1, np.int64)


def row_lengths(lengths: np.ndarray, valid: np.ndarray | None, index: np.ndarray | None) -> np.ndarray:
    """The lengths of rows from those of stored rows: 0 where the row is None."""
    if valid is not None:
        lengths = np.where(valid, lengths, 0)
    if index is None:
        return lengths
    if not len(lengths):
        return np.zeros(len(index), np.int64)
    return np.where(index < 0, 0, lengths[index])
