"""Between what users put and get, and columns of the store.

A field is stored under a name that says how: ``input_ids|int64[*]`` holds tensors ``[length]``,
``image|float32[*,3,4]`` tensors ``[length, 3, 4]``, ``score|float32[]`` scalars, and ``|object`` packed bytes
of whatever else: text, plain data, None, and tensors whose rows differ in more than their first dimension. So
partitions may give one field name different dtypes, and share one partition of the store.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import Column
from .errors import FieldsNotReady, InvalidRequest
from .messages import FieldWrite, Places, Shape
from .packing import pack, unpack

OBJECT = "object"
_STORED = frozenset(
    ["bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


@dataclass(frozen=True)
class Encoded:
    """Fields of a batch, ready to be put: columns of the store by name, and what the catalog has to know."""

    rows: int
    columns: dict[str, Any]
    writes: list[FieldWrite]

    def only(self, at: Sequence[int]) -> dict[str, Any]:
        """The columns of some of the rows."""
        return {name: _selected(values, at) for name, values in self.columns.items()}


def stored_name(field: str, kind: str) -> str:
    """What the store calls it."""
    return f"{field}|{kind}"


def encode(fields: Any, parser: Callable[[Any], Any] | None = None) -> Encoded:
    """Fields of a batch, from a TensorDict or a mapping of name to rows.

    Args:
        fields: each a tensor or numpy array ``[rows, ...]``, a nested tensor, or a sequence of one value a
            row.
        parser: changes the values in place before they are stored; gets a dict of name to tensor or list.

    Raises:
        InvalidRequest: rows that do not match, or values that cannot be stored.
    """
    given = {name: _batched(name, value) for name, value in fields.items()}
    if parser is not None:
        before = {name: len(value) for name, value in given.items()}
        parser(given)
        if {name: len(value) for name, value in given.items()} != before:
            raise InvalidRequest(
                "data_parser may change values in place, but neither fields nor their lengths"
            )
        given = {name: _batched(name, value) for name, value in given.items()}
    counts = {name: len(value) for name, value in given.items()}
    batch_size = getattr(fields, "batch_size", None)
    rows = (
        int(batch_size[0]) if batch_size is not None and len(batch_size) else next(iter(counts.values()), 0)
    )
    for name, count in counts.items():
        if count != rows:
            raise InvalidRequest(f"field {name!r} has {count} rows in a batch of {rows}")
    columns: dict[str, Any] = {}
    writes: list[FieldWrite] = []
    for name, value in given.items():
        kind, column, write = _column(name, value, is_nested(fields[name]))
        columns[stored_name(name, kind)] = column
        writes.append(write)
    return Encoded(rows, columns, writes)


def is_tensor(value: Any) -> bool:
    """A torch tensor; False where the program has not imported torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_nested(value: Any) -> bool:
    """A torch nested tensor, jagged or strided."""
    return is_tensor(value) and value.is_nested


def _batched(name: str, value: Any) -> Any:
    """A dense tensor or array ``[rows, ...]``, or a list of one value a row."""
    if is_nested(value):
        return list(value.detach().unbind())
    if is_tensor(value):
        if not value.ndim:
            raise InvalidRequest(f"field {name!r} is one scalar; give one value a row")
        return value.detach()
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.kind in "OUS" else value
    if isinstance(value, list | tuple):
        return list(value)
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and tensordict.is_non_tensor(value):
        return list(value.tolist())
    raise InvalidRequest(
        f"field {name!r} is a {type(value).__name__}; give a tensor, an array or one value a row"
    )


def _is_array(value: Any) -> bool:
    return is_tensor(value) or isinstance(value, np.ndarray)


def dtype_name(value: Any) -> str:
    """Of a tensor or an array: "int64", "bfloat16"."""
    return str(value.dtype).removeprefix("torch.")


def _kind(dtype: str, shape: Shape) -> str:
    """How rows of this shape are stored."""
    return f"{dtype}[{','.join(['*', *map(str, shape[1:])]) if shape else ''}]"


