"""A client's connections to the catalog: one for each call in flight, kept for the next."""

import secrets
import socket
import threading
from typing import Any

import msgspec

from ...errors import Corrupt, Timeout, Unauthorized
from . import messages as m
from .errors import CatalogLost, InvalidRequest, raised_as

_encode = msgspec.msgpack.Encoder().encode
_ANSWER_SECONDS = 60.0


class Link:
    """Connections that share a session. When the last of them ends without a goodbye, as when the process
    dies, what the session had taken and not finished returns.

    Args:
        address: of the catalog, ``tcp://host:port``.
        token: that it asks for, or None.

    Raises:
        CatalogLost: nothing answers there.
        Unauthorized: the token is missing or wrong.
    """

    def __init__(self, address: str, token: str | None) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdigit():
            raise InvalidRequest(f"{address!r} is no address; give the tcp://host:port that init() reports")
        self.address = address
        self._where = (host.strip("[]"), int(port))
        self._hello = _encode(m.Hello(secrets.token_hex(16), token))
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False
        # One connection is never used for calls: it keeps the session while all others are replaced.
        self._anchor, self.welcome = self._connect()

    def _connect(self) -> tuple[socket.socket, m.Welcome]:
        try:
            connection = socket.create_connection(self._where, timeout=10)
        except OSError as error:
            raise CatalogLost(
                f"no transfer_queue catalog answers at {self.address}: {error}; did the process that called "
                "init() first end or close it?"
            ) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            return connection, self._exchange(connection, self._hello, m.Welcome, 10)
        except BaseException:
            connection.close()
            raise

    def call[T](self, request: m.Request, answer: type[T], patience: float = 0.0) -> T:
        """Asks and waits for the answer.

        Args:
            answer: its type.
            patience: seconds that the catalog may take over it, beside those for the way.

        Raises:
            CatalogLost: the connection ended; whether the request had its effect is not known.
            Timeout: no answer.
        """
        with self._lock:
            if self._closed:
                raise CatalogLost("this client is closed; call init() again")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection, _ = self._connect()
        keep = False
        try:
            found = self._exchange(connection, _encode(request), answer, patience + _ANSWER_SECONDS)
            keep = True
            return found
        except _Answered as failure:
            keep = True
            raise failure.error from None
        finally:
            with self._lock:
                keep = keep and not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def _exchange[T](self, connection: socket.socket, request: bytes, answer: type[T], seconds: float) -> T:
        try:
            connection.settimeout(seconds)
            connection.sendall(len(request).to_bytes(4, "little") + request)
            size = int.from_bytes(_receive(connection, 4), "little")
            if not 0 < size <= m.MAX_MESSAGE_BYTES:
                raise Corrupt(f"the catalog at {self.address} sent a message of {size} bytes")
            body = _receive(connection, size)
        except TimeoutError as error:
            raise Timeout(f"the catalog at {self.address} did not answer in {seconds:g} s") from error
        except OSError as error:
            raise CatalogLost(f"the connection to the catalog at {self.address} ended: {error}") from error
        if body[0]:
            said = msgspec.msgpack.decode(body[1:], type=m.Failed)
            if said.kind == "Unauthorized":
                raise Unauthorized(f"the catalog at {self.address} says: {said.message}")
            raise _Answered(raised_as(said.kind, said.message))
        return msgspec.msgpack.decode(body[1:], type=answer)

    def close(self) -> None:
        """Says goodbye and disconnects. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle, self._idle = self._idle, []
        try:
            self._exchange(self._anchor, _encode(m.Goodbye()), type(None), 5)
        except (CatalogLost, Timeout):
            return  # a catalog that is gone needs no goodbye
        finally:
            for connection in [self._anchor, *idle]:
                connection.close()


class _Answered(Exception):
    """The catalog answered with an error; the connection is good."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _receive(connection: socket.socket, size: int) -> Any:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("closed by the other side")
        view = view[count:]
    return data
