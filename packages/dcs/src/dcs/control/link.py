"""A member's side of the conversation with the coordinator: one thread that owns a ZMQ DEALER socket."""

import itertools
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import zmq

from dcs.control.messages import (
    MAX_MESSAGE_BYTES,
    Acked,
    Announce,
    Announced,
    Fenced,
    FromCoordinator,
    FromMember,
    Goodbye,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Refused,
    decode_from_coordinator,
    encode,
)
from dcs.errors import (
    Closed,
    CoordinatorLost,
    DcsError,
    Evicted,
    ProtocolError,
    ProtocolMismatch,
    from_refusal,
)

_HEARTBEATS_PER_LEASE = 4


class Rejoining(Evicted):
    """The lease had lapsed and the link is joining again; ask once more when `await_membership` says so."""


class Link:
    """Joins, heartbeats, and delivers what the coordinator sends.

    Args:
        address: the coordinator's, `tcp://host:port`.
        receive: called on the link's thread with every message, before anybody waiting for it is woken; must
            be quick.
        changed: called on the link's thread when the coordinator falls silent (with the error) or is heard
            again (None).
    """

    def __init__(
        self,
        address: str,
        receive: Callable[[FromCoordinator], None],
        changed: Callable[[DcsError | None], None],
    ) -> None:
        self.address = address
        self._receive = receive
        self._changed = changed
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Joined | Announced]] = {}
        self._outbox: deque[list[bytes]] = deque()  # encoded, so that what cannot be fails its caller
        self._join: Join | None = None
        self._member = 0  # 0: not joined now
        self._is_member = threading.Event()
        self._acked: Acked | None = None
        self._lease_seconds = 0.0
        self._heard = time.monotonic()
        self._rejoined = 0.0
        self._lost = False
        self._closing = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # A name for the connection that survives reconnects; random, so nobody else can take it over.
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise DcsError(
                f"{address!r} is no coordinator's address: {error}; it looks like tcp://127.0.0.1:4000"
            ) from error
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="dcs-link", daemon=True)
        self._thread.start()

    def join(self, join: Join, timeout: float) -> Joined:
        """Become a member until `close`; raises what the coordinator refuses with, or `CoordinatorLost`."""
        request, future = self._new_request()
        join = msgspec.structs.replace(join, request=request)
        with self._lock:
            self._join = join
        reply = self._wait(request, future, join, timeout)
        assert isinstance(reply, Joined)
        return reply

    def announce(self, epoch: int, version: int, root: bytes, timeout: float) -> Announced:
        """Offer a version; raises `StaleVersion`, `Evicted` or `Rejoining`, `CoordinatorLost`."""
        with self._lock:
            member = self._member
        if not member:
            raise Rejoining("the lease had lapsed, and the coordinator has not answered since")
        request, future = self._new_request()
        message = Announce(request, member, epoch, version, root)
        reply = self._wait(request, future, message, timeout)
        assert isinstance(reply, Announced)
        return reply

    def offer(self, epoch: int, version: int, root: bytes) -> None:
        """Offer a version again, without waiting for the answer, as a publisher that joined again does."""
        request = next(self._requests)
        with self._lock:
            self._outbox.append(encode(Announce(request, self._member, epoch, version, root)))
        self._signal()

    def await_membership(self, timeout: float) -> bool:
        """Wait until the link has joined (again); False when the time is over."""
        return self._is_member.wait(timeout)

    def acknowledge(self, acked: Acked) -> None:
        """Tell the coordinator now, and again with every heartbeat."""
        with self._lock:
            self._acked = acked
            if self._member:
                self._outbox.append(encode(Heartbeat(self._member, acked)))
        self._signal()

    def close(self, reason: str = "") -> None:
        """Leave, with a reason for the publisher to see, and release everything. May be called twice."""
        reason = reason[:512].encode(errors="replace").decode()  # it may quote anything
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if self._member:
                self._outbox.append(encode(Leave(self._member, reason)))
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._context.term()
        os.close(self._wake)
        self._fail_waiting(Closed("closed while waiting for the coordinator"))

    def _new_request(self) -> tuple[int, "Future[Joined | Announced]"]:
        request, future = next(self._requests), Future[Joined | Announced]()
        with self._lock:
            self._waiting[request] = future
        return request, future

    def _wait(
        self, request: int, future: "Future[Joined | Announced]", message: FromMember, timeout: float
    ) -> Joined | Announced:
        with self._lock:
            if self._closing:
                raise Closed("this member was closed")
            self._outbox.append(encode(message))
        self._signal()
        try:
            return future.result(timeout)
        except TimeoutError:
            raise CoordinatorLost(
                f"no answer from a coordinator at {self.address} within {timeout} s; is it running there?"
            ) from None
        finally:
            with self._lock:
                self._waiting.pop(request, None)

    def _signal(self) -> None:
        with self._lock:
            if not self._closing:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        beat = time.monotonic()
        try:
            while True:
                interval = self._lease_seconds / _HEARTBEATS_PER_LEASE
                wait = None if not interval else int(max(0.0, beat + interval - time.monotonic()) * 1000) + 1
                for ready, _ in poller.poll(wait):
                    if ready == self._wake:
                        os.eventfd_read(self._wake)
                self._receive_all()
                now = time.monotonic()
                if interval and now >= beat + interval:
                    beat = now
                    self._beat(now)
                if self._send_all():
                    return
        finally:
            self._socket.close()

    def _beat(self, now: float) -> None:
        with self._lock:
            if self._member:
                self._outbox.append(encode(Heartbeat(self._member, self._acked)))
            elif self._join is not None and now - self._rejoined > self._lease_seconds:
                self._rejoined = now
                self._outbox.append(encode(self._join))
        if not self._lost and now - self._heard > self._lease_seconds:
            self._lose(f"the coordinator at {self.address} was not heard for {now - self._heard:.1f} s")

    def _lose(self, text: str) -> None:
        self._lost = True
        error = CoordinatorLost(text)
        self._changed(error)
        self._fail_waiting(error)

    def _send_all(self) -> bool:
        """Send what is queued; True when the link is closing and there is nothing left to send."""
        while True:
            with self._lock:
                if not self._outbox:
                    return self._closing
                frames = self._outbox.popleft()
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                # A full queue means a coordinator that is gone; heartbeats and requests repeat or time out.
                return self._closing

    def _receive_all(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_from_coordinator(frames)
            except (ProtocolError, ProtocolMismatch) as error:
                self._fail_waiting(error)
                continue
            self._heard = time.monotonic()
            if self._lost and not isinstance(message, Goodbye):
                self._lost = False
                self._changed(None)
            self._handle(message)

    def _handle(self, message: FromCoordinator) -> None:
        match message:
            case Joined():
                with self._lock:
                    self._member = message.member
                self._lease_seconds = message.lease_seconds
            case Fenced() if not self._member or message.member != self._member:
                return  # about an incarnation of ours that is over
            case Fenced():
                self._is_member.clear()
                with self._lock:
                    self._member = 0
                    if message.rejoin and self._join is not None:
                        self._rejoined = time.monotonic()
                        self._outbox.append(encode(self._join))
                    else:
                        self._join = None
            case Goodbye():
                self._lose(f"the coordinator at {self.address} has closed")
                return
            case Refused():
                with self._lock:
                    if self._join is not None and message.request in (0, self._join.request):
                        self._join = None
        self._receive(message)
        match message:
            case Joined() | Announced():
                if isinstance(message, Joined):
                    self._is_member.set()
                with self._lock:
                    future = self._waiting.pop(message.request, None)
                if future is not None:
                    future.set_result(message)
            case Fenced():
                error = from_refusal(message.code, message.message, message.detail)
                self._fail_waiting(Rejoining(message.message) if message.rejoin else error)
            case Refused():
                error = from_refusal(message.code, message.message, message.detail)
                if message.request == 0:  # the coordinator could not even read which request it was
                    self._fail_waiting(error)
                with self._lock:
                    future = self._waiting.pop(message.request, None)
                if future is not None:
                    future.set_exception(error)

    def _fail_waiting(self, error: DcsError) -> None:
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for future in waiting:
            future.set_exception(error)
