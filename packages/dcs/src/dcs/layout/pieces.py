"""Pieces: which box of a global tensor lies where in a rank's own tensor, and builders for the usual cuts.

A builder gives a tuple of pieces whose own tensor starts at 0. `concatenated` and `stacked` put several of
them into one tensor, as fused projections and grouped experts are: `concatenated([shard("q", ...),
shard("k", ...)])`. No torch is needed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Extent = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Shape = Annotated[tuple[Extent, ...], msgspec.Meta(max_length=32)]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A box of a global tensor, and where it lies in a rank's own tensor.

    Attributes:
        source: name of the global tensor.
        shape: of the global tensor.
        start: where the box begins in the global tensor.
        at: where it begins in the rank's own tensor. That may have further dimensions in front (grouped
            experts), along which the box has extent 1.
        extent: of the box, in as many dimensions as the global tensor has.
    """

    source: Name
    shape: Shape
    start: Shape
    at: Shape
    extent: Shape

    def __post_init__(self) -> None:
        dimensions = len(self.shape)
        if len(self.start) != dimensions or len(self.extent) != dimensions or len(self.at) < dimensions:
            raise ValueError(
                f"a piece of {self.source!r}{list(self.shape)} has start {list(self.start)}, extent"
                f" {list(self.extent)} and at {list(self.at)}; start and extent need {dimensions} dimensions,"
                " at as many or more"
            )
        for start, extent, size in zip(self.start, self.extent, self.shape, strict=True):
            if start + extent > size:
                raise ValueError(f"the piece {self} reaches outside of the global shape {list(self.shape)}")

    @property
    def own_extent(self) -> Shape:
        """The extent in the dimensions of the rank's own tensor."""
        return (1,) * (len(self.at) - len(self.extent)) + self.extent

    @property
    def size(self) -> int:
        """Elements in the box."""
        return math.prod(self.extent)

    def __str__(self) -> str:
        return f"{self.source}[{box(self.start, self.extent)}] at {list(self.at)}"


def box(start: Sequence[int], extent: Sequence[int]) -> str:
    """A box as it is written in python: `0:4, 8:16`."""
    return ", ".join(f"{first}:{first + length}" for first, length in zip(start, extent, strict=True))


def chunk(length: int, rank: int, size: int) -> tuple[int, int]:
    """`(start, length)` of part `rank` of `size`, by the rule of `torch.chunk`: every part has
    `ceil(length / size)` until nothing is left, so that the last ones are shorter, or empty.
    """
    if not 0 <= rank < size:
        raise ValueError(f"part {rank} of {size}: expected 0 <= rank < size")
    each = -(-length // size)
    start = min(length, rank * each)
    return start, min(each, length - start)


def whole(source: str, shape: Sequence[int]) -> tuple[Piece, ...]:
    """All of a global tensor of this shape."""
    return boxed(source, shape, (0,) * len(shape), shape)


def boxed(
    source: str, shape: Sequence[int], start: Sequence[int], extent: Sequence[int]
) -> tuple[Piece, ...]:
    """One box of a global tensor of this shape: from `start` on, as large as `extent` says.

    Raises `ValueError` for a box that reaches outside of it.
    """
    return (Piece(source, tuple(shape), tuple(start), (0,) * len(shape), tuple(extent)),)


def shard(source: str, shape: Sequence[int], dim: int, rank: int, size: int) -> tuple[Piece, ...]:
    """What rank `rank` of `size` holds of a global tensor cut along `dim`, by the rule of `torch.chunk`.

    Args:
        source: name of the global tensor.
        shape: of the global tensor.

    Raises `ValueError` for a dimension or a rank that there is not.
    """
    dim = _dimension(dim, len(shape), source)
    first, length = chunk(shape[dim], rank, size)
    start = tuple(first if axis == dim else 0 for axis in range(len(shape)))
    extent = tuple(length if axis == dim else full for axis, full in enumerate(shape))
    return boxed(source, shape, start, extent)


def concatenated(parts: Iterable[Iterable[Piece]], dim: int = 0) -> tuple[Piece, ...]:
    """Parts one after another along `dim` of one tensor, as `torch.cat` lays them."""
    found: list[Piece] = []
    offset = 0
    for part in parts:
        pieces = tuple(part)
        if not pieces:
            continue
        axis = _dimension(dim, len(pieces[0].at), pieces[0].source)
        found += [_moved(piece, axis, offset) for piece in pieces]
        offset += own_shape(pieces)[axis]
    return tuple(found)


def stacked(parts: Iterable[Iterable[Piece]]) -> tuple[Piece, ...]:
    """Parts of one shape along a new first dimension of one tensor, as `torch.stack` lays them."""
    return tuple(
        Piece(piece.source, piece.shape, piece.start, (index, *piece.at), piece.extent)
        for index, part in enumerate(parts)
        for piece in part
    )


def own_shape(pieces: Iterable[Piece]) -> Shape:
    """The smallest shape of a rank's own tensor that holds the pieces; `()` for none."""
    ends = [
        tuple(first + length for first, length in zip(piece.at, piece.own_extent, strict=True))
        for piece in pieces
    ]
    return tuple(max(end) for end in zip(*ends, strict=True))


def first_fault(pieces: Sequence[Piece], shape: Shape) -> str:
    """What is wrong with these pieces of a tensor of this shape; empty when nothing is."""
    for piece in pieces:
        if len(piece.at) != len(shape):
            return f"its piece {piece} has {len(piece.at)} dimensions there, the tensor has {len(shape)}"
        for first, length, size in zip(piece.at, piece.own_extent, shape, strict=True):
            if first + length > size:
                return f"its piece {piece} with extent {list(piece.extent)} reaches outside of it"
    pair = _overlap([piece for piece in pieces if piece.size])
    return f"its pieces {pair[0]} and {pair[1]} overlap" if pair else ""


def _overlap(pieces: Sequence[Piece]) -> tuple[Piece, Piece] | None:
    if len(pieces) < 2:
        return None
    # Sweep along the dimension in which most of them begin at places of their own: usually one comparison
    # each.
    dimensions = range(len(pieces[0].at))
    axis = max(dimensions, key=lambda dim: len({piece.at[dim] for piece in pieces}), default=0)
    if not len(dimensions):
        return pieces[0], pieces[1]
    boxes = sorted(
        (
            (piece.at, tuple(map(sum, zip(piece.at, piece.own_extent, strict=True))), piece)
            for piece in pieces
        ),
        key=lambda found: found[0][axis],
    )
    for index, (start, stop, piece) in enumerate(boxes):
        for other_start, other_stop, other in boxes[index + 1 :]:
            if other_start[axis] >= stop[axis]:
                break
            if all(
                left < right_stop and right < left_stop
                for left, left_stop, right, right_stop in zip(
                    start, stop, other_start, other_stop, strict=True
                )
            ):
                return piece, other
    return None


def _moved(piece: Piece, axis: int, offset: int) -> Piece:
    at = tuple(first + offset if dim == axis else first for dim, first in enumerate(piece.at))
    return Piece(piece.source, piece.shape, piece.start, at, piece.extent)


def _dimension(dim: int, dimensions: int, source: str) -> int:
    if not -dimensions <= dim < dimensions:
        raise ValueError(f"dimension {dim} of {source!r}, which has {dimensions}")
    return dim % dimensions
