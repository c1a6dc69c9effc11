"""A Qwen3 mixture of experts as plain functions: which experts a token goes to, told or followed."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


class Mixture:
    """The routed block of one layer; its weights stay the model's parameters.

    Args:
        block: a Qwen3MoeSparseMoeBlock, or that of Qwen3-VL or a Qwen3-Omni thinker.
    """

    def __init__(self, block: Any) -> None:
        self._gate, self._experts = block.gate, block.experts
        self._top_k: int = block.gate.top_k
        self._normalised: bool = getattr(block.gate, "norm_topk_prob", True)  # Qwen3-VL's always are

    def choose(self, hidden: Tensor) -> Tensor:
        """Of [tokens, hidden] the experts of each token, best first: int64 [tokens, top_k]."""
        return torch.topk(self._scores(hidden), self._top_k).indices

    def __call__(
        self, hidden: Tensor, into: list[Tensor] | None = None, follow: Tensor | None = None
    ) -> Tensor:
        """What the experts make of each token, [tokens, hidden].

        Args:
            hidden: [tokens, hidden].
            into: where the choice is added, int64 [tokens, top_k], best first; None keeps it to itself.
            follow: int64 [tokens, top_k]: no choice is made, these experts are it. Their weights are those
                that the router gives them now.
        """
        scores = self._scores(hidden)
        if follow is not None:
            experts, weights = follow, scores.gather(1, follow)
        else:
            weights, experts = torch.topk(scores, self._top_k)
            if into is not None:
                into.append(experts)
        if self._normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self._experts(hidden, experts, weights.to(hidden.dtype))

    def _scores(self, hidden: Tensor) -> Tensor:
        return torch.softmax(linear(hidden, self._gate.weight), dim=-1, dtype=torch.float32)
