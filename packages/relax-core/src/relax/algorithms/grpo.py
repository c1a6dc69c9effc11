"""GRPO (arXiv 2402.03300), and what differs only in settings: DAPO (2503.14476), Dr. GRPO (2503.20783).

With w = exp(logprob - old logprob), the loss aggregates over tokens

    -min(min(w, delta) A, clip(w, 1 - clip_low, 1 + clip_high) A) + kl_coef KL(policy || reference)
"""

import torch
from torch import Tensor

from relax.algorithms.advantages import group_advantages, spread_over_tokens
from relax.algorithms.aggregation import token_weights
from relax.algorithms.errors import AlgorithmError
from relax.algorithms.kl import kl
from relax.algorithms.ratio import bounded_log_ratio
from relax.algorithms.settings import GRPOSettings
from relax.algorithms.spec import AdvantageInputs, Algorithm, LossInputs, LossOutputs


def make(name: str, settings: GRPOSettings) -> Algorithm:
    """The algorithm with these settings, under this name. It needs the reference only when kl_coef > 0."""
    needs = {"reward", "group", "rollout_logprobs"}
    if settings.kl_coef > 0:
        needs.add("reference_logprobs")

    def advantages(inputs: AdvantageInputs) -> Tensor:
        of_row = group_advantages(
            inputs.rewards, inputs.groups, normalize_std=settings.normalize_std, std_eps=settings.std_eps
        )
        return spread_over_tokens(of_row, inputs.mask, inputs.offsets)

    return Algorithm(name, "group", frozenset(needs), advantages, lambda inputs: grpo_loss(inputs, settings))


def grpo_loss(inputs: LossInputs, settings: GRPOSettings) -> LossOutputs:
    """Loss sum of one micro-batch, in the type of its logprobs (float32 at least).

    Tokens outside the mask take no part, whatever stands there; a NaN logprob of a sampled token shows in the
    loss, for the trainer to skip the step.

    Metrics, over sampled tokens: `ratio`; `ratio_max`; `ratio_gap_max` = max |w - 1|; `clip_low` and
    `clip_high`, the shares of tokens whose gradient the clip cut; `approx_kl`, k3 of KL(old || pi);
    `reference_kl`, the estimate in the loss (weighed by the ratio when unbiased), with a reference only.

    Raises:
        AlgorithmError: columns of different lengths, or kl_coef > 0 without reference_logprobs.
    """
    _check_columns(inputs, settings)
    logprobs = inputs.logprobs.to(torch.promote_types(inputs.logprobs.dtype, torch.float32))
    active = inputs.mask != 0
    advantages = torch.where(active, inputs.advantages.to(logprobs.dtype), 0.0)

    log_ratio = bounded_log_ratio(logprobs, inputs.old_logprobs, active)
    ratio = log_ratio.exp()
    unclipped = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    per_token = -torch.minimum(unclipped * advantages, clipped * advantages)

    reference_kl = None
    if inputs.reference_logprobs is not None and settings.kl_coef > 0:
        reference_kl = kl(
            bounded_log_ratio(logprobs, inputs.reference_logprobs, active), settings.kl_estimator
        )
        if settings.kl_unbiased:
            reference_kl = reference_kl * ratio
        per_token = per_token + settings.kl_coef * reference_kl

    weights, divisor = token_weights(
        active, inputs.offsets, settings.aggregation, settings.max_length, logprobs.dtype
    )
    loss = (per_token * weights).sum()

    with torch.no_grad():
        low = ((ratio < 1 - settings.clip_low) & (advantages < 0)).sum()
        high = ((ratio > 1 + settings.clip_high) & (advantages > 0)).sum()
        away = ratio - 1
        sums = [divisor, active.sum(), (ratio * active).sum(), low, high, (away - log_ratio).sum()]
        if reference_kl is not None:
            sums.append(reference_kl.sum())
        if len(active):
            sums += [(ratio * active).amax(), away.abs().amax()]
        # Stacked first, so that everything is read from the device in one go.
        found = torch.stack([value.double() for value in sums]).tolist()
    count, tokens, ratio_sum, low_sum, high_sum, approx_sum, *rest = found
    metrics = {
        "ratio": (ratio_sum, tokens),
        "clip_low": (low_sum, tokens),
        "clip_high": (high_sum, tokens),
        "approx_kl": (approx_sum, tokens),
    }
    if reference_kl is not None:
        metrics["reference_kl"] = (rest.pop(0), tokens)
    if tokens:
        metrics |= {"ratio_max": (rest[0], 1.0), "ratio_gap_max": (rest[1], 1.0)}
    return LossOutputs(loss, count, metrics)


def _check_columns(inputs: LossInputs, settings: GRPOSettings) -> None:
    shape = inputs.logprobs.shape
    for name in ("old_logprobs", "advantages", "mask", "reference_logprobs"):
        column = getattr(inputs, name)
        if column is not None and column.shape != shape:
            raise AlgorithmError(
                f"{name} has shape {list(column.shape)}, logprobs {list(shape)}: every column needs one "
                "entry a response token"
            )
    if settings.kl_coef > 0 and inputs.reference_logprobs is None:
        raise AlgorithmError(
            f"kl_coef={settings.kl_coef} needs reference_logprobs, and the micro-batch has none: run the "
            "reference role, or set kl_coef to 0"
        )
