"""A weighted sum of rewards."""

import asyncio
import math
from collections.abc import Sequence

from relax.engine.rewards.base import Reward, RewardError, RewardInput, Score, close


class Mixture:
    """sum of weight * value over its rewards, which judge a sample at the same time.

    Weights are used as they are: with weights that sum to 1 and rewards in 0..1 the value is in 0..1; a
    negative weight makes a penalty. The parts are each reward's value under its name, and its own parts as
    `name/part`. A sample that one reward cannot judge is not judged.

    Args:
        rewards: (weight, reward) pairs; no two rewards share a name.
    """

    name = "mixture"

    def __init__(self, rewards: Sequence[tuple[float, Reward]]) -> None:
        if not rewards:
            raise RewardError("mixture: no rewards: expected at least one (weight, reward)")
        names = [reward.name for _, reward in rewards]
        for (weight, _), name in zip(rewards, names, strict=True):
            if not math.isfinite(weight):
                raise RewardError(f"mixture: weight {weight} of {name!r}: expected a finite number")
            if names.count(name) > 1:
                raise RewardError(
                    f"mixture: two rewards are named {name!r}, and metrics could not tell them apart"
                )
        self._rewards = list(rewards)

    async def __call__(self, sample: RewardInput) -> Score:
        scores = await asyncio.gather(
            *(reward(sample) for _, reward in self._rewards), return_exceptions=True
        )
        value, parts, reasons = 0.0, {}, []
        for (weight, reward), score in zip(self._rewards, scores, strict=True):
            if isinstance(score, BaseException):
                raise score
            value += weight * score.value
            parts[reward.name] = score.value
            parts |= {f"{reward.name}/{part}": number for part, number in score.parts.items()}
            if score.reason is not None:
                reasons.append(f"{reward.name}: {score.reason}")
        return Score(value, parts, "; ".join(reasons) or None)

    def close(self) -> None:
        """Close each reward. Idempotent."""
        for _, reward in self._rewards:
            close(reward)
