"""Weights from the actor to the engines through dcs: publish after a step, follow beside the decode loop."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import dcs
import msgspec

from relax.config.system import WeightSettings
from relax.distributed.bus import Endpoint
from relax.distributed.wire_names import as_published

if TYPE_CHECKING:
    from torch import Tensor

POLL_SECONDS = 30.0
"""One wait for a version; nothing arriving in it is no fault, the wait is renewed."""

FLOATING = ("float16", "bfloat16", "float32", "float64")


LOOK_SECONDS = 0.5
"""Between two looks whether an engine that is waited for is lost; one that commits is noticed at once."""


class Update(Protocol):
    """What an engine says of a version that it has committed."""

    @property
    def pause_seconds(self) -> float: ...


class Updatable(Protocol):
    """The part of an inference engine that takes weights."""

    async def begin_update(self, version: int, tensors: "Mapping[str, Tensor]") -> None: ...

    async def commit_update(self, version: int) -> Update: ...


@dataclass(frozen=True)
class Arrival:
    """One version in one engine.

    Attributes:
        engine: its name.
        version: that it has committed.
        wire: how it came: `shm`, `tcp` or `tcp+delta`.
        nbytes: size of the version.
        received: bytes of it that came over a connection; none of what was mapped.
        transfer_seconds: from the first request to the last verified chunk, beside the decode loop.
        pause_seconds: that decoding stood still for the commit.
    """

    engine: str
    version: int
    wire: str
    nbytes: int
    received: int
    transfer_seconds: float
    pause_seconds: float


class WeightPublisher:
    """The actor's side. A version is frozen when `publish` returns; it travels while the next step runs.

    A coordinator that dies and is started again costs a wait, nothing else; `weights.timeout_seconds` bounds
    it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run: str,
        tensors: "Mapping[str, Tensor]",
        settings: WeightSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
        session: str | None = None,
        layout: "dcs.Layout | None" = None,
        dtype: str | None = None,
    ) -> None:
        """`rank`, `world_size`, `session` as of `dcs.Publisher`, for a trainer of many ranks; `layout` of its
        tensors where they are parts of others. With a `dtype`, floating tensors travel in that.
        """
        layout = as_published(dcs.layout.of(tensors) if layout is None else layout)
        self._publisher = dcs.Publisher(
            endpoint.address,
            run=run,
            rank=rank,
            world_size=world_size,
            session=session,
            layout=layout if dtype is None else cast(layout, dtype),
            token=endpoint.token,
            wires=settings.wires,
            host=own_address(endpoint.address),
            timeout=settings.timeout_seconds,
        )
        self._timeout = settings.timeout_seconds
        self._last: dcs.Ticket | None = None
        self.away: frozenset[str] = frozenset()
        """Engines that are known to be lost. The coordinator keeps a dead member for a lease; nobody here
        waits for one. Set from any thread.
        """

    def publish(self, version: int, tensors: "Mapping[str, Tensor]") -> dcs.Stats | None:
        """Freeze and announce. Waits first until the version before is in every live engine: engines skip
        none, which keeps a recorded run replayable and bounds what is in flight. Returns how the version
        before went; None when this is the first.
        """
        before = self.settle()
        self._last = self._publisher.publish(version, tensors)
        return before

    def freeze(self, version: int, tensors: "Mapping[str, Tensor]") -> tuple[int, float]:
        """`publish` of a rank that does not wait for engines, as its leader has done so: the bytes, and the
        seconds that it took to freeze them.
        """
        self._last = self._publisher.publish(version, tensors)
        stats = self._last.stats()
        return stats.nbytes, stats.freeze_seconds

    def settle(self) -> dcs.Stats | None:
        """Wait until the newest version has been committed by every live subscriber that is not `away`;
        returns how that went, None before the first version.
        """
        if self._last is None:
            return None
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._last.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            except dcs.Timeout:
                stats = self._last.stats()
                if stats.pending and self.away.issuperset(stats.pending):
                    return stats
                if time.monotonic() >= deadline:
                    raise

    def close(self) -> None:
        self._publisher.close()


