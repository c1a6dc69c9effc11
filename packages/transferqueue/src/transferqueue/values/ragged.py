"""Plans of rows that are numbers: one each, ragged in their first dimension, or in several."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import SchemaMismatch
from .spec import ColumnPlan, FieldSpec, Kind


def plan_scalars(dtype: str, values: Any, rows: int, valid: np.ndarray | None, kind: Kind) -> ColumnPlan:
    """Rows without a dimension; `values` are those of the rows that have one, as one array."""
    if valid is not None:
        full = np.zeros(rows, values.dtype)
        full[valid] = values
        values = full
    return ColumnPlan(FieldSpec(dtype, (), True), [values], rows, rows, None, valid, kind=kind)


def plan_stacked(dtype: str, part: Any, shape: Sequence[int], kind: Kind) -> ColumnPlan:
    """Rows of one array or tensor of `shape`, ``[rows, ...]``."""
    rows, *row = shape
    if not row:
        return ColumnPlan(FieldSpec(dtype, (), True), [part], rows, rows, None, None, kind=kind)
    length, trailing = row[0], tuple(row[1:])
    spec = FieldSpec(dtype, trailing)
    # a length is only told of rows that have bytes, so that nobody can claim rows without end
    if length and (all(trailing) or not rows):
        return ColumnPlan(spec, [part], rows * length, rows, None, None, length=length, kind=kind)
    offsets = np.arange(rows + 1, dtype=np.int64) * length
    return ColumnPlan(spec, [part], rows * length, rows, offsets, None, kind=kind)


def plan_ragged(
    dtype: str,
    trailing: tuple[int, ...],
    parts: Sequence[Any],
    lengths: list[int],
    rows: int,
    valid: np.ndarray | None,
    kind: Kind,
) -> ColumnPlan:
    """Rows ``[length, *trailing]``; `parts` are the rows that are not None."""
    spec = FieldSpec(dtype, tuple(trailing))
    first = lengths[0]
    if first and valid is None and all(trailing) and lengths.count(first) == rows:
        return ColumnPlan(spec, parts, first * rows, rows, None, None, length=first, kind=kind)
    return ColumnPlan(spec, parts, sum(lengths), rows, offsets_of(lengths, valid), valid, kind=kind)


def plan_varying(
    dtype: str,
    shapes: Sequence[Sequence[int]],
    parts: Sequence[Any],
    rows: int,
    valid: np.ndarray | None,
    kind: Kind,
    *,
    trailing: tuple[int, ...] | None = None,
) -> ColumnPlan:
    """Rows of any shape of one rank.

    Args:
        dtype: of all rows.
        shapes: of the rows that are not None; two dimensions or more.
        parts: these rows, flat.
        rows: how many there are with those that are None.
        valid: which are not.
        kind: what the producer held.
        trailing: of the field's schema, -1 for a free dimension; None frees those in which the rows differ.
    """
    found = np.array(shapes, np.int64)
    if trailing is None:
        trailing = tuple(int(sizes[0]) if (sizes == sizes[0]).all() else -1 for sizes in found.T[1:])
    found = found.reshape(len(parts), 1 + len(trailing))
    offsets = offsets_of(list(map(len, parts)), valid)
    if valid is not None:
        full = np.zeros((rows, found.shape[1]), np.int64)
        full[valid] = found
        found = full
    return ColumnPlan(
        FieldSpec(dtype, trailing), parts, int(offsets[-1]), rows, offsets, valid, shapes=found, kind=kind
    )


def offsets_of(lengths: list[int], valid: np.ndarray | None) -> np.ndarray:
    """int64 ``[rows + 1]`` from the lengths of the rows that are not None."""
    if valid is None:
        return np.fromiter(accumulate(lengths, initial=0), np.int64, len(lengths) + 1)
    offsets = np.zeros(len(valid) + 1, np.int64)
    offsets[1:][valid] = lengths
    return np.cumsum(offsets, out=offsets)


def disagreement(name: str, rows: Sequence[tuple[str, Sequence[int]]]) -> SchemaMismatch:
    """The error for rows that do not agree on dtype and number of dimensions."""
    specs = [FieldSpec(dtype, tuple(shape[1:]), not shape) for dtype, shape in rows]
    got = next(
        spec
        for spec in specs
        if (spec.dtype, spec.scalar, len(spec.trailing))
        != (specs[0].dtype, specs[0].scalar, len(specs[0].trailing))
    )
    return SchemaMismatch(
        f"field {name!r} has rows of {got} beside rows of {specs[0]}; all rows need one dtype and number of "
        "dimensions",
        field=name,
        got=str(got),
        expected=str(specs[0]),
    )
