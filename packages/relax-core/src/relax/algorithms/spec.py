"""An algorithm is data and two pure functions on tensors: group advantages, and the loss of a micro-batch.

Tensors are ragged: rows laid end to end, `offsets` int64 [rows+1] says where each starts. Every column has
one entry a response token; `mask` is 1 where the policy sampled the token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """Whole groups of samples. `groups[i]` (int64 [rows]) names row i's group; position means nothing."""

    rewards: Tensor
    groups: Tensor
    mask: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. `logprobs` carries the gradient; the rest are constants. Shapes [tokens]."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    offsets: Tensor
    reference_logprobs: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """Sums and counts, never means: the trainer adds them over micro-batches and divides once.

    Attributes:
        loss: scalar, the unscaled sum.
        count: what the sum is divided by in the end (tokens, rows, or a fixed length), as a float.
        metrics: name -> (sum, count), summed over micro-batches likewise; a name ending in `_max` takes the
            maximum.
    """

    loss: Tensor
    count: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Algorithm:
    """What a run trains with.

    Attributes:
        name: registry name.
        statistics: what must be complete before backward may start: a `group`, or the whole `batch`.
        needs: bus fields it reads beyond tokens and mask.
        advantages: [tokens] float32, 0 where the mask is 0.
        loss: of one micro-batch.
    """

    name: str
    statistics: Literal["group", "batch"]
    needs: frozenset[str]
    advantages: Callable[[AdvantageInputs], Tensor]
    loss: Callable[[LossInputs], LossOutputs]
