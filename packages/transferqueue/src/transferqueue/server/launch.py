"""Starting a store: the controller and its storage units as child processes."""

import os
import secrets
import subprocess
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Protocol

import zmq

from ..errors import InvalidArgument, QueueError
from ..ids import MAX_UNITS
from ..sizes import parse_bytes
from ..wire.messages import MAX_FRAME_BYTES
from .assignment import Assignment
from .supervision import Supervisor


class Closes(Protocol):
    """Something that ends with the store."""

    def close(self) -> None: ...


class Server:
    """A running store.

    A context manager that gives itself; hand it, or its `address`, to `connect`.

    Runs until it is closed, also when nothing refers to it any more. A storage unit that dies is started
    again, and so is a controller that keeps a journal.

    Attributes:
        address: of the controller, ``tcp://host:port``.
        token: what clients have to present, or None.
        server_key: the public CURVE key that clients of other hosts need, or None.
        local: abstract Unix socket on which clients of this host are served.
        metrics_url: where Prometheus finds ``/metrics``, or None.
    """

    def __init__(
        self, address: str, token: str | None, server_key: str | None, local: str, supervisor: Supervisor
    ) -> None:
        self.address = address
        self.token = token
        self.server_key = server_key
        self.local = local
        self.metrics_url: str | None = None
        self._metrics: Closes | None = None
        self._supervisor = supervisor
        _running.add(self)

    @property
    def processes(self) -> "tuple[subprocess.Popen[bytes], ...]":
        """The controller, then the storage units, each in its present (or last) life."""
        return self._supervisor.processes

    @property
    def failure(self) -> QueueError | None:
        """Why a part of the store is dead and stays so; None while all is well."""
        return self._supervisor.failure

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Has `callback` called, in another thread, when a part of the store is dead and stays so."""
        self._supervisor.on_failure = callback

    def close(self, timeout: float = 5.0) -> None:
        """Ends all processes and waits for them; those that do not end in `timeout` seconds are killed.
        Idempotent.
        """
        if self._metrics is not None:
            self._metrics.close()
        self._supervisor.stop(timeout)
        _running.discard(self)

    def serve_metrics(self, port: int) -> None:
        """Starts the thread that answers Prometheus on 127.0.0.1; it ends with the store."""
        from ..introspection.endpoint import serve_metrics  # which is a client, and knows this module

        metrics = serve_metrics(self, "127.0.0.1", port)
        self._metrics, self.metrics_url = metrics, metrics.url

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
    ucx: bool = False,
    max_frame_bytes: int | str = MAX_FRAME_BYTES,
    journal: str | os.PathLike[str] | None = None,
    fsync: bool = False,
    memory: int | str | None = None,
    spill: str | os.PathLike[str] | None = None,
    restore: str | os.PathLike[str] | None = None,
    metrics_port: int | None = None,
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
            ``server.server_key``. With a journal the key stays the same when a store is started on it again.
        ucx: let storage units be reached by UCX as well (extra ``[ucx]``), for clients that connect with
            ``transport="ucx"``. UCX listens on every address of the host and does not encrypt: only for
            trusted networks, and only with a `token`.
        max_frame_bytes: the largest message accepted.
        journal: a folder in which everything is kept, so that a controller that dies is started again and
            loses nothing, and so that a store started on it later goes on where this one ended. Nothing is
            acknowledged that is not written there. Payload lies there too, in files that are mapped.
        fsync: with a journal: nothing is acknowledged that is not on the disk, for a host that may lose
            power. Without, the journal outlives every process but not the operating system.
        memory: with `spill`: bytes of shared memory to use before files are.
        spill: a folder for what does not fit into `memory`.
        restore: a folder that `Client.snapshot` wrote; the store begins with what it holds, on any number of
            storage units.
        metrics_port: serve ``/metrics`` to Prometheus there, on 127.0.0.1, from a thread of this process
            (extra ``[metrics]``); 0 takes a free one, see `Server.metrics_url`.
        timeout: seconds for all of them to start, and for `restore`.

    Raises:
        InvalidArgument: a bad size, a host off loopback without a token, or options that exclude each other.
        StartFailed: a process did not start in time, could not listen (port in use), or found its folder
            damaged, full, or used by another store.
    """
    if not 1 <= storage_units <= MAX_UNITS:
        raise InvalidArgument(f"storage_units is {storage_units}; it must be in [1, {MAX_UNITS}]")
    if not is_loopback(host) and not token:
        raise InvalidArgument(
            f"host {host!r} can be reached from other machines; pass a token, or listen on 127.0.0.1"
        )
    if ucx and not token:
        raise InvalidArgument("UCX listens on every address of the host; pass a token")
    host = "127.0.0.1" if host == "localhost" else host
    frame_bytes, limit = parse_bytes(max_frame_bytes), None if max_bytes is None else parse_bytes(max_bytes)
    if (memory is None) != (spill is None):
        raise InvalidArgument("memory and spill belong together: what one has no room for goes to the other")
    if journal is not None and spill is not None:
        raise InvalidArgument("with a journal all payload lies in its files, so there is nothing to spill")
    if journal is not None and restore is not None and os.path.isdir(journal) and os.listdir(journal):
        raise InvalidArgument(
            f"the journal folder {os.fspath(journal)!r} holds a store already; restore into an empty one, or "
            "leave restore out to go on with it"
        )
    if fsync and journal is None:
        raise InvalidArgument("fsync is about a journal; pass journal=... too")
    keys = None
    if curve:
        keys = _curve_keys(None if journal is None else Path(journal))
    local = f"transferqueue-{secrets.token_hex(16)}"
    common = {
        "parent": os.getpid(), "host": host, "token": token, "max_frame_bytes": frame_bytes,
        "local": local, "secret": secrets.token_hex(32), "units": storage_units, "curve": keys, "ucx": ucx,
    }  # fmt: skip
    controller = Assignment(
        port=port,
        max_bytes=limit,
        incarnation=secrets.randbits(62),
        journal=_folder(journal),
        fsync=fsync,
        memory=None if memory is None else parse_bytes(memory),
        spill=_folder(spill),
        restore=_folder(restore),
        **common,
    )
    units = [
        Assignment(
            port=0, unit=number, incarnation=secrets.randbits(62), journal=controller.journal, **common
        )
        for number in range(storage_units)
    ]
    names = ["the controller", *(f"storage unit {number}" for number in range(storage_units))]
    supervisor = Supervisor(list(zip(names, [controller, *units], strict=True)))
    bound = supervisor.start(timeout)
    address = f"tcp://{f'[{host}]' if ':' in host else host}:{bound}"
    server = Server(address, token, keys[0] if keys else None, local, supervisor)
    if metrics_port is not None:
        try:
            server.serve_metrics(metrics_port)
        except BaseException:
            server.close()
            raise
    return server


def _curve_keys(folder: Path | None) -> tuple[str, str]:
    """A fresh key pair, or that of the journal's folder, so that the clients of a store that goes on need no
    other.
    """
    if folder is not None and (folder / "curve-keys").exists():
        public, secret = (folder / "curve-keys").read_text().split()
        return public, secret
    public, secret = (key.decode() for key in zmq.curve_keypair())
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "curve-keys", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{public}\n{secret}\n")
    return public, secret


def _folder(path: str | os.PathLike[str] | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
