"""The importance ratio of sampled tokens, kept finite."""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log ratios are cut at +-20 (a ratio of 5e8), far outside any trust region; beyond it exp would reach inf in
float32, and the gradient of a clipped token would be 0 * inf = NaN."""


def bounded_log_ratio(logprobs: Tensor, other: Tensor, active: Tensor) -> Tensor:
    """log(pi / other) of each token, in the type of `logprobs`, within +-LOG_RATIO_BOUND.

    Args:
        logprobs: [tokens], carries the gradient.
        other: [tokens], taken as constant.
        active: bool [tokens]. The rest is 0, with gradient 0, whatever stands there: padding may hold NaN.
    """
    difference = torch.where(active, logprobs - other.detach().to(logprobs.dtype), 0.0)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
