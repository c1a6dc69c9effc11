"""The one exception family of dcs: catch `DcsError` for all of them."""

from typing import ClassVar


class DcsError(Exception):
    """Anything that dcs refuses or loses; subclasses say what."""

    code: ClassVar[str] = "error"


class InvalidArgument(DcsError, ValueError, TypeError):
    """An argument that cannot be meant; nothing was opened. Also what Python itself would have raised."""

    code = "argument"


class Closed(DcsError):
    """The object was closed, so the call cannot be served."""

    code = "closed"


class Timeout(DcsError, TimeoutError):
    """A deadline passed; the message names what was waited for."""

    code = "timeout"


class CoordinatorLost(DcsError, ConnectionError):
    """The coordinator has not been heard for a whole lease, or never answered."""

    code = "coordinator_lost"


class PublisherLost(DcsError, ConnectionError):
    """The run's publisher stopped heartbeating, or no source of the newest version answers just now.

    Shown by `health()`; the subscriber goes on trying, and takes up the next publisher.
    """

    code = "publisher_lost"


class Unauthorized(DcsError, PermissionError):
    """The token is missing or wrong, or a bind off loopback was asked for without one."""

    code = "unauthorized"


class ProtocolMismatch(DcsError):
    """The two sides speak different versions of the dcs protocol; both are named."""

    code = "protocol"


class ProtocolError(DcsError):
    """A peer sent what the protocol does not allow (malformed, oversized, out of order)."""

    code = "malformed"


class LayoutMismatch(DcsError, ValueError):
    """Two layouts, or a layout and the tensors given, differ; no payload has moved.

    Attributes:
        tensor: name of the first tensor (in name order) that differs.
        got: what was found, for example `float32[4, 8]` or `absent`.
        expected: what should have been there.
    """

    code = "layout"

    def __init__(self, message: str, tensor: str = "", got: str = "", expected: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor
        self.got = got
        self.expected = expected


class StaleVersion(DcsError, ValueError):
    """A version that is not newer than what the run already has, or that is no longer held by anybody."""

    code = "stale"


class CorruptChunk(DcsError):
    """A chunk did not match its hash however often it was asked for, or a manifest not its root."""

    code = "corrupt"


class Evicted(DcsError):
    """The coordinator has fenced this member, because its lease lapsed or another one took its name."""

    code = "evicted"


class NoMemory(DcsError, MemoryError):
    """There is no memory for a version here; what is staged already stays, and another attempt may work."""

    code = "memory"


class Unacknowledged(DcsError):
    """`next` was called while the version it last gave is neither acknowledged nor released."""

    code = "unacknowledged"


class ApplyFailed(DcsError):
    """An engine did not take a version; the message says what it serves now.

    Raised by appliers, and by a `Follower` whose function raised: its subscriber has left the run then.
    """

    code = "apply_failed"


_BY_CODE: dict[str, type[DcsError]] = {
    kind.code: kind
    for kind in (
        DcsError,
        Unauthorized,
        ProtocolMismatch,
        ProtocolError,
        StaleVersion,
        Evicted,
        PublisherLost,
        CoordinatorLost,
    )
}


def from_refusal(code: str, message: str, detail: dict[str, str]) -> DcsError:
    """The exception that a peer's refusal stands for; a plain `DcsError` for a code of a newer peer."""
    if code == LayoutMismatch.code:
        return LayoutMismatch(
            message, detail.get("tensor", ""), detail.get("got", ""), detail.get("expected", "")
        )
    return _BY_CODE.get(code, DcsError)(message)
