"""A tree of tensors and plain data as one flat run of bytes and a description of it, and back, bit for bit.

The description is msgpack: scalars as they are, everything else as an array that starts with a tag. Nothing
in it is code: a tree that comes back is made of tensors, arrays and the built-in containers only.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from dcs.errors import ProtocolError
from dcs.replicas.errors import UnsupportedLeaf

ALIGNMENT = 64  # bytes; more than any dtype or SIMD load asks for
MAX_DEPTH = 100

_LIST, _TUPLE, _DICT, _ORDERED, _SIZE = 0, 1, 2, 3, 4
_INTEGER, _COMPLEX, _DTYPE, _DEVICE = 5, 6, 7, 8
_TENSOR, _ARRAY, _NUMPY_SCALAR, _GENERATOR = 9, 10, 11, 12
_REQUIRES_GRAD, _PARAMETER = 1, 2  # flags of a tensor

type Tree = Any
type _Path = tuple[_Path, Any, bool] | None  # what it is in, its key there, whether that is an index


type Place = tuple[int, int, torch.dtype | None, tuple[int, ...]]
"""Where bytes of the tree go, and as what: start, bytes, dtype (None for plain bytes), shape.

A plain tuple, as one is made for every tensor of every save, while training waits.
"""


@dataclass(frozen=True, slots=True)
class Flat:
    """A flattened tree.

    Attributes:
        structure: describes it.
        places: of what fills its bytes; equal for trees that are laid out alike.
        sources: what goes there: a torch tensor, or a numpy array of uint8.
        nbytes: of all of them, with what lies between.
    """

    structure: bytes
    places: list[Place]
    sources: list[torch.Tensor | np.ndarray]
    nbytes: int


def flatten(tree: Tree) -> Flat:
    """Describe a tree and list the bytes it is made of; nothing is copied.

    A tree is dicts (any order, keys of any scalar or tuple of scalars), `OrderedDict`s (with a module's
    `_metadata`), lists, tuples, `torch.Size`, and in them: torch tensors and parameters of any dense dtype
    and device, `torch.Generator`s, numpy arrays and scalars, None, bool, int of any size, float, complex,
    str, bytes, `torch.dtype` and `torch.device`. A tensor that occurs twice is kept once, and comes back as
    one. Strides are not kept: a tensor comes back contiguous.

    Raises `UnsupportedLeaf`, naming the path, for anything else: what would have to be pickled.
    """
    return _Flattener().run(tree)


def rebuild(structure: bytes, memory: np.ndarray, device: str | torch.device | None = None) -> Tree:
    """The tree of a `structure`, over its bytes.

    Args:
        structure: as `flatten` made it.
        memory: uint8 [nbytes], writable. Tensors that stay on the CPU lie in it.
        device: where all tensors go; None leaves each on the device it came from.

    Raises `ProtocolError` when the two do not fit together, and what torch raises for a device that is not
    here.
    """
    try:
        root = msgspec.msgpack.decode(structure)
        return _Rebuilder(memory, device).value(root)
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"the description of a tree cannot be read: {error}") from error


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_plain_key(part) for part in key)
    return key is None or type(key) in (bool, int, float, str, bytes)


class _Flattener:
    def __init__(self) -> None:
        self._places: list[Place] = []
        self._sources: list[torch.Tensor | np.ndarray] = []
        self._nbytes = 0
        self._seen: dict[int, list[tuple[torch.Tensor, int]]] = {}  # by address: who begins there, and where
        self._devices: dict[torch.device, str] = {}

    def run(self, tree: Tree) -> Flat:
        root = self._value(tree, None, 0)
        try:
            structure = msgspec.msgpack.encode(root)
        except UnicodeEncodeError as error:
            raise UnsupportedLeaf(
                f"a string of the tree is no valid Unicode ({error}); keep it as bytes"
            ) from error
        return Flat(structure, self._places, self._sources, self._nbytes)

    def _place(
        self,
        source: torch.Tensor | np.ndarray,
        nbytes: int,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] = (),
    ) -> int:
        start = self._nbytes
        if nbytes:
            self._places.append((start, nbytes, dtype, shape))
            self._sources.append(source)
            self._nbytes = start + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return start

    def _value(self, value: Any, path: _Path, depth: int) -> Any:
        kind = type(value)
        if kind in _TENSORS:
            return self._tensor(value, path)
        if kind in _AS_THEY_ARE:
            return value
        if kind is int:
            if -(1 << 63) <= value < 1 << 64:
                return value
            return [_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
        if isinstance(value, torch.Tensor):
            raise UnsupportedLeaf(
                f"{_name(path)} is a {kind.__module__}.{kind.__qualname__}; give its plain local tensor"
                " (for a DTensor: `.to_local()`)"
            )
        encode = _CONTAINERS.get(kind)
        if encode is not None:
            if depth > MAX_DEPTH:
                raise UnsupportedLeaf(
                    f"{_name(path)} is nested deeper than {MAX_DEPTH}; is the tree a cycle?"
                )
            return encode(self, value, path, depth + 1)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        encode_scalar = _SCALARS.get(kind)
        if encode_scalar is not None:
            return encode_scalar(value)
        if isinstance(value, torch.Generator):
            state = value.get_state()
            start = self._place(state, state.nbytes, state.dtype, state.shape)
            return [_GENERATOR, start, state.nbytes, str(value.device)]
        raise UnsupportedLeaf(
            f"{_name(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be kept without"
            " pickling it; give tensors, numpy arrays, and plain data in dicts, lists and tuples"
        )

    def _sequence(self, tag: int, value: Any, path: _Path, depth: int) -> list[Any]:
        return [tag, *[self._value(item, (path, index, True), depth) for index, item in enumerate(value)]]

    def _items(self, value: Any, path: _Path, depth: int) -> list[Any]:
        flat: list[Any] = []
        for key, item in value.items():
            if type(key) is not str and not _is_plain_key(key):
                raise UnsupportedLeaf(
                    f"a key of {_name(path)} is {key!r}, a {type(key).__qualname__}; keys are str, int,"
                    " float, bool, bytes, None, and tuples of them"
                )
            flat.append(key if type(key) is str else self._value(key, path, depth))
            flat.append(self._value(item, (path, key, False), depth))
        return flat

    def _list(self, value: list[Any], path: _Path, depth: int) -> list[Any]:
        return self._sequence(_LIST, value, path, depth)

    def _tuple(self, value: tuple[Any, ...], path: _Path, depth: int) -> list[Any]:
        return self._sequence(_TUPLE, value, path, depth)

    def _dict(self, value: dict[Any, Any], path: _Path, depth: int) -> list[Any]:
        return [_DICT, *self._items(value, path, depth)]

    def _ordered(self, value: "OrderedDict[Any, Any]", path: _Path, depth: int) -> list[Any]:
        metadata = self._value(getattr(value, "_metadata", None), (path, "_metadata", False), depth)
        return [_ORDERED, metadata, *self._items(value, path, depth)]

    def _tensor(self, value: torch.Tensor, path: _Path) -> list[Any]:
        # Runs for every tensor of every save, while training waits: each look at a tensor is some 50 ns.
        device = "cpu" if value.is_cpu else self._device(value.device)
        dtype, shape = value.dtype, value.shape
        if value.layout is not torch.strided or value.is_quantized or device == "meta":
            raise UnsupportedLeaf(
                f"{_name(path)} is a {value.layout} tensor of {dtype} on {device}; only dense ones with"
                " memory of their own are kept"
            )
        flags = _PARAMETER if type(value) is torch.nn.Parameter else 0
        if value.requires_grad:
            flags |= _REQUIRES_GRAD
        nbytes = value.nbytes
        start = self._nbytes
        if nbytes:
            address = value.data_ptr()
            here = self._seen.get(address)
            if here is None:
                self._seen[address] = [(value, self._place(value, nbytes, dtype, shape))]
            else:
                known = next((place for other, place in here if _same(value, other)), None)
                if known is None:
                    here.append((value, self._place(value, nbytes, dtype, shape)))
                else:
                    start = known
        return [_TENSOR, start, _dtype_name(dtype), shape, device, flags]

    def _device(self, device: torch.device) -> str:
        name = self._devices.get(device)
        if name is None:
            name = self._devices[device] = str(device)
        return name

    def _array(self, value: Any, path: _Path) -> list[Any]:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.fields or np.dtype(array.dtype.str) != array.dtype:
            raise UnsupportedLeaf(
                f"{_name(path)} is a numpy array of {array.dtype}; only plain numbers, strings and times are"
                " kept"
            )
        source = np.ascontiguousarray(array).reshape(-1)
        start = self._place(source.view(np.uint8), source.nbytes) if source.nbytes else 0
        tag = _ARRAY if type(value) is np.ndarray else _NUMPY_SCALAR
        return [tag, start, array.dtype.str, array.shape]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that begin at one address are one: what comes back may stand for both."""
    return (
        one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
        and one.requires_grad == other.requires_grad
        and (type(one) is torch.nn.Parameter) == (type(other) is torch.nn.Parameter)
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_AS_THEY_ARE = frozenset({type(None), bool, float, str, bytes})
_CONTAINERS: dict[type, Callable[[_Flattener, Any, _Path, int], list[Any]]] = {
    list: _Flattener._list,
    tuple: _Flattener._tuple,
    dict: _Flattener._dict,
    OrderedDict: _Flattener._ordered,
}
_SCALARS: dict[type, Callable[[Any], list[Any]]] = {
    complex: lambda value: [_COMPLEX, value.real, value.imag],
    torch.Size: lambda value: [_SIZE, *value],
    torch.dtype: lambda value: [_DTYPE, _dtype_name(value)],
    torch.device: lambda value: [_DEVICE, str(value)],
}


def _name(path: _Path) -> str:
    text = ""
    while path is not None:
        path, key, is_index = path
        text = (f"[{key}]" if is_index else f".{key}") + text
    return repr(text.removeprefix(".")) if text else "the tree"


class _Rebuilder:
    def __init__(self, memory: np.ndarray, device: str | torch.device | None) -> None:
        self._memory = memory
        self._device = None if device is None else torch.device(device)
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        tag, *rest = node
        if tag == _LIST:
            return [self.value(item) for item in rest]
        if tag == _TUPLE:
            return tuple(self.value(item) for item in rest)
        if tag == _DICT:
            return self._items({}, rest)
        if tag == _ORDERED:
            restored: Any = self._items(OrderedDict(), rest[1:])
            metadata = self.value(rest[0])
            if metadata is not None:
                restored._metadata = metadata
            return restored
        if tag == _TENSOR:
            return self._tensor(*rest)
        return self._other(tag, rest)

    def _other(self, tag: int, rest: list[Any]) -> Any:
        if tag == _INTEGER:
            return int.from_bytes(rest[0], "little", signed=True)
        if tag == _COMPLEX:
            return complex(*rest)
        if tag == _SIZE:
            return torch.Size(rest)
        if tag == _DTYPE:
            return _dtype(rest[0])
        if tag == _DEVICE:
            return torch.device(rest[0])
        if tag in (_ARRAY, _NUMPY_SCALAR):
            start, name, shape = rest
            dtype = np.dtype(name)
            if dtype.hasobject:
                raise TypeError(f"{name!r} would be an array of pointers")
            raw = self._bytes(start, _count(shape) * dtype.itemsize).copy()
            array = np.ndarray(tuple(shape), dtype, raw) if raw.nbytes else np.empty(tuple(shape), dtype)
            return array if tag == _ARRAY else array[()]
        if tag == _GENERATOR:
            start, nbytes, device = rest
            generator = torch.Generator(torch.device(device) if self._device is None else self._device)
            generator.set_state(torch.from_numpy(self._bytes(start, nbytes)))
            return generator
        raise ValueError(f"unknown tag {tag!r}")

    def _items(self, into: Any, flat: list[Any]) -> Any:
        for key, item in zip(flat[::2], flat[1::2], strict=True):
            into[self.value(key)] = self.value(item)
        return into

    def _bytes(self, start: int, nbytes: int) -> np.ndarray:
        if not 0 <= start <= start + nbytes <= self._memory.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} of {self._memory.nbytes}")
        return self._memory[start : start + nbytes]

    def _tensor(self, start: int, name: str, shape: list[int], device: str, flags: int) -> torch.Tensor:
        place = (start, name, tuple(shape), device, flags)
        known = self._tensors.get(place) if _count(shape) else None
        if known is not None:
            return known
        dtype = _dtype(name)
        nbytes = _count(shape) * dtype.itemsize
        if nbytes:
            # A storage of its own, that begins with the tensor: `set_rng_state` takes no notice of an offset.
            tensor = torch.from_numpy(self._bytes(start, nbytes)).view(dtype).view(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        tensor = tensor.to(torch.device(device) if self._device is None else self._device)
        needs_grad = bool(flags & _REQUIRES_GRAD)
        if flags & _PARAMETER:
            tensor = torch.nn.Parameter(tensor, requires_grad=needs_grad)
        else:
            tensor.requires_grad_(needs_grad)
        self._tensors[place] = tensor
        return tensor


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(shape: list[int]) -> int:
    if any(type(extent) is not int or extent < 0 for extent in shape):
        raise ValueError(f"{shape} is no shape")
    return math.prod(shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype
