"""Plain data with tensors in it, as a header in msgpack and one flat buffer: no pickle, no copy on arrival.

Every tensor and array lies in the buffer at a multiple of 64 bytes, once, however often the data shows it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from relax.backends.train.base import Packed

ALIGNMENT = 64
_ARRAY, _TENSOR = 1, 2


def flatten(data: Any) -> tuple[bytes, Tensor]:
    """The header of plain data (dicts, lists, dataclasses, numbers, text; tensors and arrays anywhere in it),
    and a uint8 buffer of what the tensors and arrays hold.
    """
    places: dict[tuple[int, tuple[int, ...], str], int] = {}
    parts: list[tuple[int, np.ndarray]] = []
    end = 0

    def place(array: np.ndarray) -> int:
        nonlocal end
        key = (array.__array_interface__["data"][0], array.strides, f"{array.dtype}{array.shape}")
        if key not in places:
            places[key] = -(-end // ALIGNMENT) * ALIGNMENT
            parts.append((places[key], array))
            end = places[key] + array.nbytes
        return places[key]

    def encode(thing: Any) -> Any:
        if isinstance(thing, Tensor):
            tensor = thing.detach().cpu().contiguous()
            raw = tensor.view(-1).view(torch.uint8).numpy()
            kept.append(raw)
            info = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), place(raw))
            return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(info))
        if isinstance(thing, np.ndarray):
            array = np.ascontiguousarray(thing).reshape(thing.shape)
            kept.append(array)
            info = (array.dtype.str, array.shape, place(array))
            return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(info))
        if isinstance(thing, np.generic):
            return thing.item()
        raise TypeError(f"{type(thing).__name__} {thing!r:.80} cannot be sent to a rank")

    kept: list[np.ndarray] = []  # so that no address is used twice
    header = msgspec.msgpack.encode(data, enc_hook=encode)
    buffer = np.zeros(end, np.uint8)
    for start, array in parts:
        buffer[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return header, torch.from_numpy(buffer)


def unflatten(header: bytes, buffer: Tensor) -> Any:
    """What `flatten` was given, dataclasses as dicts and tuples as lists; its tensors are views of the
    buffer.
    """
    memory = buffer.numpy()

    def decode(code: int, info: memoryview) -> Any:
        dtype, shape, start = msgspec.msgpack.decode(info)
        if code == _ARRAY:
            kind = np.dtype(dtype)
            size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
            return memory[start : start + size].view(kind).reshape(shape)
        kind = getattr(torch, dtype)
        size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        return buffer[start : start + size].view(kind).reshape(shape)

    return msgspec.msgpack.decode(header, ext_hook=decode)


def packed_of(data: Mapping[str, Any]) -> Packed:
    """A micro-batch from what `unflatten` made of one."""
    return Packed(**data)
