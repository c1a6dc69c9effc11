"""What a rank's tensors look like, and which part of each global tensor it holds."""

from dcs.layout.dtensors import local
from dcs.layout.huggingface import huggingface_layout
from dcs.layout.megatron import megatron_layout
from dcs.layout.pieces import Name, Piece, Shape, boxed, chunk, concatenated, own_shape, shard, stacked, whole
from dcs.layout.shape import MegatronShape
from dcs.layout.tensors import ALIGNMENT, ITEMSIZE, Layout, TensorSpec, mismatch, of, spec_of

__all__ = [
    "ALIGNMENT",
    "ITEMSIZE",
    "Layout",
    "MegatronShape",
    "Name",
    "Piece",
    "Shape",
    "TensorSpec",
    "boxed",
    "chunk",
    "concatenated",
    "huggingface_layout",
    "local",
    "megatron_layout",
    "mismatch",
    "of",
    "own_shape",
    "shard",
    "spec_of",
    "stacked",
    "whole",
]
