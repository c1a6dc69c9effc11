"""Settings of the GRPO family, apart from the arithmetic so that a configuration is checked without torch."""

from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token", "sequence", "fixed"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class GRPOSettings:
    """Settings of GRPO and its variants.

    Attributes:
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high; larger than clip_low is "clip-higher" (DAPO).
        delta: cap of the unclipped ratio, which bounds the loss of tokens with a negative advantage
            (two-sided clipping, INTELLECT-2); None for no cap.
        kl_coef: weight of the KL to the reference policy in the loss; 0 needs no reference.
        kl_estimator: estimator of that KL from one sample (`kl.kl`).
        kl_unbiased: weigh each token's KL by its ratio, which makes estimator and gradient unbiased
            off-policy.
        aggregation: `token` = mean over all sampled tokens of the global batch; `sequence` = mean over rows
            of each row's mean; `fixed` = sum over (rows * max_length), free of length bias.
        max_length: tokens a row is divided by with `fixed`; needed there, unused elsewhere.
        normalize_std: divide centred rewards by the standard deviation of their group.
        std_eps: added to that standard deviation.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    delta: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_unbiased: bool = False
    aggregation: Aggregation = "token"
    max_length: int | None = None
    normalize_std: bool = True
    std_eps: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(
                f"clip_low={self.clip_low}: expected 0 to 1, as the ratio is clipped below at 1 - clip_low"
            )
        if not 0 <= self.clip_high < float("inf"):
            raise ValueError(f"clip_high={self.clip_high}: expected 0 or more")
        if self.delta is not None and not self.delta > 1 + self.clip_high:
            raise ValueError(
                f"delta={self.delta}: expected null, or more than 1 + clip_high = {1 + self.clip_high}"
            )
        if not 0 <= self.kl_coef < float("inf"):
            raise ValueError(f"kl_coef={self.kl_coef}: expected 0 or more")
        if self.kl_unbiased and self.kl_coef == 0:
            raise ValueError(
                "kl_unbiased=true has no effect with kl_coef=0: set kl_coef, or leave kl_unbiased out"
            )
        if self.aggregation == "fixed" and self.max_length is None:
            raise ValueError(
                "aggregation='fixed' needs max_length: set it to the most response tokens a sample may have"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length={self.max_length}: expected 1 or more tokens")
        if not 0 < self.std_eps < float("inf"):
            raise ValueError(f"std_eps={self.std_eps}: expected more than 0")
