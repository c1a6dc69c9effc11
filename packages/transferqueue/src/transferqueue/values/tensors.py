"""Plans of torch tensors, nested tensors and tensordicts; torch and tensordict are never imported for it."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from .ragged import disagreement, plan_ragged, plan_scalars, plan_stacked, plan_varying
from .spec import BITS, NUMERIC, ColumnPlan, FieldSpec, Kind

_shape = attrgetter("shape")
_about = attrgetter("dtype", "layout", "ndim", "requires_grad", "is_cpu")  # torch answers slowly: ask once
_SMALL = 1 << 14  # bytes of a column that are joined at once rather than one by one
_TENSOR, _LIST_OF_TENSORS = Kind("tensor", "tensor"), Kind("list", "tensor")


def _name_of(name: str, dtype: Any) -> str:
    found = _NAMES.get(dtype)
    if found is None:
        found = str(dtype).removeprefix("torch.")
        if found not in NUMERIC and found not in BITS:
            raise InvalidArgument(
                f"field {name!r}: a tensor of {dtype} cannot be stored; convert it, to one of "
                f"{', '.join(sorted(NUMERIC | BITS.keys()))}"
            )
        _NAMES[dtype] = found
    return found


_NAMES: dict[Any, str] = {}


def _strided(name: str, layout: Any) -> None:
    if layout != sys.modules["torch"].strided:
        raise InvalidArgument(
            f"field {name!r}: a tensor of layout {layout} cannot be stored; give a dense one, or a nested "
            "tensor of jagged layout"
        )


def plan_tensor(name: str, tensor: Any) -> ColumnPlan:
    """The plan of one tensor ``[rows, ...]`` or nested tensor."""
    if tensor.is_nested:
        return _plan_nested(name, tensor)
    _strided(name, tensor.layout)
    dtype = _name_of(name, tensor.dtype)
    if tensor.dim() == 0:
        raise InvalidArgument(
            f"field {name!r} is one scalar; give one value a row: a sequence or a tensor [rows]"
        )
    tensor = tensor.detach()
    part = _as_array(tensor, dtype) if tensor.is_cpu else tensor
    return plan_stacked(dtype, part, tensor.shape, _TENSOR)


def plan_tensors(
    name: str, rows: Sequence[Any], count: int, valid: np.ndarray | None, *, varying: bool = False
) -> ColumnPlan:
    """The plan of rows that are tensors of one dtype and number of dimensions.

    Args:
        name: of the field.
        rows: those that are not None, one at least.
        count: how many rows there are with those that are None.
        valid: which are not.
        varying: whether all dimensions are free in the field's schema.
    """
    torch = sys.modules["torch"]
    about = set(map(_about, rows))
    for layout in {layout for _, layout, _, _, _ in about}:
        _strided(name, layout)
    if len({(dtype, dims) for dtype, _, dims, _, _ in about}) > 1:
        raise disagreement(name, [(_name_of(name, row.dtype), tuple(row.shape)) for row in rows])
    if any([grad for _, _, _, grad, _ in about]):
        rows = [row.detach() for row in rows]
    dims = rows[0].dim()
    dtype = _name_of(name, rows[0].dtype)
    if dims == 0:
        values = _as_array(torch.stack(list(rows)).cpu(), dtype)
        return plan_scalars(dtype, values, count, valid, _LIST_OF_TENSORS)
    if dims == 1:
        lengths, trailing = list(map(torch.Tensor.numel, rows)), ()
    else:
        shapes = list(map(_shape, rows))
        if varying or len({shape[1:] for shape in shapes}) > 1:
            flat = [row.reshape(-1) for row in rows]
            trailing = (-1,) * (dims - 1) if varying else None
            return plan_varying(dtype, shapes, flat, count, valid, _LIST_OF_TENSORS, trailing=trailing)
        lengths, trailing = [shape[0] for shape in shapes], shapes[0][1:]
    if sum(lengths) * rows[0].element_size() * math.prod(trailing) <= _SMALL and all(
        [cpu for *_, cpu in about]
    ):
        rows = [_as_array(torch.cat(list(rows)), dtype)]
    return plan_ragged(dtype, trailing, rows, lengths, count, valid, _LIST_OF_TENSORS)


def _as_array(tensor: Any, dtype: str) -> np.ndarray:
    """A tensor on the CPU as the array it is stored as, on the same memory."""
    if dtype in BITS:
        tensor = tensor.view(getattr(sys.modules["torch"], BITS[dtype]))
    elif tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.numpy()


def _plan_nested(name: str, tensor: Any) -> ColumnPlan:
    if str(tensor.layout) != "torch.jagged":
        raise InvalidArgument(
            f"field {name!r}: a nested tensor of layout {tensor.layout} cannot be stored; give its rows "
            "(unbind()), or one of layout torch.jagged"
        )
    dtype = _name_of(name, tensor.dtype)
    tensor = tensor.detach()
    rows = len(tensor.offsets()) - 1
    ragged = tensor._ragged_idx
    kind = Kind("nested", "tensor", ragged)
    if ragged != 1:  # rows are ragged in a later dimension
        parts = list(tensor.unbind())
        shape = list(tensor.shape[1:])
        shape[ragged - 1] = -1
        flat = [part.reshape(-1) for part in parts]
        shapes = [tuple(part.shape) for part in parts]
        return plan_varying(dtype, shapes, flat, rows, None, kind, trailing=tuple(shape[1:]))
    offsets = tensor.offsets().cpu().numpy().astype(np.int64, copy=False)
    values = tensor.values()
    trailing = tuple(values.shape[1:])
    if tensor.lengths() is not None:  # rows with gaps between them
        lengths = tensor.lengths().cpu().tolist()
        parts = [values[at : at + length] for at, length in zip(offsets.tolist(), lengths, strict=False)]
        return plan_ragged(dtype, trailing, parts, lengths, rows, None, kind)
    first, last = int(offsets[0]), int(offsets[-1])
    part = values[first:last]
    part = _as_array(part, dtype) if part.is_cpu else part
    return ColumnPlan(
        FieldSpec(dtype, trailing), [part], last - first, rows, offsets - first, None, kind=kind
    )


@dataclass(frozen=True, slots=True)
class Constant:
    """One value that all rows have, as tensordict's NonTensorData."""

    value: Any
    count: int

    def rows(self) -> list[Any]:
        return [self.value] * self.count


