"""The environment protocol: what an episode is played against, and the messages they exchange."""

from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import InvalidValue
from .generation import FinishReason
from .transcript import Transcript

type Message = dict[str, Any]
"""A chat message as in OpenAI's chat API: {"role": str, "content": str or a list of parts}. Roles are
"system", "user", "assistant" and "tool". A part is {"type": "text", "text": str}; what others there
are depends on the policy."""


class Task(msgspec.Struct, frozen=True):
    """One thing to be done.

    Attributes:
        id: stable name.
        prompt: the messages it opens with.
        answer: what a reward compares with, if there is such a thing.
        data: anything else the environment or the reward wants; plain data.
    """

    id: str
    prompt: list[Message]
    answer: Any = None
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Observation(msgspec.Struct, frozen=True):
    """What the policy is shown: the opening messages (from `reset`), or what follows its turn (`step`)."""

    messages: list[Message]


class Action(msgspec.Struct, frozen=True, eq=False):
    """One turn of the policy.

    Attributes:
        text: the turn, decoded, without its end-of-turn token.
        tokens: int32 [m], exactly the ids sampled.
        finish_reason: "stop", or "length" when the turn was cut off (it is then the last one).
        transcript: everything up to and including this turn.
    """

    text: str
    tokens: npt.NDArray[np.int32]
    finish_reason: FinishReason
    transcript: Transcript


class Step(msgspec.Struct, frozen=True):
    """What an action led to.

    Attributes:
        observation: what the policy sees next; may be None only when done.
        reward: of this step; the episode's reward is the sum over its steps. Finite.
        done: the episode is over.
        info: plain data for logs.
        reward_parts: named numbers that explain the reward; summed by name over the steps. They need not add
            up to it.

    Raises:
        InvalidValue: a reward that is not finite, or neither an observation nor the end.
    """

    observation: Observation | None
    reward: float
    done: bool
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    reward_parts: dict[str, float] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not np.isfinite(self.reward):
            raise InvalidValue(f"the reward of a step is {self.reward}; expected a finite number")
        if self.observation is None and not self.done:
            raise InvalidValue(
                "a step has no observation though the episode is not done; expected one or the other"
            )


class Environment(Protocol):
    """One episode's world. An instance plays one episode at a time; make one for each that runs at once.

    Calls come one after another: `reset`, then `step` once a turn, and `close` always, once, at the end. Any
    may be cancelled (time limit, cancelled episode). An exception ends the episode with `EpisodeError`; what
    the policy did wrong is fed back as an observation instead.
    """

    async def reset(self, task: Task) -> Observation:
        """Begin the task; returns the opening messages, at least one."""
        ...

    async def step(self, action: Action) -> Step:
        """Take the policy's turn."""
        ...

    async def close(self) -> None:
        """Let go of whatever the episode held; idempotent."""
        ...
