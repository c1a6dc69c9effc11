"""A model cut over ranks: each rank's tensors, and what each is a piece of.

A cut is `whole`; `tpN`, Megatron's tensor parallelism over N ranks; `ppN`, whole layers over N stages. With
`fused`, query, key and value are one tensor, and gate and up another, as inference engines keep them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens")
_ROWS = ("o_proj", "down_proj")
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_PART = re.compile(r"(\w+)\.weight$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Part:
    """A box of a global tensor in a rank's tensor: from `start` there, at `at` here, of `extent`."""

    source: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    at: tuple[int, ...]
    extent: tuple[int, ...]


def cut(
    shapes: dict[str, tuple[int, ...]], how: str, rank: int, *, fused: bool = False
) -> dict[str, list[Part]]:
    """By the name of each of this rank's tensors, the parts that it is made of."""
    found: dict[str, list[Part]] = {}
    for name, shape in shapes.items():
        for part in _own(name, shape, how, rank, shapes):
            kind = _kind(name)
            local = name.replace(kind, _FUSED.get(kind, kind)) if fused else name
            before = found.setdefault(local, [])
            rows = sum(other.extent[0] for other in before)
            at = (rows, *(0 for _ in shape[1:]))
            before.append(Part(name, shape, part[0], at, part[1]))
    return found


def local_shape(parts: list[Part]) -> tuple[int, ...]:
    """Of the tensor that is made of them."""
    return (sum(part.extent[0] for part in parts), *parts[0].extent[1:])


def build(tensors: dict[str, torch.Tensor], parts: dict[str, list[Part]]) -> dict[str, torch.Tensor]:
    """A rank's tensors, cut out of the whole ones: what dcs has to bring, without dcs."""
    found: dict[str, torch.Tensor] = {}
    for name, pieces in parts.items():
        found[name] = torch.empty(local_shape(pieces), dtype=torch.bfloat16)
        for piece in pieces:
            source = tensors[piece.source][_box(piece.start, piece.extent)]
            found[name][_box(piece.at, piece.extent)] = source
    return found


def _own(
    name: str, shape: tuple[int, ...], how: str, rank: int, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The box of the tensor that the rank has, if any: start and extent."""
    whole = (0,) * len(shape), shape
    kind = _kind(name)
    if how == "whole":
        yield whole
    elif how.startswith("tp"):
        size = int(how[2:])
        dim = 0 if kind in _COLUMNS else 1 if kind in _ROWS else None
        if dim is None:
            yield whole
        else:
            width = shape[dim] // size
            start, extent = [0] * len(shape), list(shape)
            start[dim], extent[dim] = rank * width, width
            yield tuple(start), tuple(extent)
    elif _stage(name, int(how.removeprefix("pp")), shapes) == rank:
        yield whole


def _stage(name: str, stages: int, shapes: dict[str, tuple[int, ...]]) -> int:
    layer = _LAYER.search(name)
    if layer is None:
        return 0 if _kind(name) == "embed_tokens" else stages - 1
    layers = 1 + max(int(found[1]) for found in map(_LAYER.search, shapes) if found)
    return int(layer[1]) * stages // layers


def _kind(name: str) -> str:
    found = _PART.search(name)
    assert found is not None, name
    return found[1]


def _box(start: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in zip(start, extent, strict=True))
