"""The client's end of a connection, whatever carries it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ..errors import InvalidArgument, Timeout
from .messages import Handle, Leased, Located, ReplyBody, RequestBody, encoder

LONGEST = 1e8  # seconds; what is longer is meant as no limit
SLACK = 1.0  # seconds a server that is alive has to tell us that our deadline passed


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the body, and the payload as a buffer. `summed`: its checksum is found right."""

    body: ReplyBody
    payload: Any = b""
    summed: bool = False


class GivenUp(Timeout):
    """Ends a request because another, together with which it was of use, has failed."""


class Pending(Protocol):
    """A request under way."""

    deadline: float


class Channel(Protocol):
    """A way to the controller, and maybe to storage units. Thread-safe where it blocks."""

    local: bool

    def check_open(self) -> None:
        """Raises QueueError if the channel was closed, or belongs to another process."""
        ...

    def reachable(self, peer: Any) -> bool:
        """Whether the peer is connected now."""
        ...

    def submit(
        self,
        peer: Any,
        body: RequestBody,
        payload: Any = None,
        *,
        timeout: float,
        quiet: float | None = None,
    ) -> Any:
        """Sends a request; gives what `result` or `answer` wait for.

        Args:
            quiet: seconds without a word from a storage unit after which it counts as lost.

        Raises:
            InvalidArgument: something in it cannot be sent (an int beyond 64 bits, text that is no Unicode).
        """
        ...

    def give_up(self, pending: Any) -> None:
        """The answer is not wanted any more; what the request may have leased returns."""
        ...

    def close(self) -> None:
        """Ends the connection; requests under way fail. Idempotent."""
        ...


class BlockingChannel(Channel, Protocol):
    def result(self, pending: Any) -> Answer:
        """Blocks for the answer; raises the QueueError that came instead."""
        ...

    def settle(self, pending: Sequence[Any]) -> None:
        """Blocks until all are answered, or one has failed; then the others are given up."""
        ...


class AwaitedChannel(Channel, Protocol):
    async def answer(self, pending: Any) -> Answer:
        """Awaits the answer; raises the QueueError that came instead."""
        ...

    async def settle_async(self, pending: Sequence[Any]) -> None:
        """Awaits until all are answered, or one has failed; then the others are given up."""
        ...


def encoded(body: RequestBody) -> msgspec.Raw:
    """The body ready to send; InvalidArgument if it cannot be."""
    try:
        return msgspec.Raw(encoder.encode(body))
    except (UnicodeEncodeError, OverflowError, TypeError) as error:
        raise InvalidArgument(f"the arguments cannot be sent: {error}") from error


def deadline_of(timeout: float) -> float:
    return time.monotonic() + min(timeout, LONGEST)


def handles_of(body: ReplyBody) -> Sequence[Handle]:
    """The blocks that a reply names, each of which its reader has to release."""
    return body.places.blocks if isinstance(body, Leased | Located) else ()
