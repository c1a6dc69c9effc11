"""The error family of inference engines; a message names the request, tensor or version, and the way out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentic import Generation


class EngineError(Exception):
    """Base of every error an engine raises on purpose."""


class InvalidRequest(EngineError, ValueError):
    """A request that this model can never serve: too long, a token outside the vocabulary, media that do not
    match the placeholders. Nothing of its call was admitted.
    """


class NotReady(EngineError):
    """The engine has committed no weights yet, so it serves nothing."""


class InvalidUpdate(EngineError, ValueError):
    """Tensors of a version that do not fit the model, or a version out of order. The engine serves on."""


class ReplayMismatch(EngineError):
    """What an engine was asked for is not what the log it replays recorded."""


class EngineClosed(EngineError):
    """The engine was closed before it could answer."""


class EngineFailed(EngineError):
    """The compute thread ended with an error, which is `__cause__`; the message holds its traceback."""


class EngineLost(EngineError):
    """A replica that cannot answer any more: its process died, or its server does not answer or does not get
    on. What was asked of it may be asked of another one.

    Attributes:
        engine: its name.
        reason: what happened, for people.
        partial: what is known of unfinished answers, by request id: tokens that had come out of the engine
            before it was lost. Their finish reason is not looked at.
    """

    def __init__(self, engine: str, reason: str, partial: "Mapping[str, Generation] | None" = None) -> None:
        super().__init__(engine, reason, partial)  # what it is made from again in another process
        self.engine = engine
        self.reason = reason
        self.partial: Mapping[str, Generation] = partial or {}

    def __str__(self) -> str:
        return f"{self.engine} is lost: {self.reason}"


class EngineNotBuilt(EngineError):
    """An engine that never came to be, so that it answers nothing. Whoever starts it knows more, and says so.

    Attributes:
        engine: its name.
        reason: what it failed with.
    """

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(engine, reason)  # what it is made from again in another process
        self.engine = engine
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.engine} could not be built: {self.reason}"


class UnknownEngine(EngineError, ValueError):
    """No engine is registered under a name, or an import path leads to none."""


class EngineTimeout(EngineError, TimeoutError):
    """A version was not committed, or the compute thread did not end, within the time given."""
