"""A member's side of the conversation with the coordinator: one thread that owns a ZMQ DEALER socket.

A link stays a member until it is closed: when its lease has lapsed, or its coordinator was restarted, it
joins again by itself and tells what it knows, so that neither epochs nor versions go back.
"""

import itertools
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from dcs.control.curve import MemberKeys
from dcs.control.messages import (
    MAX_MESSAGE_BYTES,
    Acked,
    Announce,
    Announced,
    Complete,
    Fenced,
    FromCoordinator,
    FromMember,
    Goodbye,
    Heartbeat,
    Join,
    Joined,
    Known,
    Layouts,
    Leave,
    Receipt,
    Refused,
    RunState,
    WantLayouts,
    decode_from_coordinator,
    encode,
)
from dcs.errors import (
    Closed,
    CoordinatorLost,
    DcsError,
    Evicted,
    LayoutMismatch,
    ProtocolError,
    ProtocolMismatch,
    from_refusal,
)
from dcs.interruptible import Condition
from dcs.layout import Layout
from dcs.scarcity import OF_A_SOCKET, opening, require_descriptors, start

_HEARTBEATS_PER_LEASE = 4
_REPEAT_SECONDS = 1.0  # at least, before a request is sent once more
_REMEMBERED_SLOW = 64
_HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Reply = Joined | Announced | Layouts


class Rejoining(Evicted):
    """The lease had lapsed and the link is joining again; ask once more when `await_membership` says so."""


@dataclass(slots=True)
class _Request:
    """One that is not answered yet. It may be sent more than once; a coordinator does not mind."""

    frames: list[bytes]
    sent_at: float
    answer: Reply | DcsError | None = None


def _may_fit_again(message: Fenced | Refused) -> bool:
    """Whether a member that is out may be let in some time: the ranks that do not fit it may be replaced by
    others. It asks as often as members send heartbeats.
    """
    return message.code == LayoutMismatch.code