def _column(name: str, value: Any, nested: bool) -> tuple[str, Any, FieldWrite]:
    if _is_array(value):
        dtype, shape = dtype_name(value), tuple(value.shape[1:])
        if dtype in _STORED:
            kind = _kind(dtype, shape)
            return kind, value, FieldWrite(name, dtype, False, kind, shape)
        return OBJECT, [pack(row) for row in value], FieldWrite(name, dtype, False, OBJECT, shape)
    if not value or not nested:
        return OBJECT, [pack(row) for row in value], FieldWrite(name, None, False, OBJECT, None)
    dtype, shapes = dtype_name(value[0]), [tuple(row.shape) for row in value]
    one_kind = dtype in _STORED and len({shape[1:] for shape in shapes}) == 1 and len(shapes[0]) > 0
    kind = _kind(dtype, shapes[0]) if one_kind else OBJECT
    column = value if one_kind else [pack(row) for row in value]
    return kind, column, FieldWrite(name, dtype, True, kind, None, shapes)


def _selected(values: Any, at: Sequence[int]) -> Any:
    return [values[row] for row in at] if isinstance(values, list) else values[np.asarray(at)]


# -- reading -------------------------------------------------------------------------------------------------


def read(places: Places, get: Callable[[list[int], list[str]], dict[str, Column]]) -> dict[str, "Rows"]:
    """The fields of samples.

    Args:
        places: where they lie; each field with the kind it has for each sample.
        get: reads columns of the store: ``get(ids, names)``.

    Raises:
        FieldsNotReady: some of the samples do not have a field.
    """
    kinds = {field.name: [field.kind(at) for at in range(len(places.rows))] for field in places.fields}
    lacking = {name: found.count("") for name, found in kinds.items() if "" in found}
    if lacking:
        raise FieldsNotReady(
            f"fields are not ready in all of the {len(places.rows)} samples asked for: "
            + ", ".join(f"{name!r} is missing in {count}" for name, count in lacking.items()),
            fields=sorted(lacking),
        )
    ids = list(dict.fromkeys(places.rows))
    if len(ids) == len(places.rows) and all(len(set(found)) == 1 for found in kinds.values()):
        columns = get(ids, [stored_name(name, found[0]) for name, found in kinds.items()])
        return {name: Rows(found[0], columns[stored_name(name, found[0])]) for name, found in kinds.items()}
    return _read_mixed(places.rows, kinds, get)


def _read_mixed(
    ids: list[int], kinds: dict[str, list[str]], get: Callable[[list[int], list[str]], dict[str, Column]]
) -> dict[str, "Rows"]:
    """Where a field is stored in several ways, or a sample was asked for twice."""
    alike: dict[tuple[str, ...], dict[int, list[int]]] = {}
    for at, (row, found) in enumerate(zip(ids, zip(*kinds.values(), strict=True), strict=True)):
        alike.setdefault(found, {}).setdefault(row, []).append(at)
    values: dict[str, list[Any]] = {name: [None] * len(ids) for name in kinds}
    for found, rows in alike.items():
        columns = get(list(rows), [stored_name(*one) for one in zip(kinds, found, strict=True)])
        for name, kind in zip(kinds, found, strict=True):
            several = Rows(kind, columns[stored_name(name, kind)]).tolist()
            for places, value in zip(rows.values(), several, strict=True):
                for at in places:
                    values[name][at] = value
    return {
        name: Rows(found[0] if len(set(found)) == 1 else "", many=values[name])
        for name, found in kinds.items()
    }


class Rows:
    """The values of one field: a column of the store, or one value a row where they came from several."""

    def __init__(self, kind: str, column: Column | None = None, many: list[Any] | None = None) -> None:
        self.kind = kind
        self.column = column
        self._many = many

    def tolist(self) -> list[Any]:
        """One value a row: a torch tensor (a copy), or plain data."""
        if self._many is not None:
            return self._many
        assert self.column is not None
        if self.kind == OBJECT:
            return [unpack(row) for row in self.column]
        values = self.column.to_torch()
        if self.kind.endswith("[]"):
            return list(values.unbind())
        return list(values.split(self.column.lengths.tolist()))
