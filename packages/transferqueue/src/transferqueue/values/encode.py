"""From what a user hands to `put` to column plans: arrays, tensors, lists of rows, text, bytes, plain data,
None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from ..errors import InvalidArgument, SchemaMismatch
from .column import torch_if_loaded
from .spec import NUMERIC, ColumnPlan, FieldSpec

Fields = Mapping[str, Any]
Shared = Mapping[str, tuple[Any, Sequence[int | None]]]


def plan_fields(fields: Fields, shared: Shared | None = None) -> tuple[int, dict[str, ColumnPlan]]:
    """One plan a field, and the number of rows.

    Args:
        fields: name -> rows. An array or tensor ``[rows, ...]``; or a sequence of one value a row: arrays
            ``[length, *trailing]``, numbers, str, bytes, None, and anything else msgspec can pack (lists,
            dicts). A mapping flattens to sub-columns ``name/key``.
        shared: name -> (stored rows, index): values that several rows have in common; ``index[i]`` is the
            stored row of row i, None or -1 for none.

    Raises:
        InvalidArgument: no fields, different numbers of rows, or a value that cannot be stored.
        SchemaMismatch: the rows of one field do not agree on dtype and trailing shape.
    """
    plans: dict[str, ColumnPlan] = {}
    for name, values in _flat(fields):
        _add(plans, name, plan_column(name, values))
    for name, (values, index) in (shared or {}).items():
        _add(plans, name, _plan_shared(name, values, index))
    if not plans:
        raise InvalidArgument("no fields given; pass at least one column")
    counts = {plan.rows for plan in plans.values()}
    if len(counts) > 1:
        shown = ", ".join(f"{name}: {plan.rows}" for name, plan in plans.items())
        raise InvalidArgument(
            f"the columns have different numbers of rows ({shown}); each needs one value a sample"
        )
    return counts.pop(), plans


def _add(plans: dict[str, ColumnPlan], name: str, plan: ColumnPlan) -> None:
    if name in plans:
        raise InvalidArgument(f"field {name!r} is given twice")
    plans[name] = plan


def _flat(fields: Fields, prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in fields.items():
        if not isinstance(key, str) or not key:
            raise InvalidArgument(f"a field name must be a non-empty str, got {key!r}")
        name = prefix + key
        flat.extend(_flat(value, name + "/") if isinstance(value, Mapping) else [(name, value)])
    return flat


def plan_column(name: str, values: Any) -> ColumnPlan:
    """The plan of one field; see `plan_fields` for what `values` may be."""
    array = _as_array(name, values)
    if array is not None:
        if array[1].ndim == 0:
            raise InvalidArgument(
                f"field {name!r} is one scalar; give one value a row: a sequence or an array [rows]"
            )
        return _plan_stacked(*array)
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(
        values, Sequence | np.ndarray
    ):
        raise InvalidArgument(
            f"field {name!r} is a {type(values).__name__}; give a sequence with one value a row, or an array "
            "[rows, ...]"
        )
    rows = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return _plan_rows(name, rows)


def _plan_stacked(dtype: str, array: np.ndarray) -> ColumnPlan:
    rows = array.shape[0]
    if array.ndim == 1:
        return ColumnPlan(FieldSpec(dtype, (), True), [array], rows, rows, None, None, None)
    length, trailing = array.shape[1], array.shape[2:]
    flat = array.reshape(rows * length, *trailing)
    offsets = None if length else np.zeros(rows + 1, np.int64)
    return ColumnPlan(
        FieldSpec(dtype, trailing), [flat], rows * length, rows, offsets, None, None, length or None
    )


def _plan_rows(name: str, rows: list[Any]) -> ColumnPlan:
    kinds = set(map(type, rows))
    valid = None
    present = rows
    if type(None) in kinds:
        kinds.discard(type(None))
        valid = np.fromiter((row is not None for row in rows), bool, len(rows))
        present = [row for row in rows if row is not None]
    if not kinds:
        mask = np.zeros(len(rows), bool) if rows else None
        return ColumnPlan(FieldSpec("none"), [], 0, len(rows), np.zeros(len(rows) + 1, np.int64), mask, None)
    if kinds <= {bool} or kinds <= {int, float} or kinds <= {complex}:
        return _plan_scalars(name, _numbers(name, present), len(rows), valid)
    if kinds == {str}:
        return _plan_bytes("str", [row.encode() for row in present], len(rows), valid)
    if kinds <= {bytes, bytearray, memoryview}:
        return _plan_bytes("bytes", [bytes(row) for row in present], len(rows), valid)
    arrays = [_as_array(name, row) for row in present]
    found = [array for array in arrays if array is not None]
    if len(found) == len(arrays):
        return _plan_arrays(name, found, len(rows), valid)
    if found:
        raise SchemaMismatch(
            f"field {name!r} mixes arrays with other rows ({', '.join(sorted(k.__name__ for k in kinds))})",
            field=name,
            got="mixed rows",
            expected="one kind of row",
        )
    try:
        packed = [msgspec.msgpack.encode(row) for row in present]
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(
            f"field {name!r} has a row that is neither array, number, text, bytes nor plain data: {error}"
        ) from error
    return _plan_bytes("data", packed, len(rows), valid)


def _numbers(name: str, rows: list[Any]) -> tuple[str, np.ndarray]:
    try:
        kind = (
            type(rows[0])
            if type(rows[0]) in (bool, complex)
            else float
            if float in map(type, rows)
            else np.int64
        )
        array = np.asarray(rows, kind)
    except OverflowError as error:
        raise InvalidArgument(f"field {name!r} has an int beyond 64 bits; store it as str") from error
    return array.dtype.name, array


def _plan_scalars(
    name: str, found: tuple[str, np.ndarray], rows: int, valid: np.ndarray | None
) -> ColumnPlan:
    dtype, values = found
    if valid is not None:
        full = np.zeros(rows, values.dtype)
        full[valid] = values
        values = full
    return ColumnPlan(FieldSpec(dtype, (), True), [values], rows, rows, None, valid, None)


def _plan_bytes(dtype: str, rows: list[bytes], count: int, valid: np.ndarray | None) -> ColumnPlan:
    values = np.frombuffer(b"".join(rows), np.uint8)
    return ColumnPlan(
        FieldSpec(dtype), [values], len(values), count, _offsets(list(map(len, rows)), valid), valid, None
    )


def _plan_arrays(
    name: str, arrays: list[tuple[str, np.ndarray]], rows: int, valid: np.ndarray | None
) -> ColumnPlan:
    dtype, first = arrays[0]
    for other, array in arrays:
        if other != dtype or array.ndim != first.ndim or array.shape[1:] != first.shape[1:]:
            expected, got = (
                FieldSpec(kind, a.shape[1:], a.ndim == 0) for kind, a in (arrays[0], (other, array))
            )
            raise SchemaMismatch(
                f"field {name!r} has rows of {got} beside rows of {expected}; all rows need one dtype and "
                "trailing shape",
                field=name,
                got=str(got),
                expected=str(expected),
            )
    values = [array for _, array in arrays]
    if first.ndim == 0:
        return _plan_scalars(name, (dtype, np.stack(values)), rows, valid)
    lengths = [len(array) for array in values]
    return ColumnPlan(
        FieldSpec(dtype, first.shape[1:]), values, sum(lengths), rows, _offsets(lengths, valid), valid, None
    )


def _offsets(lengths: list[int], valid: np.ndarray | None) -> np.ndarray:
    if valid is None:
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return offsets
    full = np.zeros(len(valid), np.int64)
    full[valid] = lengths
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(full)])


def _plan_shared(name: str, values: Any, index: Sequence[int | None]) -> ColumnPlan:
    plan = plan_column(name, values)
    rows = np.fromiter((-1 if at is None else int(at) for at in index), np.int64, len(index))
    if len(rows) and (rows.min() < -1 or rows.max() >= plan.rows):
        raise InvalidArgument(
            f"shared field {name!r} has an index outside its {plan.rows} stored rows; use None for no value"
        )
    return replace(plan, index=rows)


def _as_array(name: str, value: Any) -> tuple[str, np.ndarray] | None:
    """The dtype name and a numpy array of native byte order, or None if `value` is no numeric array."""
    torch = torch_if_loaded()
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            return "bfloat16", tensor.contiguous().view(torch.uint16).numpy()
        try:
            value = tensor.numpy()
        except TypeError as error:
            raise InvalidArgument(
                f"field {name!r}: {tensor.dtype} cannot be stored; convert it first"
            ) from error
    if not isinstance(value, np.ndarray | np.generic):
        return None
    array = np.asarray(value)
    dtype = _stored_dtype(array.dtype)
    if dtype is None:
        return None
    if dtype == "bfloat16":
        return dtype, array.view(np.uint16)
    if dtype not in NUMERIC:
        raise InvalidArgument(f"field {name!r} has dtype {dtype}; supported: {', '.join(sorted(NUMERIC))}")
    return dtype, array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@lru_cache(maxsize=256)
def _stored_dtype(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype, None for those that hold text or objects (numpy takes microseconds to tell)."""
    return None if dtype.kind in "OUS" else dtype.name  # "bfloat16" where ml_dtypes has registered it
