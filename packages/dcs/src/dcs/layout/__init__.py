"""What a rank's tensors look like, and which part of each global tensor it holds."""

from dcs.layout.dtensors import local
from dcs.layout.pieces import Name, Piece, Shape, boxed, chunk, concatenated, own_shape, shard, stacked, whole
from dcs.layout.tensors import ALIGNMENT, ITEMSIZE, Layout, TensorSpec, mismatch, of, spec_of

__all__ = [
    "ALIGNMENT",
    "ITEMSIZE",
    "Layout",
    "Name",
    "Piece",
    "Shape",
    "TensorSpec",
    "boxed",
    "chunk",
    "concatenated",
    "local",
    "mismatch",
    "of",
    "own_shape",
    "shard",
    "spec_of",
    "stacked",
    "whole",
]
