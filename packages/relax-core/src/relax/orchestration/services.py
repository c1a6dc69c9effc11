"""The services a run carries with it: queue and weight coordinator, with a token.

They listen on loopback, but for a run on a cluster, whose nodes have to reach them.
"""

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import dcs
import transferqueue as tq

from relax.config import ConfigError, RunConfig
from relax.config.sizes import bytes_of
from relax.distributed.bus import Endpoint

LEASE_SECONDS = 20.0
"""Of actor and engines with the weight coordinator. Long, so that neither its restart nor a machine that is
busy looks like a loss: whether a role has died is found by its launcher, and not by this.
"""


class QueueWatch:
    """How the processes of the queue fare. A storage unit that dies is started again by the queue itself; a
    controller that dies has lost what it knew, and with it the run.
    """

    def __init__(self, server: "tq.Server") -> None:
        self._server = server
        self._pids = [process.pid for process in server.processes]

    @property
    def failure(self) -> str | None:
        """Why the queue is dead and stays so; None while all is well."""
        return None if self._server.failure is None else str(self._server.failure)

    def restarted(self) -> list[int]:
        """The storage units that were started again since the last call."""
        before, self._pids = self._pids, [process.pid for process in self._server.processes]
        return [
            number - 1  # the controller comes first
            for number, (was, now) in enumerate(zip(before, self._pids, strict=True))
            if was != now
        ]


class CoordinatorWatch:
    """How the weight coordinator fares. One that dies is started again at the same address, and roles join
    it again by themselves; one that dies again and again ends the run.
    """

    def __init__(self, process: "dcs.CoordinatorProcess") -> None:
        self._process = process
        self._told = 0

    @property
    def failure(self) -> str | None:
        """Why it is dead and stays so; None while all is well."""
        return None if self._process.error is None else str(self._process.error)

    def restarts(self) -> int:
        """How often it was started again since the last call."""
        before, self._told = self._told, self._process.restarts
        return self._told - before


@dataclass(frozen=True)
class Services:
    """Where they listen.

    Attributes:
        queue: how its processes fare.
        coordinator: how the weight coordinator fares.
        transport: how samples travel between roles and queue: `shm`, or `zmq (why not faster)`.
    """

    bus: Endpoint
    weights: Endpoint
    queue: QueueWatch
    coordinator: CoordinatorWatch
    transport: str

    @property
    def failure(self) -> str | None:
        """Why the run cannot go on; None while all is well."""
        if self.queue.failure is not None:
            return f"the queue failed: {self.queue.failure}"
        if self.coordinator.failure is not None:
            return f"the weight coordinator failed: {self.coordinator.failure}"
        return None


def host_of(config: RunConfig) -> str:
    """The address at which the run's services listen: loopback, or on a cluster one that its nodes reach."""
    if config.ray.address is None:
        return "127.0.0.1"
    if config.ray.host is not None:
        return config.ray.host
    from ray.util import get_node_ip_address

    return get_node_ip_address()


@contextlib.contextmanager
def services(config: RunConfig) -> Iterator[Services]:
    """Start both, and end them with the block.

    Raises:
        ConfigError: a port is in use, or `queue.transport` is not possible here.
    """
    token = secrets.token_hex(16)
    host = host_of(config)
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(_queue(config, token, host))
        bus = Endpoint(queue.address, token, config.queue.transport)
        transport = _transport(bus)
        try:
            weights = stack.enter_context(
                dcs.serve(host, config.weights.port, token, lease_seconds=LEASE_SECONDS, restart=True)
            )
        except dcs.DcsError as error:
            raise ConfigError(
                f"weights.port = {config.weights.port}: the weight coordinator did not start: {error}"
            ) from error
        endpoint = Endpoint(weights.address, token)
        yield Services(bus, endpoint, QueueWatch(queue), CoordinatorWatch(weights), transport)


def _transport(bus: Endpoint) -> str:
    """How a role gets at samples on this machine, found by doing it."""
    try:
        queue = tq.connect(bus.address, token=bus.token, transport=bus.transport)
    except tq.QueueError as error:
        raise ConfigError(f"queue.transport = {bus.transport}: {error}") from error
    try:
        notes = "; ".join(queue.transport_notes)
        return f"{queue.transport} ({notes})" if notes else queue.transport
    finally:
        queue.close()


def _queue(config: RunConfig, token: str, host: str) -> "tq.Server":
    try:
        return tq.serve(
            storage_units=config.queue.storage_units,
            max_bytes=bytes_of(config.queue.max_bytes),
            host=host,
            port=config.queue.port,
            token=token,
        )
    except tq.QueueError as error:
        raise ConfigError(f"queue.port = {config.queue.port}: the queue did not start: {error}") from error