def is_tensordict(value: Any) -> bool:
    """Whether `value` is a tensordict (of the package of that name)."""
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDictBase)


def tensordict_items(value: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a tensordict: tensors, tensordicts, and for other data lists or a `Constant`."""
    module = sys.modules["tensordict"]
    if len(value.batch_size) == 0:
        raise InvalidArgument("a tensordict without batch dimensions has no rows; its batch_size needs one")
    for key in value.keys():  # noqa: SIM118 - a tensordict iterates over rows
        entry = _entry(value, key)
        if isinstance(entry, module.NonTensorData):
            yield key, Constant(entry.data, value.batch_size[0])
        elif module.is_non_tensor(entry):
            yield key, list(entry.tolist())
        elif module.is_tensor_collection(entry) and not isinstance(entry, module.TensorDictBase):
            yield key, entry.to_tensordict()
        else:
            yield key, entry


def _entry(value: Any, key: str) -> Any:
    """An entry of a tensordict; the rows of one that stacks them lazily, where they differ in shape."""
    if not hasattr(value, "tensordicts") or value.stack_dim != 0:
        return value.get(key)
    rows = [row.get(key) for row in value.tensordicts]
    torch = sys.modules["torch"]
    if all(isinstance(row, torch.Tensor) for row in rows) and len({tuple(row.shape) for row in rows}) > 1:
        return rows
    return value.get(key)
