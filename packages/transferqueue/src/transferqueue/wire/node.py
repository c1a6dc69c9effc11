"""The socket of a server process: one ROUTER, one thread, one service that is told about one request at a
time.

Here lives what controller and storage units have in common: tokens, protocol versions, the refusal of bytes
that are no message, and the memory of answers that makes a repeated request have one effect.
"""

import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import zmq

from ..errors import Malformed, ProtocolMismatch, QueueError, Timeout, TooLarge, Unauthorized
from .messages import (
    COPY_BELOW,
    PROTOCOL,
    Cancel,
    Done,
    Failure,
    Goodbye,
    Hello,
    IsClosed,
    Read,
    ReadLedger,
    ReadStats,
    Reply,
    ReplyBody,
    Request,
    RequestBody,
    UnitAddress,
    Welcome,
    decode_request,
    encoder,
)

log = logging.getLogger("transferqueue")

_REPEATABLE = (Read, ReadStats, ReadLedger, IsClosed)  # answered afresh, as they change nothing
_MAX_CLIENTS = 10_000
_MAX_MESSAGES_A_TURN = 64


class Service(Protocol):
    """What a server part does with requests."""

    def handle(self, call: "Call") -> None:
        """Answers the call now, or keeps it and answers later. A QueueError it raises is the answer."""
        ...

    def settle(self, now: float) -> float | None:
        """Does what has become due; returns when it next wants to be called, in monotonic seconds."""
        ...

    def forget(self, client: int) -> None:
        """A client said goodbye."""
        ...


class Client:
    """What a server remembers of one client, whatever connection it comes by.

    Attributes:
        low: requests below this are finished on the client's side; repeats of them are late duplicates.
        answers: encoded answers, and how to undo them, of requests the client may still repeat.
        waiting: calls not answered yet.
    """

    __slots__ = ("answers", "low", "number", "waiting")

    def __init__(self, number: int) -> None:
        self.number = number
        self.low = 0
        self.answers: dict[int, tuple[bytes, Callable[[], None] | None]] = {}
        self.waiting: dict[int, Call] = {}

    def prune(self, low: int) -> None:
        self.low = max(self.low, low)
        while self.answers and (first := next(iter(self.answers))) < self.low:
            del self.answers[first]


class Call:
    """One request in a service's hands. Answer it exactly once.

    Attributes:
        deadline: when the client stops waiting, in monotonic seconds.
        undo: set by a service whose answer can be taken back if the client gives up before it arrives.
    """

    __slots__ = ("_node", "answered", "body", "client", "deadline", "id", "identity", "payload", "undo")

    def __init__(self, node: "Node", client: Client, identity: bytes, request: Request, payload: Any) -> None:
        self._node = node
        self.client = client
        self.identity = identity
        self.id = request.id
        self.body: RequestBody = request.body
        self.payload = payload
        self.deadline = time.monotonic() + request.timeout
        self.answered = False
        self.undo: Callable[[], None] | None = None

    def reply(self, body: ReplyBody, payload: Any = None) -> None:
        self._node.answer(self, body, payload)

    def fail(self, error: QueueError) -> None:
        self.reply(Failure(type(error).__name__, str(error), error.details))

    def refuse(self) -> None:
        self.fail(Malformed(f"{type(self.body).__name__} is no request for this server"))


