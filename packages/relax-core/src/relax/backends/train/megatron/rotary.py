"""Rotary positions (Su et al., 2021) of tokens that lie packed: each at its place in its own row."""

from typing import Any

import torch
from torch import Tensor, nn

from relax.backends.train.errors import UntrainableModelError

_EXACT = ("default", "linear", "llama3")
"""Kinds whose frequencies neither change with the length of a sequence nor rescale attention."""


def inverse_frequencies(config: Any) -> Tensor:
    """float32 [head size / 2]: radians a position, as transformers computes them for this text config.

    Raises:
        UntrainableModelError: a kind of rotary scaling that Megatron's attention cannot repeat.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind not in _EXACT:
        raise UntrainableModelError(
            f"config.json has rope_type {kind!r}; the megatron backend knows {', '.join(_EXACT)}: use "
            "actor.backend=torch_native, or take the scaling out of config.json for contexts that need none"
        )
    if kind == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        theta = float(parameters["rope_theta"])
        return 1.0 / (theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if scaling != 1.0:
        raise UntrainableModelError(
            f"rope_type {kind!r} scales attention by {scaling}, which the megatron backend cannot"
        )
    return frequencies.float()


class PackedRotary(nn.Module):
    """Stands where GPTModel has its multimodal rotary embedding, which is told where tokens are.

    Megatron's own lays the channels of time, height and width side by side, as Qwen2-VL does; Qwen3-VL takes
    them in turn, so that each axis has high and low frequencies.

    Args:
        frequencies: float32 [head size / 2], radians a position.
        section: how many of them turn with time, height and width; None for a model of text alone.
    """

    frequencies: Tensor
    axes: Tensor

    def __init__(self, frequencies: Tensor, section: tuple[int, int, int] | None = None) -> None:
        super().__init__()
        axes = torch.zeros(len(frequencies), dtype=torch.int64, device=frequencies.device)
        for axis, length in enumerate(section or (0, 0, 0)):
            if axis:
                axes[axis : 3 * length : 3] = axis
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: object = None) -> Tensor:
        """Angles float32 [tokens, 1, 1, head size] of positions int64 [1, tokens], or [3, tokens] along time,
        height and width.
        """
        if len(position_ids) == 1:
            angles = torch.outer(position_ids.flatten().float(), self.frequencies)
        else:
            angles = position_ids.float().index_select(0, self.axes).T * self.frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]
