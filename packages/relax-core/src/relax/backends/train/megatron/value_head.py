"""The critic's output: one value a token, in place of the output layer. As in Hugging Face's `score`."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

HF_NAME = "score.weight"


class ValueHead(nn.Module):
    """value = hidden @ weight. Every tensor-parallel rank has all of it. Starts at 0: nothing is expected."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """float32 [tokens] of [tokens, hidden]."""
        return functional.linear(hidden, self.weight)[:, 0].float()
