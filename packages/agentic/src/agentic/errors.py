"""The one exception family of the package: every error it raises is an `AgenticError`."""


class AgenticError(Exception):
    """Base of every error raised by `agentic`."""


class InvalidValue(AgenticError, ValueError):
    """A value breaks the rule of its structure; the message names the field, the value and the rule."""


class TranscriptError(AgenticError):
    """Something cannot be appended to a transcript: it is closed, or the append would make it inexact."""


class EpisodeError(AgenticError):
    """An episode could not go on because its environment or its policy failed.

    The original exception is the `__cause__`.

    Attributes:
        task_id: the task that was being played.
        request_id: the episode's id (turn k's requests are named `f"{request_id}/{k}"`).
        turn: the turn during which it failed, counted from 0.
        stage: what was being done: "reset", "encode", "generate", "abort", "decode", "step",
            "encode_observation" or "close". A reward is computed inside "step".
    """

    def __init__(self, *, task_id: str, request_id: str, turn: int, stage: str, cause: BaseException) -> None:
        super().__init__(
            f"episode {request_id!r} of task {task_id!r} failed in turn {turn} at {stage}: "
            f"{type(cause).__name__}: {cause}"
        )
        self.task_id = task_id
        self.request_id = request_id
        self.turn = turn
        self.stage = stage


class UnknownEnvironment(AgenticError):
    """No environment is registered under a name, or an import path leads nowhere."""
