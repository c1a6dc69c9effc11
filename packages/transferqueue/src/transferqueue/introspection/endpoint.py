"""``/metrics``: an HTTP server for Prometheus, in a thread of any process that can reach a store."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

from ..client.blocking import Client
from ..errors import InvalidArgument, StartFailed
from ..server.launch import Server
from .extras import load
from .rates import Reading
from .reader import OnChange, SharedReading, StatsReader

_MOST_CONNECTIONS = 32
_IDLE_SECONDS = 5.0
_REQUEST_SECONDS = 5.0  # for a whole request to arrive; a peer that sends a byte now and then is never idle
_GONE_SECONDS = 1.0  # for one that was hung up on to be gone
_OF_THE_PROGRAM = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
"""Signals that a program may wait for, and would miss if a thread of ours took them."""


class MetricsServer:
    """An HTTP server that answers ``GET /metrics``. A context manager that closes it.

    Attributes:
        port: where it listens.
        url: of the metrics.
    """

    def __init__(self, http: "_HttpServer", host: str, finish: Callable[[], None]) -> None:
        self.port = http.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        self._http = http
        self._finish = finish
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=http.serve_forever, name="transferqueue-metrics", daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_PROGRAM)
        try:
            self._thread.start()  # it and all that it starts inherit the mask
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """Ends the server and joins its threads; scrapes under way are still answered. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._http.shutdown()
                self._thread.join()
                self._http.server_close()
                self._finish()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_metrics(
    store: Client | Server | str,
    host: str = "127.0.0.1",
    port: int = 9400,
    *,
    token: str | None = None,
    server_key: str | None = None,
    timeout: float = 3.0,
    on_change: OnChange | None = None,
) -> MetricsServer:
    """Serves the metrics of a store to Prometheus from a thread of this process.

    A scrape reads the store once; scrapes at the same time share a reading. While the store does not answer,
    a scrape says ``transferqueue_up 0``, within about two `timeout`. Once it is back it is read again, also
    if it was restarted in between (through a `Client` only as far as that one reconnects).

    Args:
        store: its address or `Server`, to which a connection of its own is made; or a client to share.
        host: where to listen. There is no authentication: whoever reaches it may read names and counts.
        port: 0 takes a free one.
        token, server_key: as for `connect`. Not needed for a `Server` or a client.
        timeout: seconds that connecting and reading may take, each.
        on_change: called, from a thread of the server, with the error when the store stops answering, and
            with None when it answers again.

    Raises:
        MissingExtra: prometheus-client is not installed.
        StartFailed: the port is in use, or the host is not of this machine.
    """
    metrics = load("metrics", "metrics")
    if not 0 <= port < 1 << 16:
        raise InvalidArgument(f"port is {port}; it must be in [0, 65535]")
    read, finish = _source(store, token, server_key, timeout)
    try:
        http = _HttpServer(host, port, metrics.application(SharedReading(read, on_change)))
    except OSError as error:
        raise StartFailed(
            f"cannot serve metrics at {host}:{port} ({error}); choose another port or host"
        ) from error
    return MetricsServer(http, host, finish)


def _source(
    store: Client | Server | str, token: str | None, server_key: str | None, timeout: float
) -> tuple[Callable[[], Reading], Callable[[], None]]:
    """What reads the store, and what disconnects from it."""
    if isinstance(store, Client):
        return (lambda: Reading(time.monotonic(), store.stats(timeout=timeout))), (lambda: None)
    if isinstance(store, Server):
        token, server_key = token or store.token, server_key or store.server_key
    reader = StatsReader(str(store), token, server_key=server_key, timeout=timeout)
    return reader.read, reader.close


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_SECONDS

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        assert isinstance(self.server, _HttpServer)
        self.server.heard(self.request)
        return parsed

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no event."""


class _HttpServer(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread, which `server_close` joins. Whoever takes long to say what it
    wants has to go when its time is over, or when there are too many and another comes.

    prometheus_client's own server leaves its threads, and keeps one for every peer that is silent.
    """

    daemon_threads = False
    request_queue_size = 2 * _MOST_CONNECTIONS

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._host = host
        self._changed = threading.Condition()
        self._connections: set[Any] = set()
        self._unheard: dict[Any, float] = {}  # those whose request has not arrived: since when, oldest first
        super().__init__((host, port), _Handler)
        self.set_app(application)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # the one of HTTPServer asks a name server for our name
        self.server_name, self.server_port = self._host, int(self.server_address[1])
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._changed:
            if len(self._connections) >= _MOST_CONNECTIONS:
                oldest = next(iter(self._unheard), None)
                if oldest is None:
                    return False
                self._hang_up(oldest)
                self._changed.wait_for(lambda: len(self._connections) < _MOST_CONNECTIONS, _GONE_SECONDS)
            return len(self._connections) < _MOST_CONNECTIONS

    def service_actions(self) -> None:
        """Hangs up on those whose time is over. `serve_forever` calls it every half second."""
        with self._changed:
            for request, since in list(self._unheard.items()):
                if time.monotonic() - since >= _REQUEST_SECONDS:
                    self._hang_up(request)

    def _hang_up(self, request: Any) -> None:
        del self._unheard[request]
        with suppress(OSError):  # it is over already
            request.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it

    def heard(self, request: Any) -> None:
        """Its request has arrived."""
        with self._changed:
            self._unheard.pop(request, None)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            self._connections.add(request)
            self._unheard[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            self._connections.discard(request)
            self._unheard.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that is silent or hangs up is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        with self._changed:
            for connection in self._connections:
                with suppress(OSError):  # it is over already
                    connection.shutdown(socket.SHUT_RD)  # the silent ones end at once
        super().server_close()
