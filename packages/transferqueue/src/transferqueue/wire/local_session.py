"""What is said on a Unix socket to the controller of the same host: requests in flight, the hello that
resumes them, and what arrives. Who drives the socket is another matter: `local` does it from the threads that
wait, `local_async` from an event loop, `storage.overseer` from a storage unit.
"""

import array
import asyncio
import os
import socket
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import count

import msgspec

from ..errors import ControllerLost, Malformed, QueueError, Timeout, TooLarge, named
from ..transport.arenas import ArenaMap
from ..transport.pins import Pins
from .channel import Answer, deadline_of, encoded, handles_of
from .messages import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PROTOCOL,
    Cancel,
    Failure,
    Fetch,
    FetchChosen,
    Hello,
    Leased,
    Nack,
    Order,
    Release,
    Request,
    RequestBody,
    Welcome,
    decode_reply,
    encoder,
)

RETRY_FIRST, RETRY_LAST = 0.02, 0.5  # seconds between attempts to reach a controller that restarts
_LENGTH = struct.Struct("<I")
_RECEIVED = 1 << 16
_DESCRIPTORS = socket.CMSG_SPACE(253 * 4)


class LocalPending:
    """A request under way.

    Attributes:
        outcome: set once.
        sent: the controller may have heard of it.
        withdrawn: the controller was told to undo it.
    """

    __slots__ = ("body", "data", "deadline", "id", "outcome", "sent", "waiter", "withdrawn")

    def __init__(self, number: int, body: RequestBody, data: msgspec.Raw, deadline: float) -> None:
        self.id = number
        self.body = body
        self.data = data
        self.deadline = deadline
        self.outcome: Answer | QueueError | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.sent = False
        self.withdrawn = False

    def result(self) -> Answer:
        if isinstance(self.outcome, Answer):
            return self.outcome
        assert self.outcome is not None
        raise self.outcome