class Publishing(Protocol):
    """The Actor's versions, from wherever its weights are."""

    @property
    def away(self) -> frozenset[str]: ...

    @away.setter
    def away(self, names: frozenset[str]) -> None: ...

    def publish(self, version: int) -> dcs.Stats | None: ...

    def settle(self) -> dcs.Stats | None: ...

    def close(self) -> None: ...


class LivePublisher(WeightPublisher):
    """Publishes what `weights` gives at that moment."""

    def __init__(
        self,
        endpoint: Endpoint,
        run: str,
        weights: "Callable[[], Iterable[tuple[str, Tensor]]]",
        settings: WeightSettings,
        dtype: str | None = None,
    ) -> None:
        super().__init__(endpoint, run, dict(weights()), settings, dtype=dtype)
        self._weights = weights

    def publish(self, version: int, tensors: "Mapping[str, Tensor] | None" = None) -> dcs.Stats | None:
        return super().publish(version, dict(self._weights()) if tensors is None else tensors)


def cast(layout: "dcs.Layout", dtype: str) -> "dcs.Layout":
    """A layout with its floating tensors in another dtype, in which they are frozen then."""
    specs = (
        msgspec.structs.replace(spec, dtype=dtype) if spec.dtype in FLOATING else spec
        for spec in layout.tensors
    )
    return dcs.Layout(tuple(specs))


def publish_metrics(stats: dcs.Stats) -> dict[str, float]:
    """What the trainer knows of a version: its bytes, the seconds it took to freeze, and those until the last
    engine that waited for it had committed it.
    """
    return {
        "weights/payload": float(stats.nbytes),
        "weights/freeze": stats.freeze_seconds,
        "weights/commit": max((taken.ack_seconds for taken in stats.acked.values()), default=0.0),
    }


def own_address(coordinator: str) -> str:
    """The address of this machine from which it speaks to a coordinator, so that its peers reach it too:
    loopback to one on loopback. Nothing is sent.

    Args:
        coordinator: `tcp://host:port`.
    """
    where = urlsplit(coordinator)
    family, kind, protocol, _, address = socket.getaddrinfo(
        where.hostname, where.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def subscribe(
    endpoint: Endpoint, run: str, name: str, layout: "dcs.Layout", settings: WeightSettings
) -> dcs.Subscriber:
    """One engine's connection to the versions of a run. `layout`: of the tensors that it holds."""
    return dcs.Subscriber(
        endpoint.address,
        run=run,
        name=name,
        layout=as_published(layout),
        token=endpoint.token,
        wires=settings.wires,
        streams=settings.streams,
        delta=settings.delta,
        host=own_address(endpoint.address),
        timeout=settings.timeout_seconds,
    )


async def follow(
    engine: Updatable,
    endpoint: Endpoint,
    run: str,
    name: str,
    layout: "dcs.Layout",
    settings: WeightSettings,
    committed: Callable[[Arrival], None] = lambda arrival: None,
    first: int = 0,
) -> None:
    """Commit each new version in an engine until cancelled: staged and verified beside the decode loop,
    copied in between two decode steps, then acknowledged. `committed` is called before the acknowledgement.
    Versions below `first` are acknowledged and nothing else: an engine that replays a run in which it came
    later has to be as it was then.
    """
    subscriber = await asyncio.to_thread(subscribe, endpoint, run, name, layout, settings)
    version = -1
    try:
        while True:
            staged = await asyncio.to_thread(subscriber.next, after=version, timeout=POLL_SECONDS)
            if staged is None:
                continue
            if staged.version < first:
                version = staged.version
                await asyncio.to_thread(staged.ack)
                continue
            await engine.begin_update(staged.version, staged.tensors)
            update = await engine.commit_update(staged.version)
            version = staged.version
            committed(
                Arrival(
                    name,
                    version,
                    staged.wire,
                    staged.nbytes,
                    staged.from_ranks + staged.from_peers,
                    staged.transfer_seconds,
                    update.pause_seconds,
                )
            )
            await asyncio.to_thread(staged.ack, update.pause_seconds)
    finally:
        await asyncio.shield(asyncio.to_thread(subscriber.close))
