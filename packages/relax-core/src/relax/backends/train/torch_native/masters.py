"""What the optimizer steps: the model's parameters themselves, float32 copies of them, or a rank's shards.

Each kind has `named`, leaf tensors by Hugging Face name with their gradients in `.grad` once `collect` was
called, and the weights as they travel and are saved.

What no micro-batch of a step needed, such as a tower where no row showed a picture, has a gradient of 0: it
is decayed and moved by its moments, as where gradients lie in buffers that are reduced together.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn


class Masters(Protocol):
    """The weights in the precision they are stepped in."""

    @property
    def named(self) -> Mapping[str, Tensor]: ...

    def collect(self) -> None:
        """Put the gradients that were accumulated into `.grad` of `named`; every one has some, if of 0."""
        ...

    def stepped(self) -> None:
        """`named` was changed: let the model have it."""
        ...

    def drop(self) -> None:
        """Forget the gradients."""
        ...


class OwnParameters:
    """The model's parameters as they are."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.named: Mapping[str, Tensor] = dict(parameters)

    def collect(self) -> None:
        _fill(self.named)

    def stepped(self) -> None:
        """The model has them."""

    def drop(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None


class FloatCopies:
    """float32 copies of parameters in half precision; gradients are added up in float32, micro-batch by
    micro-batch, so that no small one is lost.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.named: Mapping[str, Tensor] = {
            name: parameter.detach().float().requires_grad_() for name, parameter in parameters.items()
        }
        for name, parameter in parameters.items():
            master = self.named[name]
            parameter.register_post_accumulate_grad_hook(lambda p, master=master: _move_gradient(p, master))

    def collect(self) -> None:
        _fill(self.named)  # hooks have done the rest

    @torch.no_grad()
    def stepped(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self.named[name])

    def drop(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self.named[name].grad = None


def _move_gradient(parameter: Tensor, master: Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
    parameter.grad = None


class Shards:
    """A rank's part of each parameter that FSDP2 sharded; shares their memory."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.named: Mapping[str, Tensor] = {
            name: local(parameter.detach()).requires_grad_() for name, parameter in parameters.items()
        }

    def collect(self) -> None:
        for name, parameter in self._parameters.items():
            self.named[name].grad = None if parameter.grad is None else local(parameter.grad)
        _fill(self.named)

    def stepped(self) -> None:
        """The model has them: they are its memory."""

    def drop(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self.named[name].grad = None


def _fill(named: Mapping[str, Tensor]) -> None:
    for tensor in named.values():
        if tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()
