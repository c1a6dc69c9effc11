"""A keeper as a process of its own, which may outlive whoever started it."""

import os
import select
import subprocess
import sys
from types import TracebackType
from typing import Self

import msgspec

from dcs.errors import DcsError, Timeout
from dcs.replicas.errors import from_refusal
from dcs.scarcity import opening
from dcs.wire.tls import Tls

_STOP_SECONDS = 5.0


class Ready(msgspec.Struct, frozen=True, tag_field="status", tag="ready"):
    """The line of JSON that `dcs keeper` prints once it can be reached."""

    address: str
    pid: int


class Failed(msgspec.Struct, frozen=True, tag_field="status", tag="failed"):
    """The line of JSON that `dcs keeper --report` prints instead when it cannot start."""

    code: str
    error: str


class KeeperProcess:
    """A running keeper. Attributes: `address` for `Replicas`, `pid`.

    It runs on when this object is dropped or this process ends, unless it was given a parent: that is what it
    is for. `close`, or leaving it as a context manager, ends it.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", ready: Ready) -> None:
        self._parent = os.getpid()
        self._process = process
        self.address = ready.address
        self.pid = process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process (SIGTERM, then SIGKILL) and reap it; what it holds is gone. May be called twice. In
        a process that was forked off it does nothing: the keeper is its parent's.
        """
        if os.getpid() != self._parent:
            return
        _end(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_keeper(
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    *,
    max_bytes: int | None = None,
    domain: str | None = None,
    share_memory: bool = True,
    tls: Tls | None = None,
    idle_seconds: float | None = None,
    parent: int | None = None,
    timeout: float = 30.0,
) -> KeeperProcess:
    """Start a keeper in its own process and session; returns when it can be reached.

    Args:
        host, port, token, max_bytes, domain, share_memory, tls: as for `Keeper`. Give a fixed port to a
            keeper that the next start of a run has to find again.
        idle_seconds: it ends when nobody has been connected for so long; None: never.
        parent: id of a process that it ends with, `os.getpid()` say; None: it outlives this one.
        timeout: seconds to get ready.

    The token travels in its environment, not on its command line.
    Raises `DcsError` (or `Unauthorized`) saying why it could not start, and `Timeout`.
    """
    command = [sys.executable, "-m", "dcs.replicas.command", "--report", "--host", host, "--port", str(port)]
    for option, value in (
        ("--max-bytes", max_bytes),
        ("--domain", domain),
        ("--idle-seconds", idle_seconds),
        ("--parent", parent),
        ("--certificate", None if tls is None else tls.certificate),
        ("--key", None if tls is None else tls.key),
        ("--authority", None if tls is None else tls.authority),
    ):
        command += [] if value is None else [option, str(value)]
    command += [] if share_memory else ["--no-shared-memory"]
    environment = {key: value for key, value in os.environ.items() if key != "DCS_TOKEN"}
    if token is not None:
        environment["DCS_TOKEN"] = token
    with opening("the keeper process"):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
    try:
        return KeeperProcess(process, _await_ready(process, timeout))
    except BaseException:
        _end(process)
        raise


def _await_ready(process: "subprocess.Popen[bytes]", timeout: float) -> Ready:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout)
    if not readable:
        raise Timeout(f"the keeper process {process.pid} did not get ready within {timeout} s")
    line = process.stdout.readline()
    process.stdout.close()
    if not line:
        status = process.wait(_STOP_SECONDS)
        raise DcsError(
            f"the keeper process ended with {status} before it was ready; its traceback is on stderr"
        )
    answer = msgspec.json.decode(line, type=Ready | Failed)
    if isinstance(answer, Failed):
        raise from_refusal(answer.code, answer.error)
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
