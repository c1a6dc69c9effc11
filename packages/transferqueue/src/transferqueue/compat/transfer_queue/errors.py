"""What this module raises beside the errors of the store: `QueueError`s that are also the builtin error which
code written for the PyPI package catches.
"""

from ...errors import QueueError


class InvalidRequest(QueueError, ValueError):
    """An argument is wrong: lengths that differ, a dtype that changed, a sampler that cannot be used."""


class FieldsNotReady(QueueError, ValueError):
    """A field was asked for that some of the samples do not have. Detail: ``fields``."""


class StorageKeyNotFoundError(QueueError, KeyError):
    """Samples were cleared, or never put. Their indexes and rows are never given to other samples, so stale
    metadata ends here and never reads another sample's data.
    """

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class KeysNotFound(StorageKeyNotFoundError, ValueError):
    """A partition has no samples under these keys. Detail: ``keys``."""


class RequestFailed(QueueError, RuntimeError):
    """Not enough samples became ready in time, or a sampler raised. Nothing was consumed."""


class CatalogLost(QueueError, RuntimeError):
    """The process that called `init` first has ended, closed the store, or cannot be reached."""


class NotInitialized(QueueError, RuntimeError):
    """A call came before `init`, and no environment variable names a store to join."""


class ExtraMissing(QueueError, ImportError):
    """A call hands out tensors, and tensordict or torch is not installed."""


def raised_as(kind: str, message: str) -> QueueError:
    """The error called `kind`, rebuilt from its wire form."""
    return _KINDS.get(kind, RequestFailed)(message)


_KINDS: dict[str, type[QueueError]] = {
    error.__name__: error
    for error in (InvalidRequest, FieldsNotReady, StorageKeyNotFoundError, KeysNotFound, RequestFailed)
}
