"""From what a user hands to `put` to column plans: arrays, tensors, lists of rows, text, bytes, plain data,
None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec.structs import replace

from ..errors import InvalidArgument, SchemaMismatch
from . import tensors
from .copying import tensor_on, torch_if_loaded
from .plain import pack_all
from .ragged import disagreement, offsets_of, plan_ragged, plan_scalars, plan_stacked, plan_varying
from .spec import BITS, NUMERIC, ColumnPlan, FieldSpec, Kind, Nesting

Fields = Mapping[str, Any]
Shared = Mapping[str, tuple[Any, Sequence[int | None]]]

_dtype, _ndim, _shape = attrgetter("dtype"), attrgetter("ndim"), attrgetter("shape")


@dataclass(frozen=True, slots=True)
class Varying:
    """Rows whose every dimension may differ from put to put, as images: ``put({"image": Varying(rows)})``.

    Without it the first put of a field fixes the trailing shape of its rows, unless they differ among
    themselves; a dimension in which they do stays free.

    Attributes:
        rows: arrays or tensors of one dtype and number of dimensions, 1 or more.
    """

    rows: Any


def plan_fields(fields: Fields, shared: Shared | None = None) -> tuple[int, dict[str, ColumnPlan]]:
    """One plan a field, and the number of rows.

    Args:
        fields: name -> rows. An array or tensor ``[rows, ...]``, a torch nested tensor; or a sequence of one
            value a row: arrays ``[length, *trailing]``, numbers, str, bytes, None, and anything else msgspec
            can pack (lists, dicts, with arrays in them or not). A mapping flattens to sub-columns
            ``name/key``; a tensordict is a mapping.
        shared: name -> (stored rows, index): values that several rows have in common; ``index[i]`` is the
            stored row of row i, None or -1 for none.

    Raises:
        InvalidArgument: no fields, different numbers of rows, or a value that cannot be stored.
        SchemaMismatch: the rows of one field do not agree on dtype and number of dimensions.
    """
    plans: dict[str, ColumnPlan] = {}
    _flatten(fields, "", (), (), plans)
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


def _flatten(
    fields: Fields, prefix: str, splits: tuple[int, ...], outer: tuple[int, ...], plans: dict[str, ColumnPlan]
) -> None:
    is_tensordict = tensors.is_tensordict(fields)
    levels = (*outer, len(fields.batch_size) if is_tensordict else 0)  # type: ignore[attr-defined]
    nesting = Nesting(splits, levels)
    for key, value in tensors.tensordict_items(fields) if is_tensordict else fields.items():
        if not isinstance(key, str) or not key:
            raise InvalidArgument(f"a field name must be a non-empty str, got {key!r}")
        name = prefix + key
        if type(value) not in _NO_MAPPINGS and isinstance(value, Mapping):
            _flatten(value, name + "/", (*splits, len(name)), levels, plans)
            continue
        plan = plan_column(name, value)
        if levels != (0,):
            plan = replace(plan, nesting=nesting)
        _add(plans, name, plan)


_NO_MAPPINGS = frozenset([list, tuple, np.ndarray])  # telling by an abstract class takes long


def plan_column(name: str, values: Any) -> ColumnPlan:
    """The plan of one field; see `plan_fields` for what `values` may be."""
    if type(values) is list:
        return _plan_rows(name, values)
    if isinstance(values, np.ndarray):
        return _plan_array(name, values)
    torch = torch_if_loaded()
    if torch is not None and isinstance(values, torch.Tensor):
        return tensors.plan_tensor(name, values)
    if isinstance(values, Varying):
        return _plan_varying(name, values.rows)
    if isinstance(values, tensors.Constant):
        return replace(_plan_rows(name, values.rows()), kind=Kind("constant", "python"))
    if isinstance(values, np.generic):
        raise InvalidArgument(
            f"field {name!r} is one scalar; give one value a row: a sequence or an array [rows]"
        )
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(values, Sequence):
        raise InvalidArgument(
            f"field {name!r} is a {type(values).__name__}; give a sequence with one value a row, or an array "
            "[rows, ...]"
        )
    plan = _plan_rows(name, values)
    return replace(plan, kind=Kind("tuple", plan.kind.item)) if isinstance(values, tuple) else plan


def _plan_array(name: str, values: np.ndarray) -> ColumnPlan:
    if values.ndim == 0:
        raise InvalidArgument(
            f"field {name!r} is one scalar; give one value a row: a sequence or an array [rows]"
        )
    if values.dtype.kind in "OUST":
        if values.ndim > 1:
            raise InvalidArgument(
                f"field {name!r} is an array of {values.dtype} with {values.ndim} dimensions; only numbers "
                "may have more than one, give a list of lists"
            )
        plan = _plan_rows(name, values.tolist())
        if values.dtype.kind == "O":
            return replace(plan, kind=Kind("objects", plan.kind.item))
        spec = FieldSpec("bytes" if values.dtype.kind == "S" else "str")  # without rows there is no telling
        width = 0 if values.dtype.kind == "T" else values.dtype.itemsize
        return replace(plan, spec=spec, kind=Kind("array", "python", width=width))
    dtype, array = _stored(name, values)
    return plan_stacked(dtype, array, array.shape, _ARRAYS)


_ARRAYS, _LIST_OF_ARRAYS = Kind("array", "array"), Kind("list", "array")
_LIST_OF_PYTHON, _LIST_OF_SCALARS = Kind("list", "python"), Kind("list", "scalar")


def _plan_rows(name: str, rows: Sequence[Any]) -> ColumnPlan:
    kinds = set(map(type, rows))
    count = len(rows)
    valid = None
    present = rows
    if type(None) in kinds:
        kinds.discard(type(None))
        valid = np.fromiter((row is not None for row in rows), bool, count)
        present = [row for row in rows if row is not None]
    if not kinds:
        mask = np.zeros(count, bool) if rows else None
        return ColumnPlan(
            FieldSpec("none"), [], 0, count, np.zeros(count + 1, np.int64), mask, kind=_LIST_OF_PYTHON
        )
    if kinds == _NDARRAY:
        return _plan_arrays(name, present, count, valid)
    if kinds <= _BOOL or kinds <= _COMPLEX or (kinds <= _REAL and kinds != _FLOAT64):
        return plan_scalars(*_numbers(name, kinds, present), count, valid, _LIST_OF_PYTHON)
    if kinds == _STR or all([issubclass(kind, str) for kind in kinds]):
        return _plan_bytes("str", _utf8(present), count, valid, "python")
    if kinds <= _BYTES:
        item = "bytearray" if kinds == {bytearray} else "python"
        return _plan_bytes("bytes", list(map(bytes, present)), count, valid, item)
    torch = torch_if_loaded()
    if torch is not None and any([issubclass(kind, torch.Tensor) for kind in kinds]):
        if all([issubclass(kind, torch.Tensor) for kind in kinds]):
            return tensors.plan_tensors(name, present, count, valid)
        if all(issubclass(kind, np.ndarray | np.generic | torch.Tensor) for kind in kinds):
            present = [row if isinstance(row, torch.Tensor) else _as_tensor(name, row) for row in present]
            return tensors.plan_tensors(name, present, count, valid)
    if all(issubclass(kind, np.ndarray | np.generic) for kind in kinds):
        if all(issubclass(kind, np.generic) for kind in kinds):
            present = [np.asarray(row) for row in present]
            return replace(_plan_arrays(name, present, count, valid), kind=_LIST_OF_SCALARS)
        for row in present:
            _refuse_masked(name, row)
        return _plan_arrays(name, [np.asarray(row) for row in present], count, valid)
    if any(_is_array(kind) for kind in kinds):
        raise SchemaMismatch(
            f"field {name!r} mixes arrays with other rows ({', '.join(sorted(k.__name__ for k in kinds))})",
            field=name,
            got="mixed rows",
            expected="one kind of row",
        )
    return _plan_bytes("data", pack_all(name, list(present)), count, valid, "python")


_NDARRAY = {np.ndarray}
_FLOATS, _FLOAT64 = {float, np.float64}, {np.float64}  # which is a float too
_STR, _BOOL, _REAL, _COMPLEX = {str}, {bool}, {int, float, np.float64}, {complex}
_BYTES = {bytes, bytearray, memoryview}


def _is_array(kind: type) -> bool:
    torch = torch_if_loaded()
    return issubclass(kind, np.ndarray | np.generic) or (torch is not None and issubclass(kind, torch.Tensor))


def _as_tensor(name: str, row: np.ndarray | np.generic) -> Any:
    dtype, array = _stored(name, np.asarray(row))
    return tensor_on(np.ascontiguousarray(array).reshape(array.shape), dtype)


def _utf8(rows: Sequence[str]) -> list[bytes]:
    try:
        return list(map(str.encode, rows))
    except UnicodeEncodeError:  # half a character is no text, and still what the producer has
        return [row.encode("utf-8", "surrogatepass") for row in rows]


def _numbers(name: str, kinds: set[type], rows: Sequence[Any]) -> tuple[str, np.ndarray]:
    wanted = np.bool_ if kinds == _BOOL else complex if kinds == _COMPLEX else np.int64
    if not kinds.isdisjoint(_FLOATS):
        wanted = np.float64
        if int in kinds and any(type(row) is int and abs(row) > 1 << 53 for row in rows):
            raise InvalidArgument(
                f"field {name!r} mixes floats with an int beyond 2**53, which a float cannot hold"
            )
    try:
        array = np.asarray(rows, wanted)
    except OverflowError as error:
        raise InvalidArgument(f"field {name!r} has an int beyond 64 bits; store it as str") from error
    return array.dtype.name, array


def _plan_bytes(dtype: str, rows: list[bytes], count: int, valid: np.ndarray | None, item: str) -> ColumnPlan:
    values = np.frombuffer(b"".join(rows), np.uint8)
    offsets = offsets_of(list(map(len, rows)), valid)
    return ColumnPlan(FieldSpec(dtype), [values], len(values), count, offsets, valid, kind=Kind("list", item))


def _plan_arrays(
    name: str, arrays: Sequence[np.ndarray], rows: int, valid: np.ndarray | None, *, varying: bool = False
) -> ColumnPlan:
    dtypes = set(map(_dtype, arrays))
    if len(dtypes) == 1 and not dtypes.isdisjoint(_AS_THEY_ARE):
        dtype = _stored_name(arrays[0].dtype)
    else:
        stored = [_stored(name, array) for array in arrays]
        dtype = stored[0][0]
        if any(other != dtype for other, _ in stored):
            raise disagreement(name, [(other, array.shape) for other, array in stored])
        arrays = [array for _, array in stored]
    if len(set(map(_ndim, arrays))) > 1:
        raise disagreement(name, [(dtype, array.shape) for array in arrays])
    ndim = arrays[0].ndim
    if ndim == 0:
        return plan_scalars(dtype, np.stack(arrays), rows, valid, _LIST_OF_ARRAYS)
    if ndim == 1:
        return plan_ragged(dtype, (), arrays, list(map(len, arrays)), rows, valid, _LIST_OF_ARRAYS)
    shapes = list(map(_shape, arrays))
    if varying or len({shape[1:] for shape in shapes}) > 1:
        flat = [array.reshape(-1) for array in arrays]
        trailing = (-1,) * (ndim - 1) if varying else None
        return plan_varying(dtype, shapes, flat, rows, valid, _LIST_OF_ARRAYS, trailing=trailing)
    lengths = [shape[0] for shape in shapes]
    return plan_ragged(dtype, shapes[0][1:], arrays, lengths, rows, valid, _LIST_OF_ARRAYS)


def _plan_varying(name: str, values: Any) -> ColumnPlan:
    torch = torch_if_loaded()
    is_tensor = torch is not None and isinstance(values, torch.Tensor)
    if not is_tensor and not isinstance(values, np.ndarray | Sequence):
        raise InvalidArgument(
            f"field {name!r}: the rows of Varying are a {type(values).__name__}, not a sequence"
        )
    rows = list(values)
    present = [row for row in rows if row is not None]
    valid = None
    if len(present) < len(rows):
        valid = np.fromiter((row is not None for row in rows), bool, len(rows))
    kind = Kind("tensor" if is_tensor else "array" if isinstance(values, np.ndarray) else "list")
    if present and torch is not None and all(isinstance(row, torch.Tensor) for row in present):
        plan = tensors.plan_tensors(name, present, len(rows), valid, varying=True)
        return replace(plan, kind=Kind(kind.container, "tensor"))
    if not present or not all(isinstance(row, np.ndarray) for row in present):
        raise InvalidArgument(
            f"field {name!r}: the rows of Varying must be arrays or tensors, and one at least"
        )
    return replace(_plan_arrays(name, present, len(rows), valid, varying=True), kind=kind)


def _plan_shared(name: str, values: Any, index: Sequence[int | None]) -> ColumnPlan:
    plan = plan_column(name, values)
    rows = np.fromiter((-1 if at is None else int(at) for at in index), np.int64, len(index))
    if len(rows) and (rows.min() < -1 or rows.max() >= plan.rows):
        raise InvalidArgument(
            f"shared field {name!r} has an index outside its {plan.rows} stored rows; use None for no value"
        )
    return replace(plan, index=rows)


# numpy takes microseconds to name a dtype
_AS_THEY_ARE = frozenset(np.dtype(name) for name in NUMERIC)


def _stored(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """The dtype's name and the array as it is stored, in native byte order."""
    dtype = _stored_name(array.dtype)
    _refuse_masked(name, array)
    if dtype in BITS:
        return dtype, array.view(BITS[dtype])
    if dtype not in NUMERIC:
        supported = ", ".join(sorted(NUMERIC | BITS.keys()))
        raise InvalidArgument(f"field {name!r} has dtype {dtype}; supported: {supported}")
    return dtype, array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _refuse_masked(name: str, array: Any) -> None:
    if isinstance(array, np.ma.MaskedArray):
        raise InvalidArgument(f"field {name!r} has a masked array; give None for a row without a value")


@lru_cache(maxsize=256)
def _stored_name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # "bfloat16" where ml_dtypes has registered it
