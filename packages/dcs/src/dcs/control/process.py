"""The coordinator as a child process: ready when `serve` returns, gone when closed or its parent dies."""

import os
import select
import subprocess
import sys
from types import TracebackType
from typing import Self

import msgspec

from dcs.control.coordinator import LEASE_SECONDS
from dcs.errors import DcsError, Timeout, from_refusal

_STOP_SECONDS = 5.0


class Ready(msgspec.Struct, frozen=True, tag_field="status", tag="ready"):
    """The line of JSON that `dcs serve` prints once it can be reached."""

    address: str
    pid: int


class Failed(msgspec.Struct, frozen=True, tag_field="status", tag="failed"):
    """The line of JSON that `dcs serve --parent` prints instead when it cannot start."""

    code: str
    error: str


class CoordinatorProcess:
    """A running `dcs serve`. Attributes: `address` for publishers and subscribers, `pid`."""

    def __init__(self, process: "subprocess.Popen[bytes]", ready: Ready) -> None:
        self._process = process
        self.address = ready.address
        self.pid = process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process (SIGTERM, then SIGKILL) and reap it. May be called twice."""
        _end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    lease_seconds: float = LEASE_SECONDS,
    timeout: float = 30.0,
) -> CoordinatorProcess:
    """Start a coordinator in its own process; arguments as for `Coordinator`.

    The process is its own session (Ctrl-C in a terminal does not reach it) and ends when this one does,
    however that ends. The token travels in its environment, not on its command line.
    Raises `DcsError` (or `Unauthorized`) saying why it could not start, and `Timeout` after `timeout`
    seconds.
    """
    command = [sys.executable, "-m", "dcs.cli", "serve", "--host", host, "--port", str(port)]
    command += ["--lease-seconds", str(lease_seconds), "--parent", str(os.getpid())]
    environment = {key: value for key, value in os.environ.items() if key != "DCS_TOKEN"}
    if token is not None:
        environment["DCS_TOKEN"] = token
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        return CoordinatorProcess(process, _await_ready(process, timeout))
    except BaseException:
        _end(process)
        raise


def _await_ready(process: "subprocess.Popen[bytes]", timeout: float) -> Ready:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout)
    if not readable:
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
