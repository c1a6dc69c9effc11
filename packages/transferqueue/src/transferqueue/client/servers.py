"""The store as a client sees it: its controller, its storage units, and how payload gets there."""

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ControllerLost, InvalidArgument, QueueError, StorageLost, Timeout
from ..introspection.statistics import StoreStats
from ..server.launch import Server
from ..transport.arenas import ArenaMap
from ..transport.base import Transport
from ..transport.pins import Pins
from ..transport.shm import SharedMemoryTransport
from ..transport.ucx_payload import UcxPayload
from ..transport.zmq import ZmqTransport
from ..wire.channel import Channel
from ..wire.link import Link
from ..wire.local_session import LocalSession
from ..wire.messages import (
    Goodbye,
    Opened,
    OpenPartition,
    ReadStats,
    Restore,
    Snapshot,
    Stats,
    UnitAddress,
    Welcome,
)
from ..wire.peers import Peer
from ..wire.steps import Exchange, Steps, expect
from .slabs import Slabs

if TYPE_CHECKING:
    from .calls import PartitionCalls

TRANSPORTS = ("auto", "shm", "zmq", "ucx")


class Servers:
    """What all parts of a client share. It lives as long as any of them, and closes with it.

    Attributes:
        channel: carries requests.
        controller: whom to send them to.
        transport: carries payload.
        notes: why a transport that was tried is not used.
    """

    def __init__(
        self,
        address: str,
        channel: Channel,
        controller: Any,
        transport: Transport,
        welcome: Welcome,
        notes: Sequence[str] = (),
    ) -> None:
        self.address = address
        self.channel = channel
        self.controller = controller
        self.transport = transport
        self.max_frame_bytes = welcome.max_frame_bytes
        self.notes = tuple(notes)
        self.slabs = Slabs()

    def stats(self, timeout: float) -> Steps[StoreStats]:
        [answer] = yield [Exchange(self.controller, ReadStats(), time.monotonic() + timeout)]
        return expect(answer, Stats).values

    def snapshot(self, folder: "str | os.PathLike[str]", timeout: float) -> Steps[None]:
        request = Snapshot(str(Path(folder).absolute()))
        yield [Exchange(self.controller, request, time.monotonic() + timeout)]

    def restore(self, folder: "str | os.PathLike[str]", timeout: float) -> Steps[None]:
        request = Restore(str(Path(folder).absolute()))
        yield [Exchange(self.controller, request, time.monotonic() + timeout)]

    def open(
        self,
        name: str,
        tasks: Mapping[str, Sequence[str]] | None,
        max_samples: int | None,
        max_bytes: int | None,
        length_field: str | None,
        max_staleness: int | None,
        timeout: float,
    ) -> "Steps[PartitionCalls]":
        from .calls import PartitionCalls

        wanted = None if tasks is None else _tasks(name, tasks)
        request = OpenPartition(name, wanted, max_samples, max_bytes, length_field, max_staleness)
        [answer] = yield [Exchange(self.controller, request, time.monotonic() + timeout)]
        return PartitionCalls(self, name, expect(answer, Opened))


