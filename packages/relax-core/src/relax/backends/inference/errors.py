"""The error family of inference engines; a message names the request, tensor or version, and the way out."""


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


class UnknownEngine(EngineError, ValueError):
    """No engine is registered under a name, or an import path leads to none."""


class EngineTimeout(EngineError, TimeoutError):
    """A version was not committed, or the compute thread did not end, within the time given."""
