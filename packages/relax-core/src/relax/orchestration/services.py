"""The services a run carries with it: queue and weight coordinator, on loopback, with a token."""

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import dcs
import transferqueue as tq

from relax.config import ConfigError, RunConfig
from relax.distributed.bus import Endpoint


@dataclass(frozen=True)
class Services:
    """Where they listen."""

    bus: Endpoint
    weights: Endpoint


@contextlib.contextmanager
def services(config: RunConfig) -> Iterator[Services]:
    """Start both, and end them with the block.

    Raises:
        ConfigError: a port is in use.
    """
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        try:
            queue = stack.enter_context(
                tq.serve(
                    storage_units=config.queue.storage_units,
                    max_bytes=config.queue.max_bytes,
                    port=config.queue.port,
                    token=token,
                )
            )
        except tq.QueueError as error:
            raise ConfigError(
                f"queue.port = {config.queue.port}: the queue did not start: {error}"
            ) from error
        try:
            weights = stack.enter_context(dcs.serve(port=config.weights.port, token=token))
        except dcs.DcsError as error:
            raise ConfigError(
                f"weights.port = {config.weights.port}: the weight coordinator did not start: {error}"
            ) from error
        yield Services(Endpoint(queue.address, token), Endpoint(weights.address, token))