def _tasks(name: str, tasks: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    if not name or not isinstance(tasks, Mapping) or not tasks:
        raise InvalidArgument(
            f"partition {name!r} with tasks {tasks!r}; give it a name and tasks={{consumer group: [fields]}}"
        )
    for task, fields in tasks.items():
        if isinstance(fields, str):
            raise InvalidArgument(f"task {task!r} needs the fields {fields!r}; give a list, as [{fields!r}]")
    return {str(task): [str(field) for field in fields] for task, fields in tasks.items()}


def goodbye(controller: Any) -> Steps[None]:
    """Tells the controller that this client leaves."""
    yield [Exchange(controller, Goodbye(), time.monotonic() + 1.0)]


def _address(address: str) -> str:
    """``tcp://host:port``, where ``host:port`` may be all that was given."""
    full = address if "://" in address else f"tcp://{address}"
    scheme, _, rest = full.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit():
        raise InvalidArgument(f"address {address!r}; give tcp://host:port, as the store printed it")
    return full


class Remote:
    """The ZeroMQ side of a client: a link, its controller, and storage units as they are needed."""

    def __init__(
        self, address: str, token: str | None, patience: float, server_key: str | None, pins: Pins
    ) -> None:
        self.address = address
        self.pins = pins
        self.link = Link(token, patience, pins, None if server_key is None else server_key.encode())
        self.controller = self.link.peer(
            "the controller",
            address,
            lambda why: ControllerLost(f"the controller at {address} {why}", address=address),
        )
        self._units: dict[int, Peer] = {}
        self._connecting = threading.Lock()

    @property
    def addresses(self) -> list[UnitAddress]:
        """Where the storage units listen, as the welcome said."""
        return self.controller.welcome.result(0).units

    def transport(self) -> ZmqTransport:
        return ZmqTransport(lambda: [unit.number for unit in self.addresses], self.unit, self.pins)

    def ucx_transport(self, token: str) -> UcxPayload:
        """Payload by UCX. QueueError says why it cannot be."""
        return UcxPayload(self.addresses, self._reachable, token, self.transport(), self.pins)

    def _reachable(self, host: str) -> str:
        """The host of a unit as this client reaches it: one that listens everywhere is where the controller
        is.
        """
        if host in ("0.0.0.0", "::"):
            return self.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        return host

    def unit(self, number: int) -> Peer:
        """The storage unit of that number, connected to when first asked for."""
        with self._connecting:
            if number not in self._units:
                self._units[number] = self._connect(number)
            return self._units[number]

    def _connect(self, number: int) -> Peer:
        known = {unit.number: unit for unit in self.addresses}
        if number not in known:
            raise StorageLost(f"there is no storage unit {number}", unit=number, address="")
        host = self._reachable(known[number].host)
        address = f"tcp://{f'[{host}]' if ':' in host else host}:{known[number].port}"
        return self.link.peer(
            f"storage unit {number}",
            address,
            lambda why: StorageLost(
                f"storage unit {number} at {address} {why}", unit=number, address=address
            ),
            carries_payload=True,
        )


class Contact:
    """How a client comes to its servers: by ZeroMQ first, then over to shared memory where that is possible.

    Args:
        address: ``tcp://host:port``, or a `Server`.
        transport: "auto", "shm" (or fail), "zmq", "ucx" (or "zmq" with a note).
    """

    def __init__(
        self,
        address: "str | Server",
        token: str | None,
        patience: float,
        transport: str,
        server_key: str | None,
    ) -> None:
        if not isinstance(address, str | Server):
            raise InvalidArgument(
                f"address {address!r}; give a Server, or text such as 'tcp://127.0.0.1:5555'"
            )
        if isinstance(address, str):
            address = _address(address)
        if transport not in TRANSPORTS:
            raise InvalidArgument(f"transport {transport!r}; choose one of {', '.join(TRANSPORTS)}")
        self.local: str | None = None
        if isinstance(address, Server):
            token = address.token if token is None else token
            server_key = address.server_key if server_key is None else server_key
            self.local = address.local
            address = address.address
        self.address = address
        self.transport = transport
        self.patience = patience
        self.notes: list[str] = []
        self._token = token
        self._server_key = server_key

    def remote(self) -> Remote:
        """Begins to connect by ZeroMQ."""
        return Remote(self.address, self._token, self.patience, self._server_key, Pins())

    def session(self) -> tuple[LocalSession, Pins, ArenaMap]:
        """What a local connection works on."""
        pins, arenas = Pins(), ArenaMap()
        client = secrets.randbits(62)
        return LocalSession(self.address, self._token, client, pins, arenas), pins, arenas

    def refused(self, why: OSError) -> None:
        """There is no local listener of that name here: another host, or another network namespace.

        Raises:
            QueueError: the user insists on shared memory.
        """
        reason = f"shm: the store is not on this host ({why.strerror or why})"
        if self.transport == "shm":
            raise QueueError(f"{reason}; use transport='zmq' or 'auto'")
        self.notes.append(reason)

    def over_memory(self, channel: Channel, welcome: Welcome, pins: Pins, arenas: ArenaMap) -> Servers:
        return Servers(self.address, channel, None, SharedMemoryTransport(arenas, pins), welcome)

    def over_network(self, remote: Remote, welcome: Welcome) -> Servers:
        """The servers over ZeroMQ, with payload by UCX if that is asked for and possible. Blocks for the
        probe.
        """
        transport: Transport = remote.transport()
        if self.transport == "ucx":
            try:
                transport = remote.ucx_transport(self._token or "")
            except QueueError as error:
                self.notes.append(str(error))
        return Servers(self.address, remote.link, remote.controller, transport, welcome, self.notes)


def first_welcome(welcome: "Future[Welcome]", timeout: float, address: str) -> Welcome:
    """Blocks for the controller's welcome."""
    try:
        return welcome.result(timeout)
    except TimeoutError:
        raise Timeout(
            f"no welcome from {address} within {timeout:g} s; is a transferqueue listening there?"
        ) from None