class Node:
    """Serves one service on one port until told to stop or until the parent process is gone.

    Args:
        lifelines: file descriptors; when any becomes readable, the node stops.
        token: what a client must present, or None.
    """

    def __init__(self, host: str, port: int, *, token: str | None, max_frame_bytes: int) -> None:
        self._token = token
        self._max_frame_bytes = max_frame_bytes
        self._incarnation = secrets.randbits(62)
        self._connections: OrderedDict[bytes, Client] = OrderedDict()
        self._clients: OrderedDict[int, Client] = OrderedDict()
        self._complained: OrderedDict[bytes, None] = OrderedDict()
        self._units: list[UnitAddress] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)
        self._socket.setsockopt(zmq.RCVHWM, 10_000)
        self._socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        shown = f"[{host}]" if ":" in host else host
        self._socket.bind(f"tcp://{shown}:{port or '*'}")
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def run(self, service: Service, lifelines: Sequence[int], units: Sequence[UnitAddress] = ()) -> None:
        self._service = service
        self._units = list(units)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for lifeline in lifelines:
            poller.register(lifeline, zmq.POLLIN)
        due: float | None = None
        while True:
            wait = None if due is None else min(60_000, max(0, int((due - time.monotonic()) * 1000) + 1))
            ready = dict(poller.poll(wait))
            if any(lifeline in ready for lifeline in lifelines):
                break
            if self._socket in ready:
                self._receive_some()
            due = service.settle(time.monotonic())
        self._context.destroy(linger=0)

    def _receive_some(self) -> None:
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(frames[0].bytes, frames[1:])

    def _receive(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        try:
            request = _decode(frames)
        except Malformed as error:
            self._complain(identity, error)
            return
        payload = frames[1].buffer if len(frames) == 2 else b""
        if isinstance(request.body, Hello):
            self._greet(identity, request.body)
            return
        client = self._connections.get(identity)
        if client is None:
            self._send(identity, _encoded(request.id, Failure("HelloRequired", "say hello first", {})), None)
            return
        self._connections.move_to_end(identity)
        client.prune(request.done_below)
        if request.id < client.low:
            return
        if request.id in client.answers:
            self._send(identity, client.answers[request.id][0], None)
        elif request.id in client.waiting:
            client.waiting[request.id].identity = identity
        else:
            self._handle(Call(self, client, identity, request, payload))

    def _handle(self, call: Call) -> None:
        call.client.waiting[call.id] = call
        try:
            match call.body:
                case Goodbye():
                    self._service.forget(call.client.number)
                    call.reply(Done())
                    self._clients.pop(call.client.number, None)
                case Cancel(target):
                    self._cancel(call.client, target)
                    call.reply(Done())
                case _:
                    self._service.handle(call)
        except QueueError as error:
            call.fail(error)

    def _cancel(self, client: Client, target: int) -> None:
        if target in client.waiting:
            client.waiting[target].fail(Timeout("given up by the client"))
        elif target in client.answers:
            answer, undo = client.answers[target]
            client.answers[target] = (answer, None)
            if undo is not None:
                undo()

    def _greet(self, identity: bytes, hello: Hello) -> None:
        error: QueueError | None = None
        if hello.protocol != PROTOCOL:
            error = ProtocolMismatch(
                f"the client speaks protocol {hello.protocol}, this server {PROTOCOL}; "
                "install the same transferqueue on both sides",
                got=hello.protocol,
                expected=PROTOCOL,
            )
        elif self._token is not None and not hmac.compare_digest(self._token.encode(), hello.token.encode()):
            error = Unauthorized("the token is missing or wrong; pass the token the server was started with")
        if error is not None:
            self._complain(identity, error)
            return
        client = self._clients.get(hello.client) or Client(hello.client)
        self._clients[hello.client] = client
        self._clients.move_to_end(hello.client)
        self._connections[identity] = client
        if len(self._connections) > _MAX_CLIENTS:
            self._connections.popitem(last=False)  # if it lives it is asked to say hello again
        if len(self._clients) > _MAX_CLIENTS:
            self._clients.popitem(last=False)
        welcome = Welcome(PROTOCOL, self._incarnation, self._units, self._max_frame_bytes)
        self._send(identity, _encoded(0, welcome), None)

    def _complain(self, identity: bytes, error: QueueError) -> None:
        """Refuses a connection's message; the log says so once for each connection."""
        if identity not in self._complained:
            log.warning("refused a message: %s: %s", type(error).__name__, error)
            self._complained[identity] = None
            if len(self._complained) > _MAX_CLIENTS:
                self._complained.popitem(last=False)
        self._send(identity, _encoded(0, Failure(type(error).__name__, str(error), error.details)), None)

    def answer(self, call: Call, body: ReplyBody, payload: Any) -> None:
        if call.answered:
            raise AssertionError(f"request {call.id} ({type(call.body).__name__}) is answered twice")
        if payload is not None and len(payload) > self._max_frame_bytes:
            error = TooLarge(
                f"the answer has {len(payload)} bytes, more than the {self._max_frame_bytes} of a frame; "
                "ask for fewer samples or fields",
                nbytes=len(payload),
                limit=self._max_frame_bytes,
            )
            body, payload = Failure("TooLarge", str(error), error.details), None
        call.answered = True
        call.client.waiting.pop(call.id, None)
        encoded = _encoded(call.id, body)
        sent = self._send(call.identity, encoded, payload)
        if not sent and call.undo is not None:
            # A dead consumer must not get samples. If it only lost its connection it asks again, for others.
            call.undo()
        elif not isinstance(call.body, _REPEATABLE):
            call.client.answers[call.id] = (encoded, call.undo)

    def _send(self, identity: bytes, header: bytes, payload: Any) -> bool:
        """Returns whether there was a connection to send by."""
        try:
            self._socket.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
            if payload is None:
                self._socket.send(header, zmq.NOBLOCK)
                return True
            self._socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
            self._socket.send(payload, zmq.NOBLOCK, copy=len(payload) < COPY_BELOW)
            return True
        except zmq.ZMQError as error:
            # The connection is gone or reads nothing: the client repeats the request when it is back, or
            # times out.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False


def _decode(frames: list[zmq.Frame]) -> Request:
    if len(frames) not in (1, 2):
        raise Malformed(f"a message of {len(frames)} frames; a header and at most one payload are expected")
    try:
        request = decode_request(frames[0].buffer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Malformed(f"a header of {len(frames[0].buffer)} bytes is no request ({error})") from error
    if not 0 <= request.timeout < 1e9:
        raise Malformed(f"a request with a timeout of {request.timeout} s")
    return request


def _encoded(number: int, body: ReplyBody) -> bytes:
    return encoder.encode(Reply(number, body))
