"""Plain data with arrays in it, as bytes: tags, sampling configurations, and fields that are no tensors.

msgpack, with extension types for numpy arrays, numpy scalars and torch tensors. Nothing that is decoded can
run code; a value of another type is refused when it is encoded.
"""

import sys
from typing import Any

import msgspec
import numpy as np

from ...errors import Malformed
from .errors import ExtraMissing, InvalidRequest

_ARRAY, _SCALAR, _TENSOR = 1, 2, 3
_header = msgspec.msgpack.Encoder()
_PLAIN = "biufcSUmM"  # numpy kinds that are their bytes


class _Shape(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_shape = msgspec.msgpack.Decoder(_Shape)


def pack(value: Any) -> bytes:
    """The bytes of plain data: None, bool, int, float, str, bytes, and lists, tuples, sets and dicts of them,
    numpy arrays and scalars, torch tensors. Tuples and sets come back as lists.

    Raises:
        InvalidRequest: something in it is of another type, or an int is beyond 64 bits.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(
            f"{type(value).__name__} value cannot be stored: {error}; store plain data, arrays or tensors"
        ) from error


def unpack(data: bytes | memoryview) -> Any:
    """What `pack` was given."""
    return _decoder.decode(data)


def _encode(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, np.generic):
        value, code = np.asarray(value), _SCALAR
    elif isinstance(value, np.ndarray):
        code = _ARRAY
    else:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor) or value.is_nested:
            raise TypeError(f"a {type(value).__name__} is not plain data")
        tensor = value.detach().cpu().contiguous()
        flat = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)
        name = str(tensor.dtype).removeprefix("torch.")
        return msgspec.msgpack.Ext(_TENSOR, _header.encode(_Shape(name, tuple(tensor.shape), flat.tobytes())))
    if value.dtype.kind not in _PLAIN:
        raise TypeError(f"an array of {value.dtype} is not plain data")
    return msgspec.msgpack.Ext(
        code, _header.encode(_Shape(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()))
    )


def _decode(code: int, data: memoryview) -> Any:
    if code not in (_ARRAY, _SCALAR, _TENSOR):
        raise Malformed(f"extension type {code} is unknown here; are all processes of one version?")
    said = _shape.decode(data)
    if code == _TENSOR:
        return _tensor(said)
    array = np.frombuffer(said.data, np.dtype(said.dtype)).reshape(said.shape).copy()
    return array if code == _ARRAY else array[()]


def _tensor(said: _Shape) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ExtraMissing(
            "this value holds a torch tensor; install torch: pip install 'relax-transferqueue[torch]'"
        ) from error
    dtype = getattr(torch, said.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise Malformed(f"torch {torch.__version__} has no dtype {said.dtype!r}")
    if not said.data:
        return torch.empty(said.shape, dtype=dtype)
    return torch.frombuffer(bytearray(said.data), dtype=torch.uint8).view(dtype).reshape(said.shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
_decoder = msgspec.msgpack.Decoder(ext_hook=_decode)
