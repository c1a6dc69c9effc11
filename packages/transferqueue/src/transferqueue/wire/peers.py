"""What a link knows of the servers it talks to, and of what it asked them."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import numpy as np
import xxhash

from ..errors import Corrupt, QueueError
from .channel import Answer
from .messages import RequestBody, Values, Welcome

AGAIN_FIRST = 2.0  # seconds until a request without payload is sent again, in case it was lost


class Arriving:
    """The payload of an answer that comes in parts."""

    def __init__(self, values: Values, buffer: np.ndarray) -> None:
        self.values = values
        self.buffer = buffer
        self._at = 0
        self._sum = xxhash.xxh3_64()

    def take(self, at: int, part: Any) -> bool:
        """Copies a part to its place; returns whether all are there.

        Raises:
            Corrupt: the parts do not follow each other, are too many, or do not match their checksum.
        """
        end = at + len(part)
        if at != self._at or end > len(self.buffer) or not len(part):
            raise Corrupt(
                f"bytes {at} to {end} came where those from {self._at} of {len(self.buffer)} were due"
            )
        self.buffer[at:end] = np.frombuffer(part, np.uint8)
        self._sum.update(self.buffer[at:end])
        self._at = end
        if end == len(self.buffer) and self._sum.intdigest() != self.values.frame.checksum:
            raise Corrupt(f"a frame of {end} bytes does not match its checksum; it was changed on the way")
        return end == len(self.buffer)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Pending:
    """A request on its way. `future` ends with an Answer or a QueueError.

    Attributes:
        quiet: seconds without a word from the peer after which it counts as lost; None: no matter.
        withdrawn: the server was told to undo it.
        pause: until it is sent again.
        since: when it was sent.
    """

    peer: "Peer"
    body: RequestBody
    encoded: msgspec.Raw
    payload: Any
    deadline: float
    future: "Future[Answer]" = field(default_factory=Future)
    id: int = 0
    greeting: int = 0
    withdrawn: bool = False
    quiet: float | None = None
    pause: float = AGAIN_FIRST
    since: float = 0.0
    incoming: "Arriving | None" = None


@dataclass(eq=False, slots=True)
class Peer:
    """A server we talk to. Only the link's thread touches it after `Link.peer` made it.

    Attributes:
        lost: makes the error that says this peer is gone, from the reason.
        carries_payload: what comes from it is large and read at once: few messages are kept waiting, so that
            their memory is used again.
        confirmed: answered while an older request is under way; the server is told with the next request.
        heard: when a message came last.
        hang_ups: ends of connections before the first was greeted.
        greeting: how often we said hello; a request sent before the last hello is repeated after the welcome.
    """

    name: str
    address: str
    lost: Callable[[str], QueueError]
    carries_payload: bool = False
    welcome: "Future[Welcome]" = field(default_factory=Future)
    socket: Any = None
    monitor: Any = None
    outstanding: OrderedDict[int, Pending] = field(default_factory=OrderedDict)
    ids: "count[int]" = field(default_factory=lambda: count(1))
    confirmed: list[int] = field(default_factory=list)
    heard: float = 0.0
    hang_ups: int = 0
    greeting: int = 0
    greeted: int = 0
    down_since: float | None = None
    failed: QueueError | None = None
    final: bool = False
    incarnation: int | None = None
