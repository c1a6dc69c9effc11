"""Weights from the actor to the engines through dcs: publish after a step, follow beside the decode loop."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import dcs

from relax.config.system import WeightSettings
from relax.distributed.bus import Endpoint

if TYPE_CHECKING:
    from torch import Tensor

POLL_SECONDS = 30.0
"""One wait for a version; nothing arriving in it is no fault, the wait is renewed."""


class Update(Protocol):
    """What an engine says of a version that it has committed."""

    @property
    def pause_seconds(self) -> float: ...


class Updatable(Protocol):
    """The part of an inference engine that takes weights."""

    async def begin_update(self, version: int, tensors: "Mapping[str, Tensor]") -> None: ...

    async def commit_update(self, version: int) -> Update: ...


class WeightPublisher:
    """The actor's side. A version is frozen when `publish` returns; it travels while the next step runs."""

    def __init__(
        self, endpoint: Endpoint, run: str, tensors: "Mapping[str, Tensor]", settings: WeightSettings
    ) -> None:
        self._publisher = dcs.Publisher(
            endpoint.address,
            run=run,
            layout=dcs.layout.of(tensors),
            token=endpoint.token,
            wires=settings.wires,
        )
        self._timeout = settings.timeout_seconds
        self._last: dcs.Ticket | None = None

    def publish(self, version: int, tensors: "Mapping[str, Tensor]") -> None:
        """Freeze and announce. Waits first until the version before is in every live engine: engines skip
        none, which keeps a recorded run replayable and bounds what is in flight.
        """
        self.settle()
        self._last = self._publisher.publish(version, tensors)

    def settle(self) -> None:
        """Wait until the newest version has been committed by every live subscriber."""
        if self._last is not None:
            self._last.wait(self._timeout)

    def close(self) -> None:
        self._publisher.close()


async def follow(
    engine: Updatable,
    endpoint: Endpoint,
    run: str,
    name: str,
    layout: "dcs.Layout",
    settings: WeightSettings,
    committed: Callable[[], None] = lambda: None,
) -> None:
    """Commit each new version in an engine until cancelled: staged and verified beside the decode loop,
    copied in between two decode steps, then acknowledged. `committed` is called after each.
    """
    subscriber = await asyncio.to_thread(
        dcs.Subscriber,
        endpoint.address,
        run=run,
        name=name,
        layout=layout,
        token=endpoint.token,
        wires=settings.wires,
        streams=settings.streams,
        delta=settings.delta,
    )
    version = -1
    try:
        while True:
            staged = await asyncio.to_thread(subscriber.next, after=version, timeout=POLL_SECONDS)
            if staged is None:
                continue
            await engine.begin_update(staged.version, staged.tensors)
            update = await engine.commit_update(staged.version)
            version = staged.version
            committed()
            await asyncio.to_thread(staged.ack, update.pause_seconds)
    finally:
        await asyncio.shield(asyncio.to_thread(subscriber.close))
