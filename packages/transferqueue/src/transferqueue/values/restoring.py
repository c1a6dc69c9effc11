"""From columns back to what the producer held: arrays, tensors, nested tensors, lists, mappings."""

from collections.abc import Mapping
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidArgument
from .copying import tensor_on
from .plain import as_named
from .spec import BYTES, FLAT

if TYPE_CHECKING:
    from .column import Column

_Offsets = dict[bytes, Any]  # offsets of nested tensors by content: torch combines only those with equal ones


def restore(columns: Mapping[str, "Column"], *, copy: bool | None = None) -> Any:
    """A batch as the producer gave it: fields in the mappings they were in, each as `Column.restore` has it.

    A mapping that was a tensordict is one again (`to_tensordict` makes one of any columns). A name with a "/"
    that was no mapping stays a name. Nested tensors with equal lengths share their offsets, as torch asks of
    those that are to be combined.

    Args:
        columns: name -> column.
        copy: see `Column.restore`.

    Raises:
        InvalidArgument: a package is needed and missing: torch, tensordict, or ml_dtypes.
    """
    offsets: _Offsets = {}
    tree, levels = _tree(columns)
    return _mapping(tree, (), levels, columns, copy, offsets)


def to_tensordict(columns: Mapping[str, "Column"], *, copy: bool | None = None) -> Any:
    """The columns as a tensordict of batch size ``[rows]``: rows of one shape stacked, ragged ones as nested
    tensors, all else (text, bytes, plain data, columns with None) as non-tensor data. Mappings become
    tensordicts.

    Args:
        columns: name -> column, one at least.
        copy: see `Column.restore`.

    Raises:
        InvalidArgument: no columns, or the package tensordict is not installed.
    """
    if not columns:
        raise InvalidArgument("no columns; a tensordict needs one to know its number of rows")
    tree, levels = _tree(columns)
    return _tensordict(tree, (), levels, columns, copy, {})


_Path = tuple[str, ...]


def _tree(columns: Mapping[str, "Column"]) -> tuple[dict[str, Any], dict[_Path, int]]:
    """Names of columns by key, in mappings of mappings; and for each mapping the level of its `Nesting`."""
    tree: dict[str, Any] = {}
    levels: dict[_Path, int] = {}
    for name, column in columns.items():
        nesting = column.nesting
        ends = (*nesting.splits, len(name))
        starts = (0, *(split + 1 for split in nesting.splits))
        path = tuple(name[start:end] for start, end in zip(starts, ends, strict=True))
        at: Any = tree
        for key in path[:-1]:
            at = at.setdefault(key, {}) if isinstance(at, dict) else None
        if not isinstance(at, dict) or path[-1] in at:
            at, path, nesting = tree, (name,), FLAT  # another field has taken the place
        at[path[-1]] = name
        for depth, level in enumerate(nesting.levels):
            here = path[:depth]
            levels[here] = min(level, levels.get(here, level))
    return tree, levels


def _mapping(
    tree: dict[str, Any],
    path: _Path,
    levels: dict[_Path, int],
    columns: Mapping[str, "Column"],
    copy: bool | None,
    offsets: _Offsets,
) -> Any:
    if levels.get(path, 0):
        return _tensordict(tree, path, levels, columns, copy, offsets)
    return {
        key: _mapping(entry, (*path, key), levels, columns, copy, offsets)
        if isinstance(entry, dict)
        else restore_column(columns[entry], copy, offsets)
        for key, entry in tree.items()
    }


