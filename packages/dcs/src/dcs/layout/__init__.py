"""What a model's tensors look like, and which part of each global tensor a rank holds."""

from dcs.layout.tensors import ALIGNMENT, ITEMSIZE, Layout, Name, Shape, TensorSpec, mismatch, of, spec_of

__all__ = ["ALIGNMENT", "ITEMSIZE", "Layout", "Name", "Shape", "TensorSpec", "mismatch", "of", "spec_of"]
