"""What a node has done by others: what its service does with requests, and what keeps its answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .messages import Write

if TYPE_CHECKING:
    from .node import Answered, Call, Session


class Service(Protocol):
    """What a server part does with requests."""

    def handle(self, call: "Call") -> None:
        """Answers the call now, or keeps it and answers later. A QueueError it raises is the answer."""
        ...

    def more(self, call: "Call", body: Write, payload: Any) -> None:
        """A further part of a request that waits for it."""
        ...

    def release(self, session: "Session", blocks: Sequence[int]) -> None:
        """A client has let go of blocks."""
        ...

    def resume(self, session: "Session", pins: Sequence[int]) -> None:
        """A client is connected (again) and says what it still looks at."""
        ...

    def leave(self, session: "Session") -> None:
        """A client of this host said goodbye: it wants nothing more, but may still look at what it has."""
        ...

    def forget(self, session: "Session") -> None:
        """A client of another host said goodbye, or a process is gone."""
        ...

    def settle(self, now: float) -> float | None:
        """Does what has become due; returns when it next wants to be called, in monotonic seconds. What was
        answered since the last call is sent after it.
        """
        ...


class Ledger(Protocol):
    """Keeps answers for longer than this process lives."""

    def keep(self, call: "Call", answered: "Answered") -> None:
        """A request was answered."""
        ...

    def void(self, session: "Session", request: int) -> None:
        """An answer was taken back; the request may come again as a new one."""
        ...

    def fatal(self, call: "Call", error: Exception) -> None:
        """A request ends this life of the server; the next one must not die of it when it comes again."""
        ...
