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
        reason: the type and the message of the original exception.
    """

    def __init__(self, task_id: str, request_id: str, turn: int, stage: str, reason: str) -> None:
        # All of it in args, so that the error survives pickling between the processes of whoever uses it.
        super().__init__(task_id, request_id, turn, stage, reason)
        self.task_id = task_id
        self.request_id = request_id
        self.turn = turn
        self.stage = stage
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"episode {self.request_id!r} of task {self.task_id!r} failed in turn {self.turn} "
            f"at {self.stage}: {self.reason}"
        )


class UnknownEnvironment(AgenticError):
    """No environment is registered under a name, or an import path leads nowhere."""
