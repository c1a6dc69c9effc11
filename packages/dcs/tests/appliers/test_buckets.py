"""Which tensors go together, and how they lie in a flat bucket."""

import pytest
import torch
from dcs.appliers.buckets import cut, fill


def test_every_tensor_is_in_one_bucket_and_no_module_is_cut(weights) -> None:
    tensors = dict(sorted(weights(0).items()))
    for limit in (1, 300, 700, 1 << 20):
        buckets = cut(tensors, limit)
        assert sorted(name for bucket in buckets for name in bucket.names) == list(tensors)
        assert all(bucket.nbytes == sum(tensors[name].nbytes for name in bucket.names) for bucket in buckets)
        for layer in (0, 1):
            of = f"model.layers.{layer}.self_attn."
            assert sum(any(name.startswith(of) for name in bucket.names) for bucket in buckets) == 1
    assert len(cut(tensors, 1 << 20)) == 1
    assert len(cut(tensors, 1)) > 4
    with pytest.raises(ValueError, match="at least 1"):
        cut(tensors, 0)


def test_a_bucket_is_filled_without_gaps_and_each_tensor_is_aligned(weights) -> None:
    tensors = weights(0) | {"model.odd.weight": torch.rand(3, 5).t()}
    for bucket in cut(tensors, 400):
        flat = torch.empty(bucket.nbytes, dtype=torch.uint8)
        fill(flat, bucket.names, tensors)
        start = 0
        for name in bucket.names:
            tensor = tensors[name]
            assert start % tensor.element_size() == 0
            seen = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            assert torch.equal(seen, tensor)
            start += tensor.nbytes
        assert start == bucket.nbytes
