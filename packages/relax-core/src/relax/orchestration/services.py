"""The services a run carries with it: queue and weight coordinator, on loopback, with a token."""

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import dcs
import transferqueue as tq

from relax.config import ConfigError, RunConfig
from relax.config.sizes import bytes_of
from relax.distributed.bus import Endpoint


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


@dataclass(frozen=True)
class Services:
    """Where they listen.

    Attributes:
        queue: how its processes fare.
        transport: how samples travel between roles and queue: `shm`, or `zmq (why not faster)`.
    """

    bus: Endpoint
    weights: Endpoint
    queue: QueueWatch
    transport: str


@contextlib.contextmanager
def services(config: RunConfig) -> Iterator[Services]:
    """Start both, and end them with the block.

    Raises:
        ConfigError: a port is in use, or `queue.transport` is not possible here.
    """
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(_queue(config, token))
        bus = Endpoint(queue.address, token, config.queue.transport)
        transport = _transport(bus)
        try:
            weights = stack.enter_context(dcs.serve(port=config.weights.port, token=token))
        except dcs.DcsError as error:
            raise ConfigError(
                f"weights.port = {config.weights.port}: the weight coordinator did not start: {error}"
            ) from error
        yield Services(bus, Endpoint(weights.address, token), QueueWatch(queue), transport)


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


def _queue(config: RunConfig, token: str) -> "tq.Server":
    try:
        return tq.serve(
            storage_units=config.queue.storage_units,
            max_bytes=bytes_of(config.queue.max_bytes),
            port=config.queue.port,
            token=token,
        )
    except tq.QueueError as error:
        raise ConfigError(f"queue.port = {config.queue.port}: the queue did not start: {error}") from error
