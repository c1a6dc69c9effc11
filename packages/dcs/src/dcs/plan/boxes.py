"""Boxes of global tensors: where they lie in a layout's flat buffer, and their arithmetic.

A box is `(start, stop)`, two tuples of as many numbers as the tensor has dimensions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Container
from typing import NamedTuple

from dcs.layout import ITEMSIZE, Layout, Shape

Box = tuple[Shape, Shape]
Row = tuple[int, int, int, int, int, int]


class Held(NamedTuple):
    """A box of a global tensor, as a rank holds it.

    Attributes:
        start, stop: the box.
        origin: address in the flat buffer that index 0 of the global tensor would have, in bytes.
        strides: bytes from one index to the next, for each dimension of the global tensor.
        shape: of the global tensor.
        dtype: by torch's name.
        tensor: the rank's own tensor that it lies in.
        source: name of the global tensor.
    """

    start: Shape
    stop: Shape
    origin: int
    strides: Shape
    shape: Shape
    dtype: str
    tensor: str
    source: str

    def address(self, start: Shape) -> int:
        """Where an element lies in the flat buffer."""
        return self.origin + sum(map(int.__mul__, start, self.strides))


def held(layout: Layout, names: Container[str] | None = None) -> list[Held]:
    """Every box that a rank with this layout holds, in the order of its tensors; empty ones are left out.

    `names`: of the global tensors wanted; all of them when it is None.
    """
    found: list[Held] = []
    starts, _ = layout.offsets()
    for spec, base in zip(layout.tensors, starts, strict=True):
        strides = dense_strides(spec.shape, ITEMSIZE[spec.dtype])
        if not spec.pieces:
            if 0 not in spec.shape and (names is None or spec.name in names):
                zero = (0,) * len(spec.shape)
                found.append(
                    Held(zero, spec.shape, base, strides, spec.shape, spec.dtype, spec.name, spec.name)
                )
            continue
        for piece in spec.pieces:
            if 0 in piece.extent or not (names is None or piece.source in names):
                continue
            own = strides[len(strides) - len(piece.shape) :]
            origin = base + sum(map(int.__mul__, piece.at, strides)) - sum(map(int.__mul__, piece.start, own))
            stop = tuple(map(int.__add__, piece.start, piece.extent))
            found.append(
                Held(piece.start, stop, origin, own, piece.shape, spec.dtype, spec.name, piece.source)
            )
    return found


@functools.lru_cache(maxsize=4096)
def dense_strides(shape: Shape, itemsize: int) -> Shape:
    """Strides in bytes of a C-contiguous tensor."""
    strides: list[int] = []
    step = itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def extent(start: Shape, stop: Shape) -> Shape:
    """Lengths of the sides."""
    return tuple(map(int.__sub__, stop, start))


def volume(start: Shape, stop: Shape) -> int:
    """Elements in the box."""
    return math.prod(map(int.__sub__, stop, start))


def intersection(left: Box, right: Box) -> Box | None:
    """What both have, if anything."""
    start = tuple(map(max, left[0], right[0]))
    stop = tuple(map(min, left[1], right[1]))
    return None if any(map(int.__ge__, start, stop)) else (start, stop)


def difference(box: Box, inner: Box) -> list[Box]:
    """`box` without `inner`, which lies within it: at most two boxes for each dimension, none overlapping."""
    rest: list[Box] = []
    start, stop = list(box[0]), list(box[1])
    for dim, (first, last) in enumerate(zip(*inner, strict=True)):
        if start[dim] < first:
            rest.append((tuple(start), (*stop[:dim], first, *stop[dim + 1 :])))
        if last < stop[dim]:
            rest.append(((*start[:dim], last, *start[dim + 1 :]), tuple(stop)))
        start[dim], stop[dim] = first, last
    return rest


def split(box: Box, itemsize: int, wanted: int, grain: int) -> tuple[Box, Box]:
    """The box in two, the first of about `wanted` bytes: as near as slices of at most `grain` bytes allow.

    Cut along the outermost dimension that has such slices, so that the parts stay contiguous if the whole is.
    The box has at least two elements.
    """
    start, stop = box
    sides = extent(start, stop)
    size = math.prod(sides) * itemsize
    fine = [dim for dim, side in enumerate(sides) if side > 1 and size // side <= grain]
    dim = fine[0] if fine else max(range(len(sides)), key=sides.__getitem__)
    place = start[dim] + min(max(round(wanted * sides[dim] / size), 1), sides[dim] - 1)
    return (start, (*stop[:dim], place, *stop[dim + 1 :])), ((*start[:dim], place, *start[dim + 1 :]), stop)


@functools.lru_cache(maxsize=16384)
def rows(sides: Shape, source: Shape, destination: Shape, itemsize: int) -> tuple[Row, ...]:
    """Blocks that copy a box with these sides between memories with these strides, from address 0 to address
    0.

    Dimensions that are contiguous on both sides become one; what is left over beside the run and the longest
    other dimension is written out, a row each.
    """
    run = itemsize
    outer: list[tuple[int, int, int]] = []  # innermost first: length, source stride, destination stride
    for length, left, right in zip(reversed(sides), reversed(source), reversed(destination), strict=True):
        if length == 1:
            continue
        if not outer and left == right == run:
            run *= length
        elif outer and left == outer[-1][0] * outer[-1][1] and right == outer[-1][0] * outer[-1][2]:
            outer[-1] = (outer[-1][0] * length, outer[-1][1], outer[-1][2])
        else:
            outer.append((length, left, right))
    if not outer:
        return ((0, run, 0, run, run, 1),)
    counted = max(range(len(outer)), key=lambda dim: outer[dim][0])
    count, left, right = outer.pop(counted)
    found: list[Row] = []
    for index in itertools.product(*(range(length) for length, _, _ in reversed(outer))):
        places = list(zip(index, reversed(outer), strict=True))
        begin = sum(place * step for place, (_, step, _) in places)
        end = sum(place * step for place, (_, _, step) in places)
        found.append((begin, left, end, right, run, count))
    return tuple(found)
