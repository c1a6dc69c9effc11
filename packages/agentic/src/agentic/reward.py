"""The reward protocol: a function of the task, the text of the response and its transcript."""

import inspect
from collections.abc import Awaitable
from typing import Protocol

import msgspec
import numpy as np

from .environment import Task
from .errors import InvalidValue
from .transcript import Transcript


class Score(msgspec.Struct, frozen=True):
    """A reward and why.

    Attributes:
        value: finite.
        parts: named numbers that explain it; they need not add up to it.
        reason: for people who read samples.
    """

    value: float
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    reason: str = ""


class Reward(Protocol):
    """Any function of this shape, plain or async. A plain one runs in the event loop and must be quick."""

    def __call__(
        self, task: Task, response: str, transcript: Transcript, /
    ) -> float | Score | Awaitable[float | Score]: ...


async def score(reward: Reward, task: Task, response: str, transcript: Transcript) -> Score:
    """Call a reward, await it if it is async, and return its score.

    Raises:
        InvalidValue: it returned neither a number nor a `Score`, or a value that is not finite.
    """
    found = reward(task, response, transcript)
    if inspect.isawaitable(found):
        found = await found
    if not isinstance(found, Score):
        if not isinstance(found, (int, float, np.number, np.bool_)):
            raise InvalidValue(
                f"the reward of task {task.id!r} returned {type(found).__name__}; expected a number or Score"
            )
        found = Score(float(found))
    if not np.isfinite(found.value):
        raise InvalidValue(f"the reward of task {task.id!r} is {found.value}; expected a finite number")
    return found
