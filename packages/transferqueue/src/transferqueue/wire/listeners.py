"""Where a server process is reached: a ZeroMQ port for every host, a Unix socket for its own.

A listener turns what arrives into ``(connection, header, payload)`` and reports connections that end; it
knows nothing of requests.
"""

import array
import errno
import os
import socket
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from select import EPOLLIN, EPOLLOUT, epoll
from typing import Any, Protocol

import zmq

from .messages import COPY_BELOW, MAX_HEADER_BYTES

_MAX_MESSAGES_A_TURN = 64
_MAX_UNSENT = 1 << 22  # bytes kept for a local client that does not read; beyond it, nothing more is heard
_RECEIVED = 1 << 16  # bytes at once; more would be mapped afresh each time
_MAX_STRANGERS = 1_024  # local connections that have not said hello
_MAX_HELLO_BYTES = 1 << 24
_LENGTH = struct.Struct("<I")


class Connection(Protocol):
    """One peer's end. Hashable by identity.

    Attributes:
        local: the peer is on this host, and takes descriptors.
        greeted: it has said hello and was welcome.
        pid: of a peer on this host; 0: of another, or not ours to see.
    """

    local: bool
    greeted: bool
    pid: int

    def send(self, header: bytes, payload: Any = None, descriptors: Sequence[int] = ()) -> bool:
        """Sends a message; returns whether there was a connection to send by."""
        ...

    def hang_up(self) -> None:
        """Ends the connection from this side."""
        ...


class Receiver(Protocol):
    """Who is told about what a listener hears."""

    def received(self, connection: Connection, header: Any, payload: Any) -> None: ...

    def malformed(self, connection: Connection, why: str) -> None: ...

    def ended(self, connection: Connection) -> None: ...


class Poll:
    """The descriptors a server process waits for, each with what to do when it is ready."""

    def __init__(self) -> None:
        self._epoll = epoll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def watch(
        self,
        descriptor: int,
        handler: Callable[[], None],
        *,
        readable: bool = True,
        writable: bool = False,
    ) -> None:
        """Calls `handler` when the descriptor is readable, writable, or has ended; again replaces it."""
        mask = (EPOLLIN if readable else 0) | (EPOLLOUT if writable else 0)
        if descriptor in self._handlers:
            self._epoll.modify(descriptor, mask)
        else:
            self._epoll.register(descriptor, mask)
        self._handlers[descriptor] = handler

    def forget(self, descriptor: int) -> None:
        """Stops waiting for a descriptor, which is still open."""
        if self._handlers.pop(descriptor, None) is not None and not self._epoll.closed:
            self._epoll.unregister(descriptor)

    def turn(self, seconds: float | None) -> None:
        """Waits up to `seconds` and handles what is ready."""
        for descriptor, _ in self._epoll.poll(-1 if seconds is None else seconds, 256):
            handler = self._handlers.get(descriptor)
            if handler is not None:
                handler()

    def close(self) -> None:
        self._epoll.close()


class _ZmqConnection:
    local = False
    pid = 0

    def __init__(self, listener: "ZmqListener", identity: bytes) -> None:
        self._listener = listener
        self._socket = listener.socket
        self.identity = identity
        self.greeted = False

    def send(self, header: bytes, payload: Any = None, descriptors: Sequence[int] = ()) -> bool:
        self._listener.stirred = True  # sending takes the sign that there is something to read
        try:
            self._socket.send(self.identity, zmq.SNDMORE | zmq.NOBLOCK)
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

    def hang_up(self) -> None:
        """A ROUTER cannot end a connection; what it says is refused again."""


