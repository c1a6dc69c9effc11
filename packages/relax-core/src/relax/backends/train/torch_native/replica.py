"""A whole copy of the model on every rank: gradients are added up over the ranks before each step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from relax.backends.train.adamw import ClippedAdamW
from relax.backends.train.state_files import read_trainer_state
from relax.backends.train.torch_native.shard_files import Box
from relax.backends.train.torch_native.trainer import TorchNative

distributed: Any = torch.distributed

BUCKET_BYTES = 32 << 20
"""Gradients travel in buckets of about so many bytes: a message a tensor would cost its latency each time."""


class Replica(TorchNative):
    """One of several equal trainers. What one of them skips, all of them skip."""

    def _step(self, optimizer: ClippedAdamW, scale: float, lr: float) -> float:
        self._masters.collect()
        self._add_up()
        return super()._step(optimizer, scale, lr)

    @torch.no_grad()
    def _add_up(self) -> None:
        """Sum gradients over the ranks."""
        bucket: list[Tensor] = []
        size = 0
        for parameter in self._masters.named.values():
            assert parameter.grad is not None, "collect gives all of them one"
            bucket.append(parameter.grad)
            size += parameter.grad.nbytes
            if size >= BUCKET_BYTES:
                _reduce(bucket)
                bucket, size = [], 0
        if bucket:
            _reduce(bucket)

    # Its part of a state: all of it, of which each rank writes a share

    def parts(self, owns: Callable[[str], bool]) -> Iterator[tuple[str, Tensor, Box]]:
        """What this rank saves: the tensors of the weights that it owns."""
        for key, tensor in self._saved().items():
            if owns(weight_of(key)):
                yield key, tensor, Box(tuple(tensor.shape), (0,) * tensor.ndim)

    def own_box(self, key: str, shape: Sequence[int], read: Callable[..., Tensor]) -> Tensor:
        """What this rank holds of a saved tensor: all of it."""
        return read(key)

    def load_whole(self, folder: Path) -> None:
        """Go on from what a single trainer saved."""
        self.load_state(read_trainer_state(folder))

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The merged weights by Hugging Face name, one after the other, the same on every rank."""
        yield from self.tensors()

    @property
    def data(self) -> Mapping[str, Any]:
        """Plain data of a state."""
        return self._data()

    def take(
        self, data: Mapping[str, Any], parts: Mapping[str, Mapping[str, Tensor]], random: Tensor
    ) -> None:
        """Go on from this rank's boxes."""
        self._take(data, parts, random)

    def saved_weights(self) -> list[str]:
        """Names of the weights that a state holds."""
        return list(self._weights())

    def require_no_gradient(self, verb: str) -> None:
        """Raise StepOrderError between a gradient and its step."""
        self._require_no_gradient(verb)


def weight_of(key: str) -> str:
    """The weight that a saved tensor belongs to: `optimizer.exp_avg.a.weight` to `a.weight`."""
    part, _, name = key.partition(".")
    return name if part == "weight" else name.partition(".")[2]


def _reduce(gradients: Sequence[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()
