"""The HTTP server of a coordinator: a thread that accepts, and one for each request under way."""

import io
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any, Protocol, Self

from dcs.arguments import require_host, require_port
from dcs.control.address import require_token
from dcs.control.views import Topology
from dcs.errors import DcsError, InvalidArgument, NoMemory
from dcs.introspection.answers import Answer, Answers
from dcs.scarcity import SCARCE, SCARCE_SECONDS, opening, start

_MOST_CONNECTIONS = 32
_IDLE_SECONDS = 5.0  # without a single byte read or taken by the peer
_EXCHANGE_SECONDS = 10.0  # for a whole request and its answer; a byte now and then does not extend it
_GONE_SECONDS = 1.0  # for one that was hung up on to be gone
_MOST_REQUEST_BYTES = 16 << 10  # of the request line and all headers
_OF_THE_PROGRAM = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
"""Signals that a program may wait for, and would miss if a thread of ours took them."""


class Shown(Protocol):
    """What is shown: a `Coordinator`."""

    @property
    def alive(self) -> bool: ...

    def snapshot(self) -> Topology: ...


class IntrospectionServer:
    """Answers `GET` of ``/topology``, ``/versions``, ``/metrics`` and ``/healthz``.

    Serves from the moment it is made. Requests at about the same time share a snapshot, so that the
    coordinator is asked at most four times a second, however many there are.

    Args:
        coordinator: it stays yours: close this server first.
        host: address to bind.
        port: 0 takes a free one.
        token: that requests have to show as ``Authorization: Bearer TOKEN`` (``/healthz`` needs none);
            required off loopback.

    Attributes:
        port: where it listens.
        url: of its root.

    Raises `Unauthorized` (no token off loopback) and `DcsError` (the port is taken, or the host is not of
    this machine).
    """

    def __init__(
        self, coordinator: Shown, host: str = "127.0.0.1", port: int = 0, token: str | None = None
    ) -> None:
        if not hasattr(coordinator, "snapshot"):
            raise InvalidArgument(f"coordinator is a {type(coordinator).__name__}; give a dcs.Coordinator")
        require_host(host, "host")
        require_token(host, token, "the HTTP server of the coordinator")
        port = require_port(port, "the HTTP server of the coordinator")
        answers = Answers(coordinator.snapshot, lambda: coordinator.alive, token)
        try:
            with opening("the HTTP server"):
                self._http = _HttpServer(host, port, answers)
        except OSError as error:
            raise DcsError(
                f"the HTTP server cannot bind {host}:{port}: {error}; choose another port, or 0 for a free"
                " one"
            ) from error
        self.port = self._http.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._closing = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._http.serve, name="dcs-http", daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_PROGRAM)
        try:
            start(self._thread, "the HTTP server")  # it and all that it starts inherit the mask
        except NoMemory:
            self._http.server_close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the server, hang up on everybody and join the threads. May be called twice. In a process that
        was forked off it does nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            if not self._closed:
                self._closed = True
                self._http.stop()
                self._thread.join()
                self._http.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    """One request a connection (HTTP/1.0): nobody keeps a thread by being silent."""

    timeout = _IDLE_SECONDS
    server_version = "dcs"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _Bounded(self.rfile)

    def do_GET(self) -> None:
        assert isinstance(self.server, _HttpServer)
        authorization, accept = self.headers.get("Authorization"), self.headers.get("Accept", "")
        self._respond(self.server.answers.get(self.path, authorization, accept))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # what `http.server` calls for any other method
            return self._not_allowed
        raise AttributeError(name)

    def _not_allowed(self) -> None:
        self._respond(Answer(405, b"only GET is answered\n", headers={"Allow": "GET"}))

    def _respond(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """A request is no event."""


class _Bounded(io.BufferedIOBase):
    """Reads lines of a request until it has become too long: that ends the connection."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self._left = _MOST_REQUEST_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        limit = self._left if size is None or size < 0 else min(size, self._left)
        line = self._file.readline(limit)
        self._left -= len(line)
        if not self._left:
            raise ConnectionAbortedError(f"a request of more than {_MOST_REQUEST_BYTES} bytes")
        return line

    def close(self) -> None:
        self._file.close()
        super().close()


class _HttpServer(ThreadingMixIn, HTTPServer):
    """Answers each connection in a thread, which `server_close` joins. Whoever takes long has to go when its
    time is over, or when there are too many and another comes.
    """

    daemon_threads = False
    request_queue_size = 2 * _MOST_CONNECTIONS
    timeout = 0.0  # of `handle_request`, which is called when somebody is there

    def __init__(self, host: str, port: int, answers: Answers) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answers = answers
        self._changed = threading.Condition()
        self._connections: set[Any] = set()
        self._patience: dict[Any, float] = {}  # until when, for those not hung up on yet; the oldest first
        self._closing = False
        self._wake = -1
        super().__init__((host, port), _Handler)  # it closes itself when it cannot bind
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            self.server_close()
            raise

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # the one of HTTPServer asks a name server for our name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve(self) -> None:
        """Accepts until `stop`. Waits for connections, and for the time of the oldest one to be over."""
        poller = select.poll()
        for waited_for in (self.fileno(), self._wake):
            poller.register(waited_for, select.POLLIN)
        while not self._closing:
            found = poller.poll(self._hang_up_on_the_late())
            if any(descriptor == self.fileno() for descriptor, _ in found):
                self.handle_request()

    def get_request(self) -> tuple[Any, Any]:
        """Accept one; without a descriptor for it, not again at once: it is still there."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in SCARCE:
                select.select([self._wake], [], [], SCARCE_SECONDS)
            raise

    def stop(self) -> None:
        """Ends `serve`, from any thread."""
        self._closing = True
        os.eventfd_write(self._wake, 1)

    def _hang_up_on_the_late(self) -> float | None:
        """Returns the milliseconds until there is one again; None while nobody is there."""
        with self._changed:
            for request, until in list(self._patience.items()):
                left = until - time.monotonic()
                if left > 0:
                    return left * 1e3 + 1
                self._hang_up(request)
        return None

    def _hang_up(self, request: Any) -> None:
        self._patience.pop(request, None)
        with suppress(OSError):  # it is over already
            request.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._changed:
            if len(self._connections) >= _MOST_CONNECTIONS:
                for oldest in list(self._patience)[:1]:
                    self._hang_up(oldest)
                self._changed.wait_for(lambda: len(self._connections) < _MOST_CONNECTIONS, _GONE_SECONDS)
            return len(self._connections) < _MOST_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            self._connections.add(request)
            self._patience[request] = time.monotonic() + _EXCHANGE_SECONDS
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self._connections.discard(request)
            self._patience.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that is silent or hangs up is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        with self._changed:
            for connection in self._connections:
                self._hang_up(connection)
        super().server_close()
        if self._wake >= 0:
            os.close(self._wake)
