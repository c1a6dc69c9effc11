"""Plain data as msgpack, with arrays and tensors anywhere inside it.

What msgpack has no word for changes as msgspec does it: tuples and sets come back as lists, naive datetimes,
UUIDs and decimals as str, keys of a dict keep their type.
"""

from importlib import import_module
from struct import Struct
from typing import Any

import msgspec
import numpy as np

from ..errors import Corrupt, InvalidArgument
from .copying import tensor_on, torch_if_loaded
from .spec import BITS, NUMERIC, stored_dtype

_ARRAY = 1  # msgpack extension: size of the description, description, bytes
_SIZE = Struct("<I")


class _Description(msgspec.Struct, array_like=True, frozen=True):
    item: str
    dtype: str
    shape: tuple[int, ...]


def _pack(value: Any) -> msgspec.msgpack.Ext:
    torch = torch_if_loaded()
    item = "array"
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested:
            raise TypeError(f"a tensor of layout {value.layout} inside plain data")
        item, dtype = "tensor", str(value.dtype).removeprefix("torch.")
        value = value.detach().cpu().contiguous()
        if dtype in BITS:
            value = value.view(getattr(torch, BITS[dtype]))
        array = value.resolve_conj().resolve_neg().numpy() if dtype in BITS or dtype in NUMERIC else None
    elif isinstance(value, np.ndarray | np.generic):
        item = "array" if isinstance(value, np.ndarray) else "scalar"
        array, dtype = np.asarray(value), value.dtype.name
    else:
        raise TypeError(f"a {type(value).__name__} is no plain data")
    if array is None or (dtype not in NUMERIC and dtype not in BITS):
        raise TypeError(f"an array of {dtype} inside plain data")
    if dtype in NUMERIC:
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
    head = msgspec.msgpack.encode(_Description(item, dtype, array.shape))
    return msgspec.msgpack.Ext(_ARRAY, _SIZE.pack(len(head)) + head + array.tobytes())


def _unpack(code: int, data: memoryview) -> Any:
    if code != _ARRAY or len(data) < _SIZE.size:
        raise ValueError(f"unknown extension {code}")
    (size,) = _SIZE.unpack_from(data)
    about = _DESCRIPTION.decode(data[_SIZE.size : _SIZE.size + size])
    if about.dtype not in NUMERIC and about.dtype not in BITS:
        raise ValueError(f"an array of {about.dtype!r}")
    raw = np.frombuffer(data[_SIZE.size + size :], np.uint8).copy()  # aligned, writable, the reader's own
    array = raw.view(stored_dtype(about.dtype)).reshape(about.shape)
    if about.item == "tensor":
        return tensor_on(array, about.dtype)
    array = as_named(array, about.dtype)
    return array[()] if about.item == "scalar" else array


def as_named(array: np.ndarray, dtype: str) -> np.ndarray:
    """Bits as the dtype they stand for: bfloat16 and float8 are dtypes of the package ml_dtypes.

    Raises:
        InvalidArgument: it is needed and not installed.
    """
    if dtype not in BITS:
        return array
    try:
        ml_dtypes = import_module("ml_dtypes")
    except ImportError as error:
        raise InvalidArgument(
            f"an array of {dtype} needs the package ml_dtypes; the column's values show the bits, and "
            "to_torch() gives a tensor",
            dtype=dtype,
        ) from error
    return array.view(getattr(ml_dtypes, dtype))


_DESCRIPTION = msgspec.msgpack.Decoder(_Description)
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_pack)
_DECODER = msgspec.msgpack.Decoder(ext_hook=_unpack)


def pack_all(name: str, rows: list[Any]) -> list[bytes]:
    """Each row of field `name` as msgpack.

    Raises:
        InvalidArgument: a row holds something that is neither plain data nor a numeric array.
    """
    try:
        return [_ENCODER.encode(row) for row in rows]
    except (TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise InvalidArgument(
            f"field {name!r} has a row that is neither array, number, text, bytes nor plain data: {error}"
        ) from error


def unpack(data: memoryview) -> Any:
    """The row that was packed.

    Raises:
        Corrupt: the bytes are no such row.
    """
    try:
        return _DECODER.decode(data)
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise Corrupt(f"{len(data)} bytes of plain data cannot be read: {error}") from error
