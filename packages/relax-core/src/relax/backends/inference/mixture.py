"""A Qwen3 mixture of experts as plain functions: which experts a token goes to, told or followed."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


class Mixture:
    """The routed block of one layer; its weights stay the model's parameters.

    Args:
        block: a Qwen3MoeSparseMoeBlock.
    """

    def __init__(self, block: Any) -> None:
        self._gate, self._experts = block.gate, block.experts
        self._top_k: int = block.gate.top_k
        self._normalised: bool = block.gate.norm_topk_prob

    def choose(self, hidden: Tensor, into: Tensor) -> None:
        """Write the experts of each token, best first, and compute nothing else.

        Args:
            hidden: [tokens, hidden].
            into: int64 [tokens, top_k].
        """
        scores = self._scores(hidden)
        torch.topk(scores, self._top_k, out=(scores.new_empty(into.shape), into))

    def __call__(self, hidden: Tensor, into: Tensor | None = None, follow: Tensor | None = None) -> Tensor:
        """What the experts make of each token, [tokens, hidden].

        Args:
            hidden: [tokens, hidden].
            into: int64 [tokens, top_k], where the choice is written; None keeps it to itself.
            follow: int64 [tokens, top_k]: no choice is made, these experts are it. Their weights are those
                that the router gives them now.
        """
        scores = self._scores(hidden)
        if follow is not None:
            experts, weights = follow, scores.gather(1, follow)
        elif into is not None:
            # Written where it is kept: a capture costs no copy.
            experts, weights = into, scores.new_empty(into.shape)
            torch.topk(scores, self._top_k, out=(weights, experts))
        else:
            weights, experts = torch.topk(scores, self._top_k)
        if self._normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self._experts(hidden, experts, weights.to(hidden.dtype))

    def _scores(self, hidden: Tensor) -> Tensor:
        return torch.softmax(linear(hidden, self._gate.weight), dim=-1, dtype=torch.float32)