class LocalSession:
    """What both drivers share. One thread at a time may call it.

    Attributes:
        failed: why no request can be answered any more, or None.
        welcome: the controller's, once it has come.
        ordered: what to do with an order; only storage units get them.
    """

    def __init__(self, address: str, token: str | None, client: int, pins: Pins, arenas: ArenaMap) -> None:
        self.address = address
        self.failed: QueueError | None = None
        self.welcome: Welcome | None = None
        # Its first key is asked for all the time: a dict would look for it among what was deleted.
        self.outstanding: OrderedDict[int, LocalPending] = OrderedDict()
        self.ordered: Callable[[Order], None] | None = None
        self._token = token or ""
        self._client = client
        self._pins = pins
        self._arenas = arenas
        self._ids = count(1)
        self._releases = count(1)
        self._confirmed: list[int] = []
        self._connected = False
        self._inbox = bytearray()
        self._descriptors: deque[int] = deque()

    def hello(self) -> bytes:
        """What a new connection begins with."""
        self.broken()
        self._connected = True
        hello = Hello(PROTOCOL, self._token, self._client, self._pins.held(), list(self.outstanding))
        return _framed(encoder.encode(Request(0, self._done_below(), 0.0, hello)))

    def repeated(self) -> bytes:
        """All requests in flight, to be sent after a new welcome."""
        return b"".join(self._frame(one) for one in self.outstanding.values() if not one.withdrawn)

    def request(self, body: RequestBody, timeout: float) -> tuple[LocalPending, bytes]:
        """A request in flight and the bytes to send for it. TooLarge if no message takes it."""
        data = encoded(body)
        if len(data) > MAX_BODY_BYTES:
            raise TooLarge(
                f"{type(body).__name__} takes {len(data)} bytes besides the payload, more than the "
                f"{MAX_BODY_BYTES} of a message; name fewer samples at once, or give shorter texts",
                nbytes=len(data),
                limit=MAX_BODY_BYTES,
            )
        pending = LocalPending(next(self._ids), body, data, deadline_of(timeout))
        if self.failed is not None:
            pending.outcome = self.failed.again()
            return pending, b""
        self.outstanding[pending.id] = pending
        return pending, self.released() + self._frame(pending)

    def released(self) -> bytes:
        """What tells the controller of views that are gone; empty if none is."""
        blocks = self._pins.taken()
        if not blocks:
            return b""
        release = Release(next(self._releases), blocks)
        return _framed(encoder.encode(Request(0, self._done_below(), 0.0, release)))

    def withdraw(self, pending: LocalPending) -> RequestBody | None:
        """What to send so that an unwanted request has no effect."""
        if pending.id in self.outstanding:
            pending.withdrawn = True  # it stays outstanding, so that the controller keeps what it has to undo
            return Cancel(pending.id)
        if isinstance(pending.outcome, Answer):
            leased = pending.outcome.body
            self._pins.let_go(*(handle.block for handle in handles_of(leased)))
            if isinstance(leased, Leased) and isinstance(pending.body, Fetch | FetchChosen):
                return Nack(pending.body.partition, leased.lease)
        return None

    def overdue(self, pending: LocalPending) -> bytes:
        """Ends a request whose deadline has passed without a word; returns what undoes it if it is done after
        all.
        """
        if pending.outcome is not None or pending.id not in self.outstanding:
            return b""
        pending.withdrawn = True
        pending.outcome = Timeout(
            f"the controller at {self.address} did not answer {type(pending.body).__name__} in time"
        )
        return self.request(Cancel(pending.id), 30)[1]

    def _done_below(self) -> int:
        return next(iter(self.outstanding), 0)

    def _frame(self, pending: LocalPending) -> bytes:
        pending.sent = self._connected
        timeout = max(0.0, pending.deadline - time.monotonic())
        below = self._done_below()
        if not self._confirmed:
            return _framed(encoder.encode((pending.id, below, timeout, pending.data)))
        confirmed, self._confirmed = self._confirmed, []
        done = [number for number in confirmed if number > below]
        return _framed(encoder.encode((pending.id, below, timeout, pending.data, done)))

    def _answered(self, number: int) -> LocalPending | None:
        """Takes a request whose answer is here. One that is younger than others under way is told to the
        controller, which need not remember its answer any more.
        """
        pending = self.outstanding.pop(number, None)
        if pending is not None and self.outstanding and next(iter(self.outstanding)) < number:
            self._confirmed.append(number)
        return pending

    def received(self, data: bytes, descriptors: list[int]) -> list[LocalPending]:
        """Takes in what arrived; returns the requests it ended."""
        self._descriptors.extend(descriptors)
        inbox = self._inbox
        inbox += data
        ended: list[LocalPending] = []
        at = 0
        while len(inbox) - at >= 4:
            (length,) = _LENGTH.unpack_from(inbox, at)
            if length > MAX_HEADER_BYTES:
                return ended + self.fail(Malformed(f"the controller announces a message of {length} bytes"))
            if len(inbox) - at - 4 < length:
                break
            ended += self._message(bytes(inbox[at + 4 : at + 4 + length]))
            at += 4 + length
        del inbox[:at]
        return ended

    def _message(self, message: bytes) -> list[LocalPending]:
        try:
            reply = decode_reply(message)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self.fail(Malformed(f"{self.address} sent what is no reply ({error})"))
        if len(reply.arenas) > len(self._descriptors):
            return self.fail(
                QueueError(
                    "this process may open no more files, which shared memory needs; raise `ulimit -n`"
                )
            )
        for here in reply.arenas:
            self._arenas.add(here.arena, here.nbytes, self._descriptors.popleft())
        body = reply.body
        if isinstance(body, Welcome):
            if self.welcome is not None and self.welcome.incarnation != body.incarnation:
                return self.fail(replaced(self.address))
            self.welcome = body
            return []
        if isinstance(body, Failure) and reply.id == 0:
            return self.fail(named(body.kind, body.message, body.details))
        if isinstance(body, Order):
            if self.ordered is not None:
                self.ordered(body)
            return []
        pending = self._answered(reply.id)
        if pending is None:
            return []
        if not pending.withdrawn:
            self._pins.received([handle.block for handle in handles_of(body)])
        if isinstance(pending.body, Cancel):
            self._answered(pending.body.request)
        if pending.outcome is not None:
            return []  # it was given up
        if isinstance(body, Failure):
            pending.outcome = named(body.kind, body.message, body.details)
        else:
            pending.outcome = Answer(body)
        return [pending]

    def fail(self, error: QueueError, *, final: bool = True) -> list[LocalPending]:
        """Ends all requests in flight; if `final`, also those to come."""
        if final and self.failed is None:
            self.failed = error
        ended = list(self.outstanding.values())
        self.outstanding.clear()
        for pending in ended:
            if pending.outcome is None:
                pending.outcome = error.again()
            if pending.sent and not final and not isinstance(pending.body, Cancel):
                # The controller may have done it: if it is ever reached again it hears to undo that.
                pending.withdrawn = True
                self.outstanding[pending.id] = pending
        for number in list(self.outstanding):
            self.request(Cancel(number), 30)
        return ended

    def broken(self) -> None:
        """The connection has ended: what arrived of an unfinished message is void."""
        self._connected = False
        self._inbox.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())


def unreachable(address: str, seconds: float) -> ControllerLost:
    return ControllerLost(
        f"the controller at {address} cannot be reached since {seconds:g} s", address=address
    )


def replaced(address: str) -> ControllerLost:
    return ControllerLost(
        f"the controller at {address} was replaced by another that holds none of our samples",
        address=address,
    )


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def receive(connected: socket.socket) -> tuple[bytes, list[int]]:
    """Some bytes and the descriptors beside them; no bytes at the end of the connection."""
    data, ancillary, _, _ = connected.recvmsg(_RECEIVED, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % 4])
    return data, list(descriptors)


def connected_to(name: str) -> socket.socket:
    """A blocking socket connected to a local listener. OSError if there is none on this host."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.connect("\0" + name)
    except OSError:
        connected.close()
        raise
    return connected
