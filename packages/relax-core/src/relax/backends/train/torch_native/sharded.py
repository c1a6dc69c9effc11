"""FSDP2: every rank holds a part of each weight, gradient and moment, and gathers a layer while it runs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dcs
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.utils import get_total_norm
from transformers.modeling_layers import GradientCheckpointingLayer

from relax.backends.train.adamw import ClippedAdamW
from relax.backends.train.base import StateTree
from relax.backends.train.state_files import read_trainer_state
from relax.backends.train.torch_native.hollow import emptied, fill_shards, hollow_model
from relax.backends.train.torch_native.masters import Masters, Shards, local
from relax.backends.train.torch_native.policy import Policy
from relax.backends.train.torch_native.replica import Replica, weight_of
from relax.backends.train.torch_native.shard_files import Box
from relax.backends.train.torch_native.trainer import RNG, WEIGHT, TorchNative

distributed: Any = torch.distributed


class Sharded(Replica):
    """A rank's shards. Stepped in float32 where the settings ask for it, and gathered in the dtype that is
    computed in; gradients are added over ranks in float32.
    """

    compute_dtype: torch.dtype = torch.float32
    bytes_read: int | None = None
    """Of the folder's weights by this rank; None where it had to load all of them."""

    def _loaded(self, dtype: torch.dtype, seed: int) -> Any:
        """The model without its weights, of which `_spread` reads this rank's; all of it where the files do
        not hold it tensor by tensor.
        """
        hollow = hollow_model(self.folder, dtype)
        self._is_hollow = hollow is not None
        return hollow if self._is_hollow else super()._loaded(dtype, seed)

    def _spread(self, policy: Policy) -> nn.Module:
        policy.touch_everything = True
        if self._is_hollow:
            emptied(policy)
        mesh = init_device_mesh(self.device.type, (distributed.get_world_size(),))
        precision = MixedPrecisionPolicy(
            param_dtype=self.compute_dtype,
            reduce_dtype=torch.promote_types(self.compute_dtype, torch.float32),
        )
        for layer in _layers(policy.model):
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # Sums, not means, and by a plain sum: gloo has no other.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if self._is_hollow:
            self.bytes_read = fill_shards(self.model, self.folder, self.device)
            policy.to(self.device)  # buffers
        register_fsdp_forward_method(policy, "require_plain_head")
        policy.require_plain_head()
        held = {name: p for name, p in self.model.named_parameters()}
        self._starts = {
            spec.name: spec.pieces[0].start for spec in dcs.layout.of(held).tensors if spec.pieces
        }
        self._shapes = {name: tuple(parameter.shape) for name, parameter in held.items()}
        return policy

    def _make_masters(self) -> Masters:
        return Shards(self._trained())

    def _make_optimizer(self) -> ClippedAdamW:
        return ClippedAdamW(self._masters.named, self.settings, self._total_norm)

    def _total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Over the shards of all ranks."""
        own = get_total_norm([g for g in gradients if g.numel()]) if gradients else torch.zeros(())
        squares = own.double().square().to(self.device)
        distributed.all_reduce(squares)
        return squares.sqrt()

    def _step(self, optimizer: ClippedAdamW, scale: float, lr: float) -> float:
        return TorchNative._step(self, optimizer, scale, lr)

    # Its part of a state: boxes

    def parts(self, owns: Callable[[str], bool]) -> Iterator[tuple[str, Tensor, Box]]:
        for key, tensor in self._saved().items():
            weight = weight_of(key)
            part = local(tensor)
            box = self._box(key, weight)
            if box is None:
                if owns(weight):
                    yield key, part, Box(tuple(part.shape), (0,) * part.ndim)
            elif part.numel():
                yield key, part, box

    def own_box(self, key: str, shape: Sequence[int], read: Callable[..., Tensor]) -> Tensor:
        weight = weight_of(key)
        box = self._box(key, weight)
        if box is None or box.shape != tuple(shape):  # a state of another model is refused where it is taken
            return read(key)
        return read(key, box.start, tuple(local(self._weights()[weight]).shape))

    def _box(self, key: str, weight: str) -> Box | None:
        """Where this rank's part of a saved tensor lies; None where every rank has all of it."""
        part, _, name = key.partition(".")
        if weight not in self._starts or (part != WEIGHT and name.startswith("step.")):
            return None
        return Box(self._shapes[weight], tuple(self._starts[weight]))

    def load_whole(self, folder: Path) -> None:
        whole = read_trainer_state(folder)
        cut = {
            key: tensor
            if key.startswith(f"{RNG}.")
            else self.own_box(key, tuple(tensor.shape), _boxes_of(tensor))
            for key, tensor in whole.tensors.items()
        }
        self.load_state(StateTree(cut, whole.data))

    def _weights(self) -> dict[str, Tensor]:
        return {name: local(weight) for name, weight in super()._weights().items()}

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.base_tensors():
            merged = tensor if self._adapters is None else self._adapters.merged_whole(name, tensor)
            whole = getattr(merged, "full_tensor", None)
            yield name, merged if whole is None else whole()


def _boxes_of(tensor: Tensor) -> Callable[..., Tensor]:
    def read(key: str, start: Sequence[int] | None = None, extent: Sequence[int] | None = None) -> Tensor:
        if start is None or extent is None:
            return tensor
        return tensor[tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))]

    return read


def _layers(model: nn.Module) -> list[nn.Module]:
    """What is gathered and let go of at a time: the layers of the language model. A vision tower stays with
    the root, as a rank whose rows show no picture does not run it.
    """
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    return [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
