"""Activations that are computed again in the backward pass, layer by layer, instead of being kept."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def recompute_layers(model: nn.Module) -> int:
    """Have every layer that transformers knows as one be computed again; how many there are.

    Not by transformers' own switch, which only works in training mode.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        layer.forward = _again(layer.forward)  # type: ignore[method-assign]
    return len(layers)


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed
