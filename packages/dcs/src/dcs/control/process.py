"""The coordinator as a child process: ready when `serve` returns, gone when closed or its parent dies."""

import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from dcs.control.coordinator import LEASE_SECONDS
from dcs.errors import Closed, DcsError, NoMemory, Timeout, from_refusal
from dcs.scarcity import opening, start

_STOP_SECONDS = 5.0
_RETRY_SECONDS = 1.0  # between two tries to start it again where there was no memory for it
_MAX_RESTARTS = 5
_WITHIN_SECONDS = 60.0


class Ready(msgspec.Struct, frozen=True, tag_field="status", tag="ready"):
    """The line of JSON that `dcs serve` prints once it can be reached; `http` is "" when it serves none."""

    address: str
    pid: int
    http: str = ""


class Failed(msgspec.Struct, frozen=True, tag_field="status", tag="failed"):
    """The line of JSON that `dcs serve --parent` prints instead when it cannot start."""

    code: str
    error: str


@dataclass(frozen=True, slots=True)
class _Command:
    """How to start it; the token travels in the environment, not on the command line."""

    host: str
    lease_seconds: float
    relay: bool
    transfer_seconds: float | None
    curve_secret_file: str | None
    timeout: float
    token: str | None = field(repr=False)

    def start(self, port: int, http_port: int | None) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "dcs.cli", "serve", "--host", self.host, "--port", str(port)]
        command += ["--lease-seconds", str(self.lease_seconds), "--parent", str(os.getpid())]
        if not self.relay:
            command.append("--no-relay")
        if self.transfer_seconds is not None:
            command += ["--transfer-seconds", str(self.transfer_seconds)]
        if self.curve_secret_file is not None:
            command += ["--curve-secret-file", self.curve_secret_file]
        if http_port is not None:
            command += ["--http-port", str(http_port)]
        environment = {key: value for key, value in os.environ.items() if key != "DCS_TOKEN"}
        if self.token is not None:
            environment["DCS_TOKEN"] = self.token
        with opening("the coordinator process"):
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )


class CoordinatorProcess:
    """A running `dcs serve`.

    Attributes:
        address: for publishers and subscribers; the same after a restart.
        http: where it serves HTTP, "" when it does not.
        restarts: how often it was started again.
        error: why it is not started again, for good or until there is memory for it; None while it runs.
    """

    def __init__(
        self, command: _Command, process: "subprocess.Popen[bytes]", ready: Ready, restart: bool
    ) -> None:
        self._pid = os.getpid()
        self._command = command
        self._process = process
        with opening("what watches the coordinator process"), ExitStack() as opened:
            self._watched = os.pidfd_open(process.pid)
            opened.callback(os.close, self._watched)
            self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.pop_all()
        self.address = ready.address
        self.http = ready.http
        self.restarts = 0
        self.error: DcsError | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._supervise, name="dcs-supervisor", daemon=True)
        if restart:
            try:
                start(self._thread, "what watches the coordinator process")
            except NoMemory:
                os.close(self._stop)
                os.close(self._watched)
                raise

    @property
    def pid(self) -> int:
        """Of the process; another one after a restart."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process (SIGTERM, then SIGKILL) and reap it. May be called twice. In a process that was
        forked off it does nothing: the coordinator is its parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None:
            self._thread.join()
        _end(self._process)
        os.close(self._stop)
        os.close(self._watched)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _supervise(self) -> None:
        """Start it again whenever it has ended, unless that happens too often."""
        ends: deque[float] = deque(maxlen=_MAX_RESTARTS)
        why = "its traceback is on stderr"
        while self._await_end():
            status = self._process.wait(_STOP_SECONDS)
            _end(self._process)
            now = time.monotonic()
            if len(ends) == _MAX_RESTARTS and now - ends[0] < _WITHIN_SECONDS:
                self.error = DcsError(
                    f"the coordinator at {self.address} ended with status {status}, and has been started"
                    f" {_MAX_RESTARTS} times within {now - ends[0]:.0f} s; {why}"
                )
                return
            ends.append(now)
            http_port = _port(self.http) if self.http else None
            while not self._begin_again(http_port):
                if self._await_stop(_RETRY_SECONDS):
                    return
            try:
                _await_ready(self._process, self._command.timeout, self._stop)
            except Closed:
                return
            except DcsError as error:  # its process is over, or will be in a moment: that counts as an end
                why = str(error)
                self._process.kill()
            else:
                self.restarts += 1

    def _begin_again(self, http_port: int | None) -> bool:
        """Start another process; False when there is no descriptor or memory for it just now."""
        try:
            process = self._command.start(_port(self.address), http_port)
            try:
                with opening("what watches the coordinator process"):
                    watched = os.pidfd_open(process.pid)
            except NoMemory:
                _end(process)
                raise
        except NoMemory as error:
            self.error = error
            return False
        os.close(self._watched)
        self._process, self._watched, self.error = process, watched, None
        return True

    def _await_stop(self, seconds: float) -> bool:
        """Whether this is closed within so long."""
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _await_end(self) -> bool:
        """Wait until the process ends; False when this is closed instead."""
        poll = select.poll()
        for descriptor in (self._watched, self._stop):
            poll.register(descriptor, select.POLLIN)
        poll.poll()
        return not self._closed


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    lease_seconds: float = LEASE_SECONDS,
    timeout: float = 30.0,
    *,
    relay: bool = True,
    transfer_seconds: float | None = None,
    curve_secret_file: str | None = None,
    http_port: int | None = None,
    restart: bool = True,
) -> CoordinatorProcess:
    """Start a coordinator in its own process; arguments as for `Coordinator`.

    Args:
        timeout: seconds that it may take to get ready.
        curve_secret_file: of keys that `dcs keygen` has made; members are given the public one.
        http_port: serve HTTP too; 0 takes a free port.
        restart: when the process dies, start it again at the same address, at most five times a minute; its
            members join again by themselves, and neither epochs nor versions go back.

    The process is its own session (Ctrl-C in a terminal does not reach it) and ends when this one does,
    however that ends. The token travels in its environment, not on its command line.
    Raises `DcsError` (or `Unauthorized`) saying why it could not start, and `Timeout`.
    """
    command = _Command(host, lease_seconds, relay, transfer_seconds, curve_secret_file, timeout, token)
    process = command.start(port, http_port)
    try:
        return CoordinatorProcess(command, process, _await_ready(process, timeout), restart)
    except BaseException:
        _end(process)
        raise


def _port(address: str) -> int:
    return int(address.rstrip("/").rpartition(":")[2])


def _await_ready(process: "subprocess.Popen[bytes]", timeout: float, stop: int | None = None) -> Ready:
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if stop is not None:
        poll.register(stop, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(timeout * 1000)]
    if stop in ready:
        raise Closed("closed while the coordinator was starting")
    if not ready:
        raise Timeout(f"the coordinator process {process.pid} did not get ready within {timeout} s")
    line = process.stdout.readline()
    if not line:
        status = process.wait(_STOP_SECONDS)
        raise DcsError(
            f"the coordinator process ended with {status} before it was ready; its traceback is on stderr"
        )
    answer = msgspec.json.decode(line, type=Ready | Failed)
    if isinstance(answer, Failed):
        raise from_refusal(answer.code, answer.error, {})
    return answer


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_SECONDS)
    if process.stdout is not None:
        process.stdout.close()
