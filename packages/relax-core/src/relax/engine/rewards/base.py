"""What a reward sees, what it says, and the protocol between."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec


class RewardError(ValueError):
    """A reward that cannot be built, or a sample that cannot be judged at all (a row without an answer).

    The message names the thing, its value, what was expected, and the way out. A wrong response is no error.
    """


class RewardInput(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sample.

    Attributes:
        messages: the prompt, as chat messages.
        response: the text the policy wrote, special tokens left out.
        answer: the answer in the data, None where the task has none.
        row: the whole row of the data, for rewards that read other columns.
        truncated: the response was ended by a limit, not by the policy.
    """

    messages: Sequence[Mapping[str, Any]]
    response: str
    answer: Any = None
    row: Mapping[str, Any] = {}
    truncated: bool = False


class Score(msgspec.Struct, frozen=True):
    """What a sample is worth.

    Attributes:
        value: the reward, finite, in the range its reward documents.
        parts: named parts of it, for metrics.
        reason: why, where the value alone does not say; None if there is nothing to add.

    Raises:
        RewardError: the value is not finite.
    """

    value: float
    parts: dict[str, float] = {}
    reason: str | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise RewardError(
                f"a score of {self.value} (parts {self.parts}, reason {self.reason!r}): expected a finite "
                "number, as every group it is in would be spoilt; let the reward give a number or raise"
            )


class Reward(Protocol):
    """Judges samples, many at a time under one event loop. One that holds resources also has `close()`."""

    @property
    def name(self) -> str:
        """Name of the reward in metrics."""
        ...

    async def __call__(self, sample: RewardInput) -> Score:
        """Judge one sample. Raises RewardError for one that cannot be judged; cancellation is safe."""
        ...


def close(reward: Reward) -> None:
    """Release what a reward holds (child processes). Idempotent; nothing to do for most."""
    release = getattr(reward, "close", None)
    if release is not None:
        release()