class Link:
    """Joins, heartbeats, and delivers what the coordinator sends.

    Args:
        address: the coordinator's, `tcp://host:port`.
        receive: called on the link's thread with every message, before anybody waiting for it is woken; must
            be quick. A membership that is over comes as `Fenced(rejoin=False)`, whatever ended it: for good,
            except that one which ended as the ranks' layout does not fit begins anew when others come.
        changed: called on the link's thread when the coordinator falls silent (with the error) or is heard
            again (None).
        curve: keys, when the coordinator has some.
    """

    def __init__(
        self,
        address: str,
        receive: Callable[[FromCoordinator], None],
        changed: Callable[[DcsError | None], None],
        *,
        curve: MemberKeys | None = None,
    ) -> None:
        self.address = address
        self._receive = receive
        self._changed = changed
        self._requests = itertools.count(1)
        self._lock = threading.RLock()
        self._answered = Condition(self._lock)
        self._waiting: dict[int, _Request] = {}
        self._outbox: deque[list[bytes]] = deque()  # encoded, so that what cannot be fails its caller
        self._join: Join | None = None
        self._member = 0  # 0: not joined now
        self._last_member = 0
        self._is_member = threading.Event()
        self._known = Known(0, -1)
        self._said = Heartbeat(0)
        self._lease_seconds = 0.0
        self._beat_at = time.monotonic()
        self._heard = time.monotonic()
        self._joining_since = 0.0
        self._unfit = False  # out as the ranks' layout does not fit
        self._reconnected = 0.0
        self._lost = False
        self._closing = False
        self._over: DcsError | None = None  # what ended the membership for good
        self._curve = curve
        self._handshake_fault = ""  # why a connection that was made was of no use
        with ExitStack() as opened, opening("the connection to the coordinator"):
            self._open(opened)
            self._thread = threading.Thread(target=self._run, name="dcs-link", daemon=True)
            start(self._thread, "the connection to the coordinator")
            opened.pop_all()

    def _open(self, opened: ExitStack) -> None:
        address, curve = self.address, self._curve
        require_descriptors(OF_A_SOCKET, "the connection to the coordinator")
        self._context = zmq.Context()
        opened.callback(self._context.term)
        self._socket = self._context.socket(zmq.DEALER)
        opened.callback(self._socket.close)
        # A name for the connection that survives reconnects; random, so nobody else can take it over.
        self._socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            if curve is not None:
                curve.guard(self._socket)
            self._socket.connect(address)
            self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            raise DcsError(
                f"{address!r} is no coordinator's address: {error}; it looks like tcp://127.0.0.1:4000"
            ) from error
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_EVENTS)
        opened.callback(self._monitor.close, 0)
        opened.callback(self._socket.disable_monitor)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        opened.callback(os.close, self._wake)

    def join(self, join: Join, timeout: float) -> Joined:
        """Become a member until `close`; raises what the coordinator refuses with, or `CoordinatorLost`."""
        request = next(self._requests)
        join = msgspec.structs.replace(join, request=request)
        with self._lock:
            self._join = join
        reply = self._ask(request, join, timeout)
        assert isinstance(reply, Joined)
        return reply

    def announce(
        self,
        epoch: int,
        version: int,
        root: bytes,
        nbytes: int = 0,
        freeze_seconds: float = 0.0,
        timeout: float = 10.0,
    ) -> Announced:
        """Offer this rank's part of a version. `Complete` is received when all ranks have.

        Raises `StaleVersion`, `Evicted`, `CoordinatorLost` (nobody has answered within `timeout` seconds), or
        `Rejoining`, after which the epoch is another one and the part has to be offered again.
        """
        with self._lock:
            member = self._member
            self._raise_if_over()
        if not member:
            raise Rejoining("the lease had lapsed, and the coordinator has not answered since")
        request = next(self._requests)
        message = Announce(request, member, epoch, version, root, nbytes, freeze_seconds)
        reply = self._ask(request, message, timeout)
        assert isinstance(reply, Announced)
        return reply

    def offer(self, epoch: int, version: int, root: bytes, nbytes: int = 0) -> None:
        """Offer a part again, without waiting for the answer, as a publisher that joined again does."""
        request = next(self._requests)
        self._post(lambda member: Announce(request, member, epoch, version, root, nbytes))

    def report(
        self,
        *,
        acked: Acked | None = None,
        staged: Receipt | None = None,
        slow: Iterable[int] = (),
        lost: int | None = None,
    ) -> None:
        """Tell the coordinator now, and again with every heartbeat.

        None means "as before". Of the members reported to be slow the last 64 are repeated.
        """
        with self._lock:
            said = self._said
            self._said = msgspec.structs.replace(
                said,
                acked=acked or said.acked,
                staged=staged or said.staged,
                slow=tuple(dict.fromkeys((*said.slow, *slow)))[-_REMEMBERED_SLOW:],
                lost=said.lost if lost is None else lost,
            )
        self._post(self._heartbeat)

    def layouts(self, fingerprints: Iterable[str], timeout: float) -> dict[str, Layout]:
        """The layouts of these fingerprints, as far as the coordinator knows them.

        Raises `CoordinatorLost`, `Evicted`, `Closed`.
        """
        wanted, deadline = tuple(fingerprints), time.monotonic() + timeout
        while True:
            remaining = max(0.0, deadline - time.monotonic())
            if not self._is_member.wait(remaining):
                raise self._unanswered(timeout)
            with self._lock:
                member = self._member
                self._raise_if_over()
            request = next(self._requests)
            try:
                reply = self._ask(request, WantLayouts(request, member, wanted), remaining)
            except Rejoining:
                continue
            assert isinstance(reply, Layouts)
            return reply.layouts

    def await_membership(self, timeout: float) -> bool:
        """Wait until the link has joined (again); False when the time is over. Raises what ended it."""
        joined = self._is_member.wait(timeout)
        with self._lock:
            self._raise_if_over()
        return joined

    def _raise_if_over(self) -> None:
        """With the lock held: the callers' threads may look before they are told."""
        if self._over is not None:
            raise self._over

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

    # What the callers' threads use.

    def _ask(self, request: int, message: FromMember, timeout: float) -> Reply:
        asked = _Request(encode(message), time.monotonic())
        with self._lock:
            if self._closing:
                raise Closed("this member was closed")
            try:
                self._waiting[request] = asked
                self._outbox.append(asked.frames)
                os.eventfd_write(self._wake, 1)
                self._answered.wait_for(lambda: asked.answer is not None, timeout)
            finally:
                self._waiting.pop(request, None)
        if asked.answer is None:
            raise self._unanswered(timeout)
        if isinstance(asked.answer, DcsError):
            raise asked.answer
        return asked.answer

    def _unanswered(self, timeout: float) -> CoordinatorLost:
        return CoordinatorLost(
            f"no answer from a coordinator at {self.address} within {timeout} s;"
            f" {self._handshake_fault or 'is it running there?'}"
        )

    def _post(self, message: Callable[[int], FromMember]) -> None:
        """Send what needs no answer, if this is a member now."""
        with self._lock:
            if self._closing or not self._member:
                return
            self._outbox.append(encode(message(self._member)))
            os.eventfd_write(self._wake, 1)

    def _heartbeat(self, member: int) -> Heartbeat:
        return msgspec.structs.replace(self._said, member=member)

    # What the link's thread uses.

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake):
            poller.register(source, zmq.POLLIN)
        try:
            while True:
                for ready, _ in poller.poll(self._patience()):
                    if ready == self._wake:
                        os.eventfd_read(self._wake)
                    elif ready is self._monitor:
                        self._shook_hands(recv_monitor_message(self._monitor, zmq.NOBLOCK))
                self._receive_all()
                now = time.monotonic()
                if now >= self._beat_at + self._interval:
                    self._beat_at = now
                    self._beat(now)
                if self._send_all():
                    return
        finally:
            if not self._closing:
                died = CoordinatorLost("the thread that talks to the coordinator has died; see stderr")
                self._changed(died)
                self._fail_waiting(died)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()

    def _shook_hands(self, event: Mapping[str, Any]) -> None:
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            # Connected anew, perhaps to a coordinator that was restarted and knows nobody.
            self._beat_at = self._joining_since = 0.0
            self._handshake_fault = ""
        elif event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self._handshake_fault = (
                "the coordinator there has no CURVE keys and this member was given some; start it with keys"
                " (Coordinator(curve=...), dcs serve --curve-secret-file), or leave curve= out here"
                if self._curve
                else "what is there demands CURVE keys and this member was given none; give"
                " curve=dcs.MemberKeys.of(the coordinator's public key)"
            )
        elif self._curve:
            self._handshake_fault = (
                f"what is there hung up on a handshake with the key {self._curve.server_public.decode()!r};"
                " is that the public key of this coordinator?"
            )
        else:
            self._handshake_fault = "what is there hung up on a handshake, so it is no coordinator"

    @property
    def _interval(self) -> float:
        return self._lease_seconds / _HEARTBEATS_PER_LEASE or _REPEAT_SECONDS

    def _patience(self) -> int:
        """Milliseconds until the next heartbeat."""
        return int(max(0.0, self._beat_at + self._interval - time.monotonic()) * 1000) + 1

    def _beat(self, now: float) -> None:
        with self._lock:
            if self._member:
                self._outbox.append(encode(self._heartbeat(self._member)))
            elif (
                self._last_member  # else it is the first join, which is repeated like any request
                and self._join is not None
                and now - self._joining_since > (self._interval if self._unfit else self._lease_seconds)
            ):
                self._joining_since = now
                self._outbox.append(encode(self._join))
            patience = max(_REPEAT_SECONDS, self._interval)
            for request in self._waiting.values():
                if now - request.sent_at >= patience:
                    request.sent_at = now
                    self._outbox.append(request.frames)
        if not self._lease_seconds or now - self._heard <= self._lease_seconds:
            return
        if not self._lost:
            self._lost = True
            self._changed(
                CoordinatorLost(
                    f"the coordinator at {self.address} was not heard for {now - self._heard:.1f} s"
                )
            )
        if now - self._reconnected > self._lease_seconds:
            # After a partition TCP may take minutes to try again; a new connection does not wait for it.
            self._reconnected = now
            self._socket.disconnect(self._endpoint)
            self._socket.connect(self.address)

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
                # A full queue means a coordinator that is gone; heartbeats and requests are repeated.
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
            if isinstance(message, Goodbye):
                self._lost = True
                error = CoordinatorLost(f"the coordinator at {self.address} has closed")
                self._changed(error)
                self._fail_waiting(error)
                continue
            if self._lost:
                self._lost = False
                self._changed(None)
            self._handle(message)

    def _handle(self, message: FromCoordinator) -> None:
        match message:
            case Joined():
                self._joined(message)
            case Fenced() if not self._member or message.member != self._member:
                return  # about an incarnation of ours that is over
            case Fenced():
                self._fenced(message)
            case Refused():
                self._refused(message)
            case Announced() | Layouts():
                self._receive(message)
                self._answer(message.request, message)
            case RunState(announcement=announcement):
                if announcement is not None:
                    self._learn(announcement.epoch, announcement.version)
                self._receive(message)
            case Complete():
                self._learn(message.epoch, message.version)
                self._receive(message)
            case _:
                self._receive(message)

    def _joined(self, message: Joined) -> None:
        self._learn(message.epoch, message.version)
        with self._lock:
            self._member = self._last_member = message.member
        self._lease_seconds, self._unfit = message.lease_seconds, False
        self._beat_at = time.monotonic()
        self._receive(message)
        if (
            self._said.acked is not None or self._said.staged is not None
        ):  # what the coordinator may not know yet
            self._post(self._heartbeat)
        self._is_member.set()
        self._answer(message.request, message)

    def _fenced(self, message: Fenced) -> None:
        error = from_refusal(message.code, message.message, message.detail)
        self._is_member.clear()
        self._unfit = _may_fit_again(message)
        with self._lock:
            self._member = 0
            if (message.rejoin or _may_fit_again(message)) and self._join is not None:
                self._joining_since = time.monotonic()
                self._join = msgspec.structs.replace(
                    self._join, request=next(self._requests), known=self._known
                )
                if message.rejoin:
                    self._outbox.append(encode(self._join))
            else:
                self._join, self._over = None, error
                self._is_member.set()  # nobody needs to wait for it any more
        self._receive(message)
        self._fail_waiting(Rejoining(message.message) if message.rejoin else error)

    def _refused(self, message: Refused) -> None:
        error = from_refusal(message.code, message.message, message.detail)
        with self._lock:
            waiting = self._waiting.pop(message.request, None)
            over = self._join is not None and message.request in (0, self._join.request)
            self._unfit = over and self._last_member > 0 and _may_fit_again(message)
            if over and not self._unfit:
                self._join, self._member = None, 0
                if self._last_member:
                    self._over = error
                    self._is_member.set()
        if waiting is not None:
            self._settle(waiting, error)
        elif over:
            if self._last_member:
                self._receive(
                    Fenced(self._last_member, message.code, message.message, message.detail, rejoin=False)
                )
            self._fail_waiting(error)  # the coordinator could perhaps not even read which request it was

    def _learn(self, epoch: int, version: int) -> None:
        self._known = Known(max(self._known.epoch, epoch), max(self._known.version, version))

    def _answer(self, request: int, reply: Reply) -> None:
        with self._lock:
            waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self._settle(waiting, reply)

    def _fail_waiting(self, error: DcsError) -> None:
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for request in waiting:
            self._settle(request, error)

    def _settle(self, request: _Request, answer: Reply | DcsError) -> None:
        with self._lock:
            request.answer = answer
            self._answered.notify_all()