class ZmqListener:
    """A ROUTER socket.

    Args:
        port: 0 takes a free one.
        max_message_bytes: larger ones end the connection they come by.
        waiting: messages of a peer that are received before they are handled.
        keys: public and secret CURVE key; clients then need the public one. None: plain TCP.

    Raises:
        zmq.ZMQError: it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_message_bytes: int,
        waiting: int = 10_000,
        keys: tuple[bytes, bytes] | None = None,
    ) -> None:
        self.stirred = True  # there may be something to read
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # A host that vanished says nothing: without this its clients would hold what they hold forever.
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self.socket.setsockopt(zmq.SNDHWM, 100_000)
        self.socket.setsockopt(zmq.RCVHWM, waiting)
        self.socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        if keys is not None:
            self.socket.curve_server = True
            self.socket.curve_publickey, self.socket.curve_secretkey = keys
        self._connections: OrderedDict[bytes, _ZmqConnection] = OrderedDict()
        shown = f"[{host}]" if ":" in host else host
        try:
            self.socket.bind(f"tcp://{shown}:{port or '*'}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def start(self, poll: Poll, receiver: Receiver) -> None:
        self._receiver = receiver
        descriptor = self.socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        poll.watch(descriptor, self._stir)  # it only wakes: what there is to read `drain` finds out

    def _stir(self) -> None:
        self.stirred = True

    def drain(self) -> bool:
        """Reads some of what has arrived; returns whether there is more."""
        if not self.stirred:
            return False
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self.stirred = False
                return False
            connection = self._connection(frames[0].bytes)
            if len(frames) == 2:
                self._receiver.received(connection, frames[1].buffer, b"")
            elif len(frames) == 3:
                self._receiver.received(connection, frames[1].buffer, frames[2].buffer)
            else:
                self._receiver.malformed(
                    connection,
                    f"a message of {len(frames) - 1} frames; a header and at most one payload are expected",
                )
        return True

    def _connection(self, identity: bytes) -> _ZmqConnection:
        connection = self._connections.get(identity)
        if connection is None:
            connection = self._connections[identity] = _ZmqConnection(self, identity)
            if len(self._connections) > 10_000:
                # If it lives it is asked to say hello again.
                self._receiver.ended(self._connections.popitem(last=False)[1])
        else:
            self._connections.move_to_end(identity)
        return connection

    def forget(self, connection: Connection) -> None:
        """Drops what is remembered of a connection that is gone."""
        if isinstance(connection, _ZmqConnection):
            self._connections.pop(connection.identity, None)

    def close(self) -> None:
        self._context.destroy(linger=0)


class _LocalConnection:
    """A stream of messages, each preceded by its length (4 bytes, little-endian)."""

    local = True

    def __init__(
        self, listener: "LocalListener", connected: socket.socket, pid: int, pidfd: int | None
    ) -> None:
        self._listener = listener
        self.pid = pid
        self.socket = connected
        self.pidfd = pidfd
        self.greeted = False
        self.watched: tuple[bool, bool] = (True, False)  # for something to read, for room to write
        self.inbox = bytearray()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0

    def send(self, header: bytes, payload: Any = None, descriptors: Sequence[int] = ()) -> bool:
        if payload is not None:
            raise AssertionError("a local connection carries no payload; it lies in shared memory")
        if self.socket.fileno() < 0:
            return False
        if len(header) > MAX_HEADER_BYTES:  # no answer is (`Node.answer`); the peer would hang up on it
            self._listener.end(self)
            return False
        self._unsent.append((memoryview(_LENGTH.pack(len(header)) + header), tuple(descriptors)))
        self._unsent_bytes += _LENGTH.size + len(header)
        if len(self._unsent) == 1:
            self.flush()
        elif self.clogged:
            self._listener.wait_for(self, room=True)
        return self.socket.fileno() >= 0

    @property
    def clogged(self) -> bool:
        """It does not read its answers; until it does, nothing more is heard from it."""
        return self._unsent_bytes > _MAX_UNSENT

    def drop_unsent(self) -> None:
        """Nobody will read it."""
        self._unsent.clear()
        self._unsent_bytes = 0

    def flush(self) -> None:
        """Sends what fits into the socket."""
        waiting = False
        while self._unsent and not waiting:
            data, descriptors = self._unsent[0]
            try:
                if descriptors:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                    sent = self.socket.sendmsg([data], [rights], socket.MSG_NOSIGNAL)
                else:
                    sent = self.socket.send(data)
            except BlockingIOError:
                waiting = True
            except OSError:
                self._listener.end(self)
                return
            else:
                self._unsent_bytes -= sent
                if sent == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = (data[sent:], ())
        self._listener.wait_for(self, room=waiting)

    def hang_up(self) -> None:
        self._listener.end(self)


class LocalListener:
    """An abstract Unix socket. Only processes of the same user (or root) are heard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + name)
        self._socket.listen(1024)
        self._spare = os.open(
            os.devnull, os.O_RDONLY | os.O_CLOEXEC
        )  # to turn one away where no file may be opened
        self._strangers: OrderedDict[_LocalConnection, None] = OrderedDict()
        self._connections: set[_LocalConnection] = set()

    def start(self, poll: Poll, receiver: Receiver) -> None:
        self._poll, self._receiver = poll, receiver
        poll.watch(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                connected, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    continue  # it hung up before it was accepted
                if self._strangers:  # the longest silent stranger makes room
                    self.end(next(iter(self._strangers)))
                else:
                    self._turn_away()
                continue
            connected.setblocking(False)
            peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid, user, _ = struct.unpack("3i", peer)
            if user not in (0, os.getuid()):
                connected.close()
                continue
            connection = _LocalConnection(self, connected, pid, _pidfd(pid))
            self._connections.add(connection)
            self._strangers[connection] = None
            self._poll.watch(connected.fileno(), lambda c=connection: self._read(c))
            if connection.pidfd is not None:
                # A child may have inherited the socket: only this tells that the client itself is gone.
                self._poll.watch(connection.pidfd, lambda c=connection: self._died(c))
            while len(self._strangers) > _MAX_STRANGERS:
                self.end(next(iter(self._strangers)))

    def _turn_away(self) -> None:
        """Hangs up on one who waits to be accepted, or the poll would not rest."""
        os.close(self._spare)
        try:
            self._socket.accept()[0].close()
        except BlockingIOError:
            pass  # it has hung up itself
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _read(self, connection: _LocalConnection) -> None:
        connection.flush()
        if connection.clogged:
            return
        try:
            data = connection.socket.recv(_RECEIVED)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.end(connection)
            return
        inbox = connection.inbox
        inbox += data
        at = 0
        while len(inbox) - at >= 4:
            (length,) = _LENGTH.unpack_from(inbox, at)
            if length > (MAX_HEADER_BYTES if connection.greeted else _MAX_HELLO_BYTES):
                self._receiver.malformed(connection, f"a message of {length} bytes is announced")
                self.end(connection)
                return
            if len(inbox) - at - 4 < length:
                break
            self._receiver.received(connection, bytes(inbox[at + 4 : at + 4 + length]), b"")
            if connection.socket.fileno() < 0:
                return
            at += 4 + length
        del inbox[:at]
        if connection.greeted:
            self._strangers.pop(connection, None)

    def _died(self, connection: _LocalConnection) -> None:
        connection.drop_unsent()
        while connection.socket.fileno() >= 0 and _readable(connection.socket):
            connection.drop_unsent()
            self._read(connection)  # what it said before it died counts
        self.end(connection)

    def wait_for(self, connection: _LocalConnection, *, room: bool) -> None:
        """Has the connection watched for something to read, unless it is clogged, and for room to write."""
        wanted = (not connection.clogged, room)
        if wanted != connection.watched and connection in self._connections:
            connection.watched = wanted
            self._poll.watch(
                connection.socket.fileno(),
                lambda: self._read(connection),
                readable=wanted[0],
                writable=wanted[1],
            )

    def end(self, connection: _LocalConnection) -> None:
        """Closes a connection and reports it."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._strangers.pop(connection, None)
        self._poll.forget(connection.socket.fileno())
        connection.socket.close()
        if connection.pidfd is not None:
            self._poll.forget(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = None
        self._receiver.ended(connection)

    def close(self) -> None:
        for connection in list(self._connections):
            self.end(connection)
        self._socket.close()
        os.close(self._spare)


def _readable(connected: socket.socket) -> bool:
    try:
        return bool(connected.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def _pidfd(pid: int) -> int | None:
    """A descriptor that tells when the process ends; None where it is not ours to see."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
