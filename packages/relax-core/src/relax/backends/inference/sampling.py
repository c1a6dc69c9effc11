"""Drawing tokens: counter-based uniforms, and the inverse of the cumulative distribution.

The uniform behind a token is a pure function of the request's seed and the token's position in the response,
so a draw depends on nothing but that pair and the bits of its logits: not on the batch, the order, or any
generator's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64 bits that avalanches."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    return values ^ (values >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One uniform of [0, 1) for each pair of seed and position, 53 bits each.

    It is output `position` of a SplitMix64 whose state starts at mix64(seed): the seed is mixed first so that
    seeds which differ by a multiple of the generator's increment do not walk the same sequence.
    """
    states = mix64(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (mix64(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass
class Draws:
    """What is drawn for each of some rows: tokens int64 [rows], logprobs float32 [rows]."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]


def draw(
    logits: Tensor,
    u: NDArray[np.float64],
    temperature: NDArray[np.float32],
    top_p: NDArray[np.float32],
    top_k: NDArray[np.int64],
    never: Sequence[int] = (),
) -> Draws:
    """Draw one token a row.

    Args:
        logits: [rows, vocabulary], any floating dtype; the computation is in float32, the cumulative sum in
            float64.
        u: [rows], uniforms of [0, 1).
        temperature: [rows], >= 0. 0 takes the most probable token (the first of equals) and gives its logprob
            at temperature 1.
        top_p: [rows], in (0, 1]; the smallest set of most probable tokens that reaches it is kept, 1 keeps
            all.
        top_k: [rows], tokens kept, 0 keeps all.
        never: tokens without probability, such as placeholders of images.

    Returns:
        The tokens, and their logprobs under the temperature-scaled distribution over the whole vocabulary
        but `never`, also where top_p or top_k kept only a part of it.
    """
    greedy = temperature == 0
    scale = torch.from_numpy(np.where(greedy, np.float32(1), temperature)).to(logits.device)
    scaled = logits.float() / scale[:, None]
    for token in never:
        scaled[:, token] = -torch.inf
    logprobs = torch.log_softmax(scaled, dim=-1)
    weights = torch.exp(logprobs, out=scaled)
    # The sum in float64 keeps the tail of a large vocabulary; a probability of exactly 0 is a step of height
    # 0 and is never drawn.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    truncated = ~greedy & ((top_p < 1) | (top_k > 0))
    if truncated.any():
        rows = torch.from_numpy(np.flatnonzero(truncated)).to(logits.device)
        kept = _truncate(weights[rows].double(), top_p[truncated], top_k[truncated])
        cumulative[rows] = kept.cumsum(dim=-1)
    total = cumulative[:, -1:]
    goal = torch.from_numpy(u).to(logits.device)[:, None] * total
    goal = torch.minimum(goal, torch.nextafter(total, goal.new_zeros(1)))
    tokens = torch.searchsorted(cumulative, goal, right=True)
    if greedy.any():
        tokens = torch.where(
            torch.from_numpy(greedy).to(logits.device)[:, None], weights.argmax(dim=-1, keepdim=True), tokens
        )
    chosen = logprobs.gather(1, tokens.clamp_(max=logits.shape[-1] - 1))
    return Draws(tokens[:, 0].cpu().numpy(), chosen[:, 0].cpu().numpy())


def _truncate(weights: Tensor, top_p: NDArray[np.float32], top_k: NDArray[np.int64]) -> Tensor:
    """Zero what top_p and top_k leave out. Equal weights are ranked by token id."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    p = torch.from_numpy(top_p.astype(np.float64)).to(weights.device)[:, None]
    k = torch.from_numpy(np.where(top_k > 0, top_k, weights.shape[-1])).to(weights.device)[:, None]
    keep = (before < p) & (torch.arange(weights.shape[-1], device=weights.device)[None] < k)
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, order, torch.where(keep, ordered, 0.0))
