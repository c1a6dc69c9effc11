"""From rows to what a `get` hands out: a TensorDict of the containers that the PyPI package gives.

Tensors come as a jagged nested tensor (a strided one where rows differ in more than their first dimension),
scalars as a dense tensor, everything else as a NonTensorStack.
"""

import importlib
from typing import Any

import numpy as np

from .errors import ExtraMissing
from .rows import Rows

_WAY_OUT = "pip install 'relax-transferqueue[torch]'"


def tensordict() -> Any:
    """The module; ExtraMissing where it or torch is not installed."""
    try:
        return importlib.import_module("tensordict")
    except ImportError as error:
        raise ExtraMissing(
            f"this call hands out a TensorDict, which needs torch and tensordict: {_WAY_OUT}"
        ) from error


def torch_module() -> Any:
    """torch; ExtraMissing where it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ExtraMissing(f"this call hands out tensors, which needs torch: {_WAY_OUT}") from error


def batch(fields: dict[str, Rows], rows: int) -> Any:
    """A TensorDict of `rows` samples."""
    td = tensordict()
    return td.TensorDict({name: _container(td, field) for name, field in fields.items()}, batch_size=rows)


def _container(td: Any, field: Rows) -> Any:
    torch = torch_module()
    column = field.column
    if column is not None and field.kind != "object":
        values = column.to_torch()
        if field.kind.endswith("[]"):
            return values
        offsets = torch.from_numpy(np.array(column.expand().offsets, np.int64))
        return torch.nested.nested_tensor_from_jagged(values, offsets)
    return _packed(td, torch, field.tolist())


def _packed(td: Any, torch: Any, values: list[Any]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in values):
        return td.NonTensorStack(*values)
    if all(value.ndim == 0 for value in values):
        return torch.stack(values)
    alike = len({(value.dtype, value.ndim) for value in values}) == 1 and values[0].ndim > 0
    if alike and len({value.shape[1:] for value in values}) == 1:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    if alike:
        return torch.nested.as_nested_tensor(values, layout=torch.strided)
    return td.NonTensorStack(*values)
