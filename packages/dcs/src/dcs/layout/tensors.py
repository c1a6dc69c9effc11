"""What a rank's tensors look like: names, shapes, dtypes, pieces, and where each lies in a buffer.

Two layouts are equal when they name the same tensors with the same shapes, dtypes and pieces; the order in
which they were given does not count, as tensors are kept in name order. This module needs no torch until
`of` is called.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import xxhash

from dcs.errors import LayoutMismatch
from dcs.layout.dtensors import is_dtensor, local, pieces_of
from dcs.layout.pieces import Name, Piece, Shape, first_fault

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

FLOATING = ("float16", "bfloat16", "float32", "float64")  # what `of(dtype=...)` converts

MAX_BYTES = 1 << 48  # of a layout; addresses and their differences then fit into int64 with room


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a rank.

    Attributes:
        name: as the rank calls it.
        shape: as the rank holds it.
        dtype: by torch's name (`bfloat16`).
        pieces: the boxes of global tensors that it is made of. `()` (the default) means that it is all of the
            global tensor of its own name and shape. What no piece covers is padding: nobody reads or writes
            it.
    """

    name: Name
    shape: Shape
    dtype: str
    pieces: Annotated[tuple[Piece, ...], msgspec.Meta(max_length=1 << 16)] = ()

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(
                f"tensor {self.name!r} has dtype {self.dtype!r}; dcs carries {', '.join(ITEMSIZE)}: convert"
                " it first"
            )
        if self.nbytes > MAX_BYTES:
            raise ValueError(
                f"tensor {self.name!r} has {self.nbytes} bytes, more than the 2**48 that dcs carries"
            )
        fault = first_fault(self.pieces, self.shape) if self.pieces else ""
        if fault:
            raise ValueError(f"tensor {self.name!r} is {self.dtype}{list(self.shape)}, and {fault}")

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        shown = ", ".join(str(piece) for piece in self.pieces[:3])
        rest = f" and {len(self.pieces) - 3} more" if len(self.pieces) > 3 else ""
        return f"{self.dtype}{list(self.shape)}" + (f" of {shown}{rest}" if shown else "")


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Every tensor of a rank, in name order. Make one with `dcs.layout.of`.

    Raises `ValueError` for tensors out of order, and for more than 2**48 bytes.
    """

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=1 << 20)]

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if any(left >= right for left, right in itertools.pairwise(names)):
            raise ValueError(
                "the tensors of a Layout must be in name order, each name once; use dcs.layout.of"
            )
        if self.offsets()[1] > MAX_BYTES:
            raise ValueError(f"a Layout of {self.offsets()[1]} bytes, more than the 2**48 that dcs carries")

    def __repr__(self) -> str:
        return f"<Layout of {len(self.tensors)} tensors, {self.offsets()[1]} bytes: {self.fingerprint}>"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for equal layouts: xxh3-128 over names, shapes, dtypes and pieces, in hexadecimal."""
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


def of(
    source: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    pieces: Mapping[str, Sequence[Piece]] | None = None,
    dtype: torch.dtype | str | None = None,
) -> Layout:
    """The layout of a module's `state_dict`, of a mapping of tensors, or of `(name, tensor)` pairs.

    Tensors on any device count, `meta` included. A DTensor (FSDP2, tensor parallelism of torch) is this
    rank's part of the global tensor of its name; every other tensor is all of it.

    Args:
        pieces: by tensor name, for what is cut, fused or named in another way; see `dcs.layout.shard`,
            `concatenated` and `stacked`.
        dtype: what floating tensors (float16 to float64) travel as, instead of their own dtype.

    Raises:
        LayoutMismatch: for what cannot be carried (no dense tensor, a dtype without a byte view), a name
            given twice, pieces that do not fit their tensor or that are of no tensor given.
    """
    owner: Any = source
    named = owner.state_dict() if hasattr(owner, "state_dict") else owner
    pairs = named.items() if isinstance(named, Mapping) else named
    given = pieces or {}
    wire = None if dtype is None else _dtype_name(dtype)
    specs: dict[str, TensorSpec] = {}
    for name, tensor in pairs:
        if name in specs:
            raise LayoutMismatch(f"tensor {name!r} is given twice; a layout has each name once", name)
        specs[name] = spec_of(name, tensor, given.get(name), wire)
    absent = sorted(given.keys() - specs.keys())
    if absent:
        raise LayoutMismatch(
            f"pieces are given for {absent[0]!r}, which is none of the {len(specs)} tensors",
            absent[0],
            "absent",
        )
    return Layout(tuple(specs[name] for name in sorted(specs)))


def spec_of(
    name: str, tensor: Any, pieces: Sequence[Piece] | None = None, dtype: str | None = None
) -> TensorSpec:
    """The spec of one tensor; raises `LayoutMismatch` when it is not a dense tensor of a known dtype."""
    if is_dtensor(tensor):
        if pieces is None:
            pieces = pieces_of(name, tensor)
        tensor = local(tensor)
    kind = str(getattr(tensor, "layout", type(tensor).__name__))
    if kind != "torch.strided":
        raise LayoutMismatch(
            f"tensor {name!r} is {kind}; dcs carries dense torch tensors: convert it first",
            name,
            kind,
            "torch.strided",
        )
    own = str(tensor.dtype).removeprefix("torch.")
    travels = dtype if dtype is not None and own in FLOATING else own
    if own not in ITEMSIZE:
        raise LayoutMismatch(
            f"tensor {name!r} has dtype {own!r}; dcs carries {', '.join(ITEMSIZE)}: convert it first",
            name,
            own,
            "a dtype with a byte view",
        )
    try:
        return TensorSpec(name, tuple(tensor.shape), travels, tuple(pieces or ()))
    except ValueError as error:
        raise LayoutMismatch(str(error), name, f"{own}{list(tensor.shape)}") from error


def _dtype_name(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in FLOATING:
        raise LayoutMismatch(
            f"dtype {name!r} for floating tensors to travel as; expected one of {', '.join(FLOATING)}",
            "",
            name,
        )
    return name


def mismatch(got: Layout, expected: Layout, who: str) -> LayoutMismatch | None:
    """The first difference as an error, or None for equal layouts; `who` names the owner of `got`."""
    if got == expected:
        return None
    found = {spec.name: spec for spec in got.tensors}
    wanted = {spec.name: spec for spec in expected.tensors}
    differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    name = differing[0]
    left, right = str(found.get(name, "absent")), str(wanted.get(name, "absent"))
    if left == right:  # they differ in a piece that is not shown
        pairs = itertools.zip_longest(found[name].pieces, wanted[name].pieces, fillvalue="absent")
        left, right = next((str(own), str(other)) for own, other in pairs if own != other)
    return LayoutMismatch(
        f"{who}: tensor {name!r} is {left}, expected {right}"
        f" ({len(differing)} of {len(wanted)} tensors differ); make both layouts from the same model",
        name,
        left,
        right,
    )
