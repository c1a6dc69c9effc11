"""KL(policy || reference) of a token, estimated from the one token sampled."""

import torch
from torch import Tensor

from relax.algorithms.settings import KLEstimator


def kl(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate, differentiable, in the shape of `log_ratio` (Schulman, "Approximating KL", 2020).

    Args:
        log_ratio: d = log pi - log reference, bounded.
        estimator:
            `k1` = d: unbiased, of either sign, high variance; its gradient as a loss is 0 in expectation.
            `k2` = d^2 / 2: biased value, but its gradient is that of the KL.
            `k3` = exp(-d) - 1 + d: unbiased, never negative.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return torch.expm1(-log_ratio) + log_ratio
