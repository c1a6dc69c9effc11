"""The client's end of ZeroMQ: one thread that owns every socket of a client.

`Link.submit` may be called from any thread and returns a future. Requests survive a reconnect: they are
repeated under their id, and the server does them once. A peer that stays unreachable fails them with its own
error.
"""

import asyncio
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import Corrupt, Malformed, QueueError, Timeout, Unauthorized, named
from ..transport.pins import Pins
from ..transport.receive_buffers import ReceiveBuffers, keep_freed_memory
from .channel import SLACK, Answer, GivenUp, deadline_of, encoded, handles_of
from .messages import (
    CHUNK,
    COPY_BELOW,
    PROTOCOL,
    Cancel,
    Chunk,
    Failure,
    Fetch,
    FetchChosen,
    Hello,
    Leased,
    Nack,
    Range,
    Release,
    Request,
    RequestBody,
    Values,
    Welcome,
    Write,
    decode_reply,
    encoder,
)
from .peers import Arriving, Peer, Pending

_IDLE_BYTES = 1 << 28  # of receive buffers kept for the next answers
_AGAIN_LAST = 30.0  # seconds, at most, until a request is sent again
_FEW = 256
_GREETED = zmq.EVENT_HANDSHAKE_SUCCEEDED
_LEFT = zmq.EVENT_DISCONNECTED
_UNGREETED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # it hung up: a wrong key, or it ended just then
_HANG_UPS = 3  # in a row, that mean the first
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Link:
    """All connections of one client.

    Args:
        token: presented in every hello.
        patience: seconds a peer may be unreachable before its requests fail.
        pins: of this client, told to the controller.
        server_key: the public CURVE key of the servers (Z85); None: plain TCP.
    """

    local = False

    def __init__(
        self, token: str | None, patience: float, pins: Pins, server_key: bytes | None = None
    ) -> None:
        self._token = token or ""
        self._patience = patience
        self._pins = pins
        self._server_key = server_key
        self._buffers = ReceiveBuffers(_IDLE_BYTES)
        self._keys = zmq.curve_keypair() if server_key is not None else None
        self._client = secrets.randbits(62)
        self._pid = os.getpid()
        self._inbox: deque[tuple[str, Any]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._peers: list[Peer] = []
        # Weakly: an answer may be large, and belongs to who asked.
        self._deadlines: list[tuple[float, int, weakref.ref[Pending]]] = []
        self._sweep_at = _FEW
        self._releases = count(1)
        self._numbers = count()
        self._lock = threading.Lock()
        self._closed = False
        pins.notify = self._tell_released
        self._thread = threading.Thread(target=self._run, name="transferqueue-link", daemon=True)
        self._thread.start()

    # -- any thread ------------------------------------------------------------------------------------------

    def peer(
        self, name: str, address: str, lost: Callable[[str], QueueError], *, carries_payload: bool = False
    ) -> Peer:
        """Starts connecting to a server; `peer.welcome` ends with its welcome or the reason why not."""
        if carries_payload:
            keep_freed_memory()
        peer = Peer(name, address, lost, carries_payload)
        self._tell("connect", peer)
        return peer

    def submit(
        self,
        peer: Any,
        body: RequestBody,
        payload: Any = None,
        *,
        timeout: float,
        quiet: float | None = None,
    ) -> Any:
        """Sends a request; its future ends within `timeout` seconds and a little.

        Args:
            quiet: seconds without a word from the peer after which it counts as lost.

        Raises:
            InvalidArgument: something in it cannot be sent (an int beyond 64 bits, text that is no Unicode).
        """
        if not isinstance(peer, Peer):
            return peer.submit(body, payload, timeout)  # a payload transport of its own
        pending = _pending(peer, body, payload, timeout)
        pending.quiet = quiet
        pending.future.set_running_or_notify_cancel()  # only an answer, an error or the deadline ends it
        self._tell("send", pending)
        return pending

    def check_open(self) -> None:
        """Raises QueueError if the link was closed, or belongs to another process."""
        if self._pid != os.getpid():
            raise QueueError("this client was connected in another process; connect again after a fork")
        if self._closed:
            raise QueueError("this client is closed; connect again")

    def reachable(self, peer: Peer) -> bool:
        """Whether the peer is connected now."""
        return peer.failed is None and peer.down_since is None

    def result(self, pending: Any) -> Answer:
        """Blocks for the answer; raises the QueueError that came instead."""
        return pending.future.result(max(0.0, pending.deadline - time.monotonic()) + 30.0)  # ends long before

    async def answer(self, pending: Any) -> Answer:
        """Awaits the answer; raises the QueueError that came instead."""
        return await asyncio.wrap_future(pending.future)

    def settle(self, pending: Sequence[Pending]) -> None:
        """Blocks until all are answered, or one has failed; then the others are given up."""
        longest = max(one.deadline for one in pending) - time.monotonic()
        left = wait([one.future for one in pending], max(0.0, longest) + 30.0, FIRST_EXCEPTION).not_done
        self._give_up_all(one for one in pending if one.future in left)

    async def settle_async(self, pending: Sequence[Pending]) -> None:
        """Awaits until all are answered, or one has failed; then the others are given up."""
        futures = [asyncio.wrap_future(one.future) for one in pending]
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
            left = [one for one, future in zip(pending, futures, strict=True) if not future.done()]
        finally:
            for future in futures:
                if future.done() and not future.cancelled():
                    future.exception()  # it is raised where the answer is awaited
                future.cancel()
        self._give_up_all(left)

    def _give_up_all(self, pending: Iterable[Pending]) -> None:
        for one in pending:
            self.give_up(one)

    def give_up(self, pending: Any) -> None:
        """The answer is not wanted any more; what the request may have leased returns."""
        if isinstance(pending, Pending):
            self._tell("cancel", pending)
        else:
            pending.withdraw()

    def close(self) -> None:
        """Ends the thread; requests under way fail."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
            self._inbox.append(("stop", None))
            os.eventfd_write(self._wake, 1)
        if not self.is_own_thread():
            self._thread.join(timeout=10)

    def is_own_thread(self) -> bool:
        """Whether the caller is the link's thread, as where the garbage collector runs there."""
        return threading.current_thread() is self._thread

    def _tell_released(self) -> None:
        """Called by finalizers, in any thread: the next message to the controller tells it."""
        try:
            os.eventfd_write(self._wake, 1)
        except OSError:
            return  # the link has ended

    def _tell(self, what: str, subject: Any) -> None:
        if self._pid != os.getpid():
            raise QueueError("this client was connected in another process; connect again after a fork")
        with self._lock:
            if self._closed:
                raise QueueError("this client is closed; connect again")
            self._inbox.append((what, subject))
            os.eventfd_write(self._wake, 1)

    # -- the link's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._handlers: dict[Any, Callable[[], bool]] = {}
        running = True
        while running:
            ready = self._poller.poll(self._wait())
            for source, _ in ready:
                if source == self._wake:
                    os.eventfd_read(self._wake)
                    running = self._read_inbox()
                elif (handler := self._handlers.get(source)) is not None:
                    while handler():
                        pass
            self._release()
            self._expire(time.monotonic())
        for peer in self._peers:
            self._fail(peer, QueueError("this client was closed while the request was under way"), final=True)
            peer.socket.disable_monitor()
        self._context.destroy(linger=0)
        self._buffers.close()
        self._pins.notify = None
        os.close(self._wake)

    def _wait(self) -> int | None:
        times = [self._deadlines[0][0]] if self._deadlines else []
        down = (peer.down_since for peer in self._peers if peer.failed is None)
        times.extend(since + self._patience for since in down if since is not None)
        return min(60_000, max(0, int((min(times) - time.monotonic()) * 1000) + 1)) if times else None

    def _read_inbox(self) -> bool:
        while self._inbox:
            what, subject = self._inbox.popleft()
            match what:
                case "connect":
                    self._connect(subject)
                case "send":
                    self._start(subject)
                case "cancel":
                    self._cancel(subject)
                case "stop":
                    return False
        return True

    def _connect(self, peer: Peer) -> None:
        peer.down_since = time.monotonic()
        socket = peer.socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 8 if peer.carries_payload else 0)
        socket.setsockopt(zmq.IPV6, 1 if "[" in peer.address else 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(
            zmq.HEARTBEAT_IVL, 5_000
        )  # answered by libzmq's own thread, also while the server computes
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        if self._keys is not None:
            socket.curve_serverkey = self._server_key
            socket.curve_publickey, socket.curve_secretkey = self._keys
        peer.monitor = socket.get_monitor_socket(_GREETED | _LEFT | _REFUSED | _UNGREETED)
        self._peers.append(peer)
        self._handlers[socket] = lambda: self._receive(peer)
        self._handlers[peer.monitor] = lambda: self._observe(peer)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(peer.monitor, zmq.POLLIN)
        try:
            socket.connect(peer.address)
        except zmq.ZMQError as error:
            self._fail(peer, peer.lost(f"{peer.address!r} is no address to connect to ({error})"), final=True)

    def _observe(self, peer: Peer) -> bool:
        try:
            event = recv_monitor_message(peer.monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return False
        if event == _GREETED:
            self._greet(peer)
        elif event == _LEFT and peer.down_since is None:
            peer.down_since = time.monotonic()
        elif event == _UNGREETED and self._keys is not None and not peer.greeting:
            peer.hang_ups += 1
        if event & _REFUSED or peer.hang_ups >= _HANG_UPS:
            self._fail(
                peer,
                Unauthorized(
                    f"{peer.name} at {peer.address} refused the connection: its CURVE key is another, or it "
                    "has none; pass the server_key that the store prints"
                ),
                final=True,
            )
        return True

    def _greet(self, peer: Peer) -> None:
        peer.greeting += 1
        pins = self._pins.held() if peer is self._peers[0] else []
        hello = Hello(PROTOCOL, self._token, self._client, pins, list(peer.outstanding))
        below = next(iter(peer.outstanding), 0)
        peer.socket.send(encoder.encode(Request(0, below, 0.0, hello)))

    def _release(self) -> None:
        """Tells the controller, the first peer, which blocks this client has let go of."""
        if self._peers and self._peers[0].greeted and (blocks := self._pins.taken()):
            peer = self._peers[0]
            below = next(iter(peer.outstanding), 0)
            peer.socket.send(encoder.encode(Request(0, below, 0.0, Release(next(self._releases), blocks))))

    def _start(self, pending: Pending) -> None:
        peer = pending.peer
        if peer.failed is not None:
            _end(pending, peer.failed.again())
            return
        pending.id = next(peer.ids)
        pending.since = time.monotonic()
        peer.outstanding[pending.id] = pending
        if peer.greeting:
            self._send(pending)  # otherwise it follows the first welcome
        self._watch(pending)

    def _watch(self, pending: Pending) -> None:
        """Has the request looked at when it is due to be sent again, or overdue."""
        if len(self._deadlines) >= self._sweep_at:
            self._deadlines = [entry for entry in self._deadlines if _under_way(entry[2]) is not None]
            heapify(self._deadlines)
            self._sweep_at = 2 * len(self._deadlines) + _FEW
        due = pending.deadline + SLACK
        if isinstance(pending.body, Cancel):
            due = time.monotonic() + pending.pause  # until it is heard
        if pending.quiet is not None:
            due = min(due, max(pending.since, pending.peer.heard) + pending.quiet)
        if pending.payload is None:
            due = min(due, time.monotonic() + pending.pause)
        heappush(self._deadlines, (due, next(self._numbers), weakref.ref(pending)))

    def _send(self, pending: Pending) -> None:
        peer = pending.peer
        pending.greeting = peer.greeting
        pending.since = time.monotonic()
        timeout = max(0.0, pending.deadline - pending.since)
        below = next(iter(peer.outstanding))
        request: tuple[Any, ...] = (pending.id, below, timeout, pending.encoded)
        if peer.confirmed:
            confirmed, peer.confirmed = peer.confirmed, []
            request += ([number for number in confirmed if number > below],)
        header = encoder.encode(request)  # a Request
        if pending.payload is None:
            peer.socket.send(header)
        elif isinstance(pending.body, Write) and len(pending.payload) > CHUNK:
            self._send_in_chunks(pending, pending.body.range, timeout)
        else:
            peer.socket.send(header, zmq.SNDMORE)
            peer.socket.send(pending.payload, copy=len(pending.payload) < COPY_BELOW)

    @staticmethod
    def _send_in_chunks(pending: Pending, where: Range, timeout: float) -> None:
        peer = pending.peer
        below = next(iter(peer.outstanding))
        for at in range(0, len(pending.payload), CHUNK):
            peer.socket.send(
                encoder.encode(Request(pending.id, below, timeout, Write(where, at))), zmq.SNDMORE
            )
            peer.socket.send(pending.payload[at : at + CHUNK], copy=False)

    def _cancel(self, pending: Pending) -> None:
        peer, body = pending.peer, pending.body
        if pending.id in peer.outstanding:
            if not pending.withdrawn:
                pending.withdrawn = True
                self._start(_pending(peer, Cancel(pending.id), None, 30))
            _end(pending, GivenUp("given up"))
        elif pending.future.exception(0) is None:
            leased = pending.future.result(0).body
            self._pins.let_go(*(handle.block for handle in handles_of(leased)))
            if isinstance(leased, Leased) and isinstance(body, Fetch | FetchChosen):
                self._start(_pending(peer, Nack(body.partition, leased.lease), None, 30))

    def _receive(self, peer: Peer) -> bool:
        try:
            frames = peer.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        try:
            reply = decode_reply(frames[0].buffer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(
                peer, Malformed(f"{peer.name} at {peer.address} sent what is no reply ({error})"), final=True
            )
            return True
        peer.heard = time.monotonic()
        body = reply.body
        if isinstance(body, Values | Chunk):
            self._take_values(peer, reply.id, body, frames[1].buffer if len(frames) > 1 else b"")
        elif isinstance(body, Welcome):
            self._welcomed(peer, body)
        elif isinstance(body, Failure) and body.kind == "HelloRequired":
            if peer.greeted == peer.greeting:
                self._greet(peer)
        elif isinstance(body, Failure) and reply.id == 0:
            self._fail(peer, named(body.kind, body.message, body.details), final=True)
        else:
            pending = self._answered(peer, reply.id)
            if pending is None:
                return True  # a second answer: the server counts the pins of a request once
            if not pending.withdrawn:
                self._pins.received(handle.block for handle in handles_of(body))
            if isinstance(pending.body, Cancel):
                self._answered(peer, pending.body.request)
            if isinstance(body, Failure):
                _end(pending, named(body.kind, body.message, body.details))
            else:
                _end(pending, Answer(body, frames[1].buffer if len(frames) > 1 else b""))
        return True

    @staticmethod
    def _answered(peer: Peer, number: int) -> Pending | None:
        """Takes a request whose answer is here."""
        pending = peer.outstanding.pop(number, None)
        if pending is not None and peer.outstanding and next(iter(peer.outstanding)) < number:
            peer.confirmed.append(number)
        return pending

    def _take_values(self, peer: Peer, number: int, body: Values | Chunk, payload: Any) -> None:
        """The payload of an answer, whole or in parts."""
        pending = peer.outstanding.get(number)
        if pending is None:
            return
        if isinstance(body, Values):
            if body.nbytes == len(payload):
                self._answered(peer, number)
                _end(pending, Answer(body, payload))
                return
            pending.incoming = Arriving(body, self._buffers.take(body.nbytes))
            return
        if pending.incoming is None:
            return  # of a connection that was lost since
        try:
            done = pending.incoming.take(body.at, payload)
        except Corrupt as error:
            done, outcome = True, error
        else:
            outcome = Answer(pending.incoming.values, pending.incoming.buffer, summed=True)
        if done:
            self._answered(peer, number)
            pending.incoming = None
            _end(pending, outcome)

    def _welcomed(self, peer: Peer, welcome: Welcome) -> None:
        if peer.incarnation is not None and peer.incarnation != welcome.incarnation:
            self._fail(peer, peer.lost("was replaced by another that holds none of our samples"), final=True)
            return
        peer.incarnation = welcome.incarnation
        peer.greeted = peer.greeting
        peer.down_since = peer.failed = None
        if not peer.welcome.done():
            peer.welcome.set_result(welcome)
        for pending in list(peer.outstanding.values()):
            if pending.greeting < peer.greeting and not pending.withdrawn:
                self._send(pending)

    def _expire(self, now: float) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or _under_way(self._deadlines[0][2]) is None):
            pending = _under_way(heappop(self._deadlines)[2])
            if pending is not None:
                self._look_at(pending, now)
        for peer in self._peers:
            if (
                peer.down_since is not None
                and peer.failed is None
                and now >= peer.down_since + self._patience
            ):
                self._fail(peer, peer.lost(f"cannot be reached since {self._patience:g} s"), final=False)

    def _look_at(self, pending: Pending, now: float) -> None:
        """Ends a request that is overdue; sends another again, as it may have been lost."""
        peer, what = pending.peer, type(pending.body).__name__
        if pending.quiet is not None and now >= max(pending.since, peer.heard) + pending.quiet:
            outcome: QueueError = peer.lost(f"said nothing for {pending.quiet:g} s")
        elif now >= pending.deadline + SLACK and not isinstance(pending.body, Cancel):
            outcome = Timeout(f"{peer.name} at {peer.address} did not answer {what} in time")
        else:
            if pending.payload is None and now >= pending.since + pending.pause:
                pending.pause = min(2 * pending.pause, _AGAIN_LAST)
                if peer.greeting and peer.greeted == peer.greeting and peer.down_since is None:
                    self._send(pending)
            self._watch(pending)
            return
        pending.withdrawn = True
        if peer.greeting and peer.failed is None:
            self._start(_pending(peer, Cancel(pending.id), None, 30))
        _end(pending, outcome)

    def _fail(self, peer: Peer, error: QueueError, *, final: bool) -> None:
        """Ends everything under way; unless `final`, a later welcome makes the peer usable again."""
        if peer.final:
            return
        peer.failed, peer.final = error, final
        if not peer.welcome.done():
            peer.welcome.set_exception(error)
        under_way = list(peer.outstanding.values())
        peer.outstanding.clear()
        for pending in under_way:
            _end(pending, error.again())
            if final or not pending.greeting or isinstance(pending.body, Cancel):
                continue
            # The server may have done it, or do it yet: if it is ever reached again it hears to undo that.
            pending.withdrawn = True
            peer.outstanding[pending.id] = pending
        for pending in list(peer.outstanding.values()):
            cancel = _pending(peer, Cancel(pending.id), None, 30)
            cancel.id = next(peer.ids)
            peer.outstanding[cancel.id] = cancel
            self._watch(cancel)


def _pending(peer: Peer, body: RequestBody, payload: Any, timeout: float) -> Pending:
    return Pending(peer, body, encoded(body), payload, deadline_of(timeout))


def _under_way(pending: "weakref.ref[Pending]") -> Pending | None:
    found = pending()
    return None if found is None or found.future.done() else found


def _end(pending: Pending, outcome: Answer | QueueError) -> None:
    pending.payload = None  # the deadline heap may hold the request for a while yet
    if pending.future.done():
        return  # it was given up
    if isinstance(outcome, Answer):
        pending.future.set_result(outcome)
    else:
        pending.future.set_exception(outcome)
