"""Many tensors in few messages: which go together, and one flat buffer for each such bucket."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together, the widest dtypes first, so that without padding each is aligned to
    its dtype.
    """

    names: tuple[str, ...]
    nbytes: int


def cut(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most `bucket_bytes`, in the order of `tensors`; a larger module has a bucket of its own.

    Cut only between modules: engines fuse the weights of one (q, k and v; gate and up) while they load, and
    some keep what they have of it only until the end of the call.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    buckets: list[Bucket] = []
    names: list[str] = []
    nbytes = 0
    for module in _modules(tensors):
        size = sum(tensors[name].nbytes for name in module)
        if names and nbytes + size > bucket_bytes:
            buckets.append(_bucket(names, nbytes, tensors))
            names, nbytes = [], 0
        names += module
        nbytes += size
    if names:
        buckets.append(_bucket(names, nbytes, tensors))
    return buckets


def fill(flat: torch.Tensor, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors one behind another into `flat`, uint8 [their bytes]."""
    start = 0
    for name in names:
        tensor = tensors[name].detach()
        place = flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor, non_blocking=True)
        start += tensor.nbytes
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def _modules(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Runs of names with the same first parts: `layers.3.self_attn` of `layers.3.self_attn.q_proj.weight`."""
    run: list[str] = []
    for name in tensors:
        if run and name.split(".")[:-2] != run[0].split(".")[:-2]:
            yield run
            run = []
        run.append(name)
    if run:
        yield run


def _bucket(names: list[str], nbytes: int, tensors: Mapping[str, torch.Tensor]) -> Bucket:
    return Bucket(tuple(sorted(names, key=lambda name: -tensors[name].element_size())), nbytes)
