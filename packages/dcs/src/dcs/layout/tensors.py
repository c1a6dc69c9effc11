"""What a model's tensors look like: names, shapes, dtypes, and where each lies in a flat buffer.

Two layouts are equal when they name the same tensors with the same shapes and dtypes; the order in which they
were given does not count, as tensors are kept in name order. This module needs no torch until `of` is called.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import xxhash

from dcs.errors import LayoutMismatch

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64  # bytes; a cache line, and more than any dtype or SIMD load asks for

# Size in bytes of every dtype that can be viewed over raw bytes; names are torch's own.
ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Extent = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Shape = Annotated[tuple[Extent, ...], msgspec.Meta(max_length=32)]


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor: its name, its global shape, and its dtype by torch's name (`bfloat16`)."""

    name: Name
    shape: Shape
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(
                f"tensor {self.name!r} has dtype {self.dtype!r}; dcs carries {', '.join(ITEMSIZE)}: convert"
                " it first"
            )
        if self.nbytes > 1 << 48:
            raise ValueError(
                f"tensor {self.name!r} has {self.nbytes} bytes, more than the 2**48 that dcs carries"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Layout(msgspec.Struct, frozen=True):
    """Every tensor of a model, in name order. Make one with `dcs.layout.of`."""

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=1 << 20)]

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if any(left >= right for left, right in itertools.pairwise(names)):
            raise ValueError(
                "the tensors of a Layout must be in name order, each name once; use dcs.layout.of"
            )

    @property
    def fingerprint(self) -> str:
        """Equal for equal layouts: xxh3-128 over names, shapes and dtypes, in hexadecimal."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self))

    def offsets(self) -> tuple[list[int], int]:
        """Where each tensor starts in a flat buffer (64-byte aligned), and the buffer's length in bytes."""
        starts: list[int] = []
        end = 0
        for spec in self.tensors:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            starts.append(start)
            end = start + spec.nbytes
        return starts, end


def of(source: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> Layout:
    """The layout of a module's `state_dict`, of a mapping of tensors, or of `(name, tensor)` pairs.

    Tensors on any device count, `meta` included. Raises `LayoutMismatch` for what cannot be carried:
    something that is no dense tensor, a dtype without a byte view, a name given twice.
    """
    owner: Any = source
    named = owner.state_dict() if hasattr(owner, "state_dict") else owner
    pairs = named.items() if isinstance(named, Mapping) else named
    specs: dict[str, TensorSpec] = {}
    for name, tensor in pairs:
        if name in specs:
            raise LayoutMismatch(f"tensor {name!r} is given twice; a layout has each name once", name)
        specs[name] = spec_of(name, tensor)
    return Layout(tuple(specs[name] for name in sorted(specs)))


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """The spec of one tensor; raises `LayoutMismatch` when it is not a dense tensor of a known dtype."""
    kind = str(getattr(tensor, "layout", type(tensor).__name__))
    if kind != "torch.strided":
        raise LayoutMismatch(
            f"tensor {name!r} is {kind}; dcs carries dense torch tensors: convert it first",
            name,
            kind,
            "torch.strided",
        )
    try:
        return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    except ValueError as error:
        raise LayoutMismatch(str(error), name, str(tensor.dtype), "a dtype with a byte view") from error


def mismatch(got: Layout, expected: Layout, who: str) -> LayoutMismatch | None:
    """The first difference as an error, or None for equal layouts; `who` names the owner of `got`."""
    if got == expected:
        return None
    found = {spec.name: spec for spec in got.tensors}
    wanted = {spec.name: spec for spec in expected.tensors}
    differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    name = differing[0]
    left, right = str(found.get(name, "absent")), str(wanted.get(name, "absent"))
    return LayoutMismatch(
        f"{who}: tensor {name!r} is {left}, expected {right}"
        f" ({len(differing)} of {len(wanted)} tensors differ); make both layouts from the same model",
        name,
        left,
        right,
    )
