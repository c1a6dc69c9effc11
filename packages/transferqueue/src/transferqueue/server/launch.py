"""Starting a store: the controller and its storage units as child processes, and ending them."""

import os
import secrets
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from ipaddress import ip_address
from types import TracebackType

import msgspec
import zmq

from ..errors import InvalidArgument, StartFailed
from ..ids import MAX_UNITS
from ..sizes import parse_bytes
from ..wire.messages import MAX_FRAME_BYTES
from .assignment import Assignment, Listening


class Server:
    """A running store.

    A context manager that gives itself; hand it, or its `address`, to `connect`.

    Runs until it is closed, also when nothing refers to it any more.

    Attributes:
        address: of the controller, ``tcp://host:port``.
        token: what clients have to present, or None.
        server_key: the public CURVE key that clients of other hosts need, or None.
        local: abstract Unix socket on which clients of this host are served.
        processes: the controller, then the storage units.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        server_key: str | None,
        local: str,
        processes: Sequence["subprocess.Popen[bytes]"],
    ) -> None:
        self.address = address
        self.token = token
        self.server_key = server_key
        self.local = local
        self.processes = tuple(processes)
        _running.add(self)

    def close(self, timeout: float = 5.0) -> None:
        """Ends all processes and waits for them; those that do not end in `timeout` seconds are killed.
        Idempotent.
        """
        _end(self.processes, timeout)
        _running.discard(self)

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return self.address


_running: set[Server] = set()  # a process object that is collected would close the pipe its child lives by


def serve(
    storage_units: int = 1,
    *,
    max_bytes: int | str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    curve: bool = False,
    max_frame_bytes: int | str = MAX_FRAME_BYTES,
    timeout: float = 30.0,
) -> Server:
    """Starts a controller and `storage_units` storage units, and returns when all of them listen.

    They end with `Server.close`, with the ``with`` block, or with this process, however it ends.

    Args:
        storage_units: processes that hold payload.
        max_bytes: payload bytes in the whole store, a number or text such as "8GiB"; puts wait beyond it.
            None: no limit.
        host: where to listen; other than loopback needs a `token`.
        port: of the controller; 0 takes a free one. Storage units always take free ones.
        token: a secret that every connection must present.
        curve: encrypt and authenticate what goes over TCP; clients of other hosts then need the public key
            ``server.server_key``.
        max_frame_bytes: the largest message accepted.
        timeout: seconds for all of them to start.

    Raises:
        InvalidArgument: a bad size, or a host off loopback without a token.
        StartFailed: a process did not start in time, or could not listen (port in use).
    """
    if not 1 <= storage_units <= MAX_UNITS:
        raise InvalidArgument(f"storage_units is {storage_units}; it must be in [1, {MAX_UNITS}]")
    if not is_loopback(host) and not token:
        raise InvalidArgument(
            f"host {host!r} can be reached from other machines; pass a token, or listen on 127.0.0.1"
        )
    host = "127.0.0.1" if host == "localhost" else host
    frame_bytes, limit = parse_bytes(max_frame_bytes), None if max_bytes is None else parse_bytes(max_bytes)
    deadline = time.monotonic() + timeout
    keys = None
    if curve:
        public, secret = zmq.curve_keypair()
        keys = (public.decode(), secret.decode())
    local = f"transferqueue-{secrets.token_hex(16)}"
    common = {
        "parent": os.getpid(), "host": host, "token": token, "max_frame_bytes": frame_bytes,
        "local": local, "secret": secrets.token_hex(32), "units": storage_units, "curve": keys,
    }  # fmt: skip
    assignments = [Assignment(port=port, max_bytes=limit, **common)]
    assignments += [Assignment(port=0, unit=number, **common) for number in range(storage_units)]
    names = ["the controller", *(f"storage unit {number}" for number in range(storage_units))]
    processes: list[subprocess.Popen[bytes]] = []
    bound = 0
    try:
        for assignment in assignments:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "transferqueue.server.process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # signals to the group of the caller are not for them
                )
            )
            _assign(processes[-1], assignment)
        # Units first: the controller is ready when all of them have announced themselves.
        for name, process in reversed(list(zip(names, processes, strict=True))):
            bound = _listening(name, process, deadline)
    except BaseException:
        _end(processes, timeout=0.5)
        raise
    address = f"tcp://{f'[{host}]' if ':' in host else host}:{bound}"
    return Server(address, token, keys[0] if keys else None, local, processes)


def _assign(process: "subprocess.Popen[bytes]", assignment: Assignment) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(assignment) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return  # it ended already; waiting for its answer tells how


def _listening(name: str, process: "subprocess.Popen[bytes]", deadline: float) -> int:
    """Waits for the line in which a process says its port."""
    assert process.stdout is not None
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise StartFailed(f"{name} did not start in time; give serve(...) a longer timeout")
            chunk = os.read(process.stdout.fileno(), 65_536)
            if not chunk:
                raise StartFailed(
                    f"{name} ended with status {process.wait(5)} before it listened; see its stderr above"
                )
            line += chunk
    said = msgspec.json.decode(line, type=Listening)
    if said.error:
        raise StartFailed(f"{name} {said.error}; choose another port or host")
    return said.port


def _end(processes: Sequence["subprocess.Popen[bytes]"], timeout: float) -> None:
    """Ends the controller, then the units, so that it does not miss them."""
    deadline = time.monotonic() + timeout
    for some in (processes[:1], processes[1:]):
        for process in some:
            if process.stdin is not None and not process.stdin.closed:
                try:
                    process.stdin.close()  # its signal to end
                except BrokenPipeError:
                    continue  # unwritten bytes for a process that is gone
        for process in some:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