def _tensordict(
    tree: dict[str, Any],
    path: _Path,
    levels: dict[_Path, int],
    columns: Mapping[str, "Column"],
    copy: bool | None,
    offsets: _Offsets,
) -> Any:
    try:
        tensordict = import_module("tensordict")
    except ImportError as error:
        raise InvalidArgument(
            "a tensordict was put and the package tensordict is not installed here; install it, or restore "
            "the columns one by one"
        ) from error
    entries = {
        key: _tensordict(entry, (*path, key), levels, columns, copy, offsets)
        if isinstance(entry, dict)
        else _entry(columns[entry], copy, offsets)
        for key, entry in tree.items()
    }
    rows = len(next(iter(_leaves(tree, columns))))
    batch = [rows]
    wanted = levels.get(path, 0)
    if wanted > 1:
        shapes = [tuple(entry.shape[:wanted]) for entry in entries.values() if hasattr(entry, "shape")]
        if len(set(shapes)) == 1 and len(shapes[0]) == wanted:
            batch = list(shapes[0])
    result = tensordict.TensorDict({}, batch_size=batch)
    for key, entry in entries.items():
        result.set(key, entry)
    return result


def _leaves(tree: dict[str, Any], columns: Mapping[str, "Column"]) -> list["Column"]:
    found: list[Column] = []
    for entry in tree.values():
        found += _leaves(entry, columns) if isinstance(entry, dict) else [columns[entry]]
    return found


def _entry(column: "Column", copy: bool | None, offsets: _Offsets) -> Any:
    """A column as a tensordict holds it."""
    shape = column.row_shape
    if shape is not None:
        return _stacked_tensor(column, shape, copy)
    if _is_jagged(column):
        return _nested(column, 1, copy, offsets)
    if column.kind.container == "nested":
        return restore_column(column, copy, offsets)
    tensordict = import_module("tensordict")
    rows = _rows(column, item_of(column), copy)
    if column.kind.container == "constant" and rows and all(row == rows[0] for row in rows):
        return tensordict.NonTensorData(rows[0], batch_size=[len(rows)])
    return tensordict.NonTensorStack(*(tensordict.NonTensorData(row, batch_size=[]) for row in rows))


def restore_column(column: "Column", copy: bool | None, offsets: _Offsets | None = None) -> Any:
    """See `Column.restore`."""
    kind = column.kind
    item = item_of(column)
    container = kind.container
    if container in ("array", "tensor", "nested") and column.spec.dtype not in BYTES:
        shape = column.row_shape
        if container == "nested":
            if kind.ragged == 1 and (_is_jagged(column) or shape):
                return _nested(column, 1, copy, offsets)
            if kind.ragged != 1 and _is_ragged_in(column, kind.ragged):
                return _nested(column, kind.ragged, copy, offsets)
        elif shape is not None:
            return (
                _stacked_tensor(column, shape, copy)
                if container == "tensor"
                else _stacked_array(column, shape, copy)
            )
        elif container == "tensor" and _is_jagged(column):
            return _nested(column, 1, copy, offsets)
    rows = _rows(column, item, copy)
    if container == "tuple":
        return tuple(rows)
    if container == "objects" or (container == "array" and column.spec.dtype == "data"):
        array = np.empty(len(rows), object)
        for at, row in enumerate(rows):
            array[at] = row
        return array
    if container == "array" and column.spec.dtype in ("str", "bytes") and None not in rows:
        return np.array(rows, _text_dtype(column.spec.dtype, kind.width))
    return rows


def _text_dtype(dtype: str, width: int) -> np.dtype[Any]:
    if dtype == "bytes":
        return np.dtype(f"S{width}")
    return np.dtype(f"U{width // 4}") if width else np.dtypes.StringDType()


def item_of(column: "Column") -> str:
    """What a row is, by itself."""
    kind = column.kind
    if kind.container in ("tensor", "nested"):
        return "tensor"
    if kind.container == "array":
        return "scalar" if column.spec.scalar else "array"
    return kind.item


def _is_ragged_in(column: "Column", ragged: int) -> bool:
    """Whether rows are all there and differ in dimension `ragged` of ``[rows, ...]`` alone."""
    shapes = column.expand().shapes
    if shapes is None or not len(shapes) or not _all_there(column):
        return False
    others = np.delete(shapes, ragged - 1, axis=1)
    return bool((others == others[0]).all())


def _all_there(column: "Column") -> bool:
    index, valid = column.index, column.valid
    return (valid is None or bool(valid.all())) and (index is None or bool((index >= 0).all()))


