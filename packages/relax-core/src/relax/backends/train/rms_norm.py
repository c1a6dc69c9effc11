"""RMSNorm with its gradient worked out by hand: about half the passes over memory that autograd makes.

The norms are a fifth of a training step of a small model on a CPU.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # The operations of transformers in their order: the output is its own bit for bit.
        scale = x.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grad_outputs
        normed, scale, weight = ctx.saved_tensors
        size = len(weight)
        # With n = x * scale and p = grad * n, the gradient of weight is sum(p), that of x is
        # scale * (grad * weight - n * mean(p * weight)).
        products = (grad * normed).reshape(-1, size)
        mean = torch.mv(products, weight).div_(-size).view(scale.shape)
        return (grad * weight).addcmul_(normed, mean).mul_(scale), products.sum(0), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x."""
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def use_fused_norms(model: nn.Module) -> int:
    """Let the Qwen3 norms of a float32 model run by `rms_norm`; returns how many there are.

    Those of another dtype stay as they are: transformers takes the mean in float32 whatever the dtype.
    """
    norms = [m for m in model.modules() if type(m) is Qwen3RMSNorm and m.weight.dtype == torch.float32]
    for norm in norms:
        norm.forward = partial(_forward, norm)
    return len(norms)


def _forward(norm: Qwen3RMSNorm, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)
