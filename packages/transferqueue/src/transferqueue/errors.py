"""The one exception family of this package.

Every error has a ``message`` that names the thing, the value and the way out, and keyword ``details`` that
survive the wire, so that an error raised in the controller reads the same in the client.
"""

from typing import Any


class QueueError(Exception):
    """Base of everything this package raises on purpose.

    Attributes:
        details: the facts behind the message, by name. Plain data, also available as attributes.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details

    def __getattr__(self, name: str) -> Any:
        details = self.__dict__.get("details", {})
        if name in details:
            return details[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def again(self) -> "QueueError":
        """The same error once more: one that ends several calls must not gather the traceback of each."""
        return type(self)(str(self), **self.details)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.details)


def _rebuild(kind: type[QueueError], message: str, details: dict[str, Any]) -> QueueError:
    return kind(message, **details)


class InvalidArgument(QueueError, ValueError):
    """An argument is wrong by itself (a negative size, columns of different lengths)."""


class Full(QueueError):
    """A limit in samples or bytes left no room for the put until its deadline. Nothing was stored."""


class Timeout(QueueError):
    """The deadline passed before the answer. A fetch that times out has leased nothing."""


class Closed(QueueError):
    """The partition is closed: nothing can be put any more, or nothing is left to fetch."""


class SchemaMismatch(QueueError):
    """A value does not fit what the first write fixed. Details: ``field``, ``got``, ``expected``."""


class StaleLease(QueueError):
    """The lease lapsed, was finished or never existed; its samples may be with another consumer. Detail:
    ``lease``.
    """


class UnknownSample(QueueError):
    """An id that was never put, or whose payload is freed. Detail: ``ids`` (the first few)."""


class UnknownName(QueueError):
    """No partition or task of that name."""


class FieldNotReady(QueueError):
    """The sample exists but nobody has written that field yet. Details: ``field``, ``ids``."""


class GroupMismatch(QueueError):
    """A group would get more members than its size. Details: ``group``, ``size``, ``members``."""


class StorageLost(QueueError):
    """A storage unit cannot be reached; what it held is lost. Details: ``unit``, ``address``."""


class ControllerLost(QueueError):
    """The controller cannot be reached or was replaced by one that knows nothing of us. Detail:
    ``address``.
    """


class Unauthorized(QueueError):
    """The token is missing or wrong."""


class ProtocolMismatch(QueueError):
    """The two sides speak different versions of the wire protocol. Details: ``got``, ``expected``."""


class TooLarge(QueueError):
    """One message exceeds the frame limit, or one put exceeds the whole store. Details: ``nbytes``,
    ``limit``.
    """


class Corrupt(QueueError):
    """A payload does not match its checksum or its own description."""


class Malformed(QueueError):
    """The bytes received are no message of this protocol."""


class StartFailed(QueueError):
    """A server process did not come up. The message carries what it said."""


def _family(base: type[QueueError]) -> dict[str, type[QueueError]]:
    found = {base.__name__: base}
    for kind in base.__subclasses__():
        found |= _family(kind)
    return found


def named(kind: str, message: str, details: dict[str, Any]) -> QueueError:
    """The error of this family called `kind`, rebuilt from its wire form."""
    return _FAMILY.get(kind, QueueError)(message, **details)


_FAMILY = _family(QueueError)