def _is_jagged(column: "Column") -> bool:
    """Whether rows are all there and differ in their first dimension at most."""
    spec = column.spec
    return spec.dtype not in BYTES and not spec.scalar and not spec.varying and _all_there(column)


def _stacked_array(column: "Column", shape: tuple[int, ...], copy: bool | None) -> np.ndarray:
    array = column._array(copy is True)
    return as_named(array, column.spec.dtype).reshape(len(column), *shape)


def _stacked_tensor(column: "Column", shape: tuple[int, ...], copy: bool | None) -> Any:
    return _tensor(column._array(copy is not False), column.spec.dtype).view(len(column), *shape)


def _tensor(array: np.ndarray, dtype: str) -> Any:
    _torch()
    return tensor_on(array, dtype)


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as error:
        raise InvalidArgument(
            "a torch tensor was put and torch is not installed here; use the column's values and rows"
        ) from error


def _nested(column: "Column", ragged: int, copy: bool | None, shared: _Offsets | None) -> Any:
    torch = _torch()
    if ragged == 1:
        values = tensor_on(column._array(copy is not False), column.spec.dtype)
        sizes = column.lengths
    else:
        rows = _rows(column, "tensor", copy)
        values = torch.cat(rows, dim=ragged - 1)
        sizes = [row.shape[ragged - 1] for row in rows]
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    made = torch.from_numpy(offsets)
    if shared is not None:
        made = shared.setdefault(offsets.tobytes(), made)
    return torch.nested.nested_tensor_from_jagged(values, made, jagged_dim=ragged)


def _rows(column: "Column", item: str, copy: bool | None) -> list[Any]:
    dtype = column.spec.dtype
    if dtype in BYTES:
        rows = column.tolist()
        if item == "bytearray":
            return [None if row is None else bytearray(row) for row in rows]
        return rows
    found: list[Any] = []
    for piece in column.pieces():
        if piece.spec.dtype == "none":
            found += [None] * len(piece)
        else:
            found += _scalars(piece, item) if piece.spec.scalar else _arrays(piece, item, copy)
    return found


def _scalars(column: "Column", item: str) -> list[Any]:
    whole = column.expand()
    values = whole.values
    dtype = column.spec.dtype
    if item == "tensor":
        rows = list(_tensor(np.array(values), dtype))
    elif item == "array":
        named = as_named(values, dtype)
        rows = [named[at : at + 1].reshape(()) for at in range(len(named))]
    else:
        rows = list(as_named(values, dtype)) if item == "scalar" else values.tolist()
    if whole.valid is None:
        return rows
    return [row if there else None for row, there in zip(rows, whole.valid.tolist(), strict=True)]


def _arrays(column: "Column", item: str, copy: bool | None) -> list[Any]:
    """The rows of a column that has its arrays, each on its part of one array or tensor."""
    dtype = column.spec.dtype
    as_tensors = item == "tensor"
    stored = column.without_index()
    if as_tensors:
        whole = _tensor(stored._array(copy is not False), dtype)
    else:
        whole = as_named(stored._array(copy is True), dtype)
    bounds = stored.offsets.tolist()
    rows: list[Any] = [whole[start:stop] for start, stop in pairwise(bounds)]
    if stored.shapes is not None:
        shapes = stored.shapes.tolist()
        rows = [row.reshape(tuple(shape)) for row, shape in zip(rows, shapes, strict=True)]
    if stored.valid is not None:
        rows = [row if there else None for row, there in zip(rows, stored.valid.tolist(), strict=True)]
    if column.index is None:
        return rows
    picked = [rows[at] if at >= 0 else None for at in column.index.tolist()]
    if copy is True or (copy is None and as_tensors):  # the reader's own: no two rows are one memory
        seen: set[int] = set()
        for at, row in enumerate(picked):
            if row is None or id(row) not in seen:
                seen.add(id(row))
            else:
                picked[at] = row.clone() if as_tensors else row.copy()
    return picked
