"""A finished episode, the bounds it was played under, and the named reasons for its end."""

import enum
from typing import Any

import msgspec

from .environment import Message
from .errors import InvalidValue
from .transcript import Transcript


class EpisodeEnd(enum.StrEnum):
    """Why an episode ended. Everything but `DONE` is a truncation."""

    DONE = "done"
    """The environment said so."""
    MAX_TURNS = "max_turns"
    """The policy had its last turn, and the environment would have gone on."""
    CONTEXT_FULL = "context_full"
    """No token fits any more: the last turn was cut off at `max_tokens`, or the next observation fills it."""
    TRUNCATED = "truncated"
    """The last turn was cut off at the sampling's `max_new_tokens`. The environment was still shown it."""
    ABORTED = "aborted"
    """The engine gave the last turn up. The environment was not shown it."""
    TIME_LIMIT = "time_limit"
    """`max_seconds` passed. A turn that was being sampled is kept as far as it went, and not shown to the
    environment; a step that was being taken is cancelled, and gives no reward."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds of one episode.

    Attributes:
        max_turns: turns the policy may take, >= 1.
        max_tokens: tokens of the whole transcript, prompt included: the context, >= 2.
        max_seconds: wall clock from `reset` to the last step; None is no limit.
        grace_seconds: how long an abort, or the environment's `close`, may take.

    Raises:
        InvalidValue: a value outside its range.
    """

    max_turns: int = 8
    max_tokens: int = 4096
    max_seconds: float | None = 600.0
    grace_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise InvalidValue(f"max_turns is {self.max_turns}; expected an integer >= 1")
        if self.max_tokens < 2:
            raise InvalidValue(
                f"max_tokens is {self.max_tokens}; expected an integer >= 2 (a prompt and an answer)"
            )
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise InvalidValue(
                f"max_seconds is {self.max_seconds}; expected a number > 0, or None for no limit"
            )
        if not self.grace_seconds > 0:
            raise InvalidValue(f"grace_seconds is {self.grace_seconds}; expected a number > 0")


class Episode(msgspec.Struct, frozen=True, eq=False):
    """A finished episode.

    Attributes:
        task_id, request_id, seed: which one it was.
        transcript: its exact tokens. It ends with a sampled token, except where an abort or the time limit
            left the last turn empty.
        messages: the conversation as messages, for people; the policy's turns as decoded text.
        reward: the sum of the rewards of its steps.
        reward_parts: the parts of its steps, summed by name.
        end: why it ended.
        turns: turns the policy began to sample.
        infos: the `info` of each step.
        seconds: wall clock.
    """

    task_id: str
    request_id: str
    seed: int
    transcript: Transcript
    messages: list[Message]
    reward: float
    reward_parts: dict[str, float]
    end: EpisodeEnd
    turns: int
    infos: list[dict[str, Any]]
    seconds: float

    @property
    def truncated(self) -> bool:
        """It was ended by a limit or an abort, not by its environment."""
        return self.end is not EpisodeEnd.DONE
