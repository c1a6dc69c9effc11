"""Publisher and follower over a real coordinator: what is waited for, told, and survived."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import dcs
import pytest
import torch
from dcs.ticket import Taken
from relax.config.system import WeightSettings
from relax.distributed.bus import Endpoint
from relax.distributed.weights import Arrival, WeightPublisher, follow, publish_metrics
from torch import Tensor


def tensors(version: int) -> dict[str, Tensor]:
    """Most of a version is as it was before."""
    return {"a": torch.arange(2048.0).view(64, 32), "b": torch.full((7,), float(version))}


@dataclass
class Committed:
    pause_seconds: float


class Engine:
    """Keeps a copy of what it commits, and says that it paused for a quarter of a second."""

    def __init__(self) -> None:
        self.begun: Mapping[str, Tensor] = {}
        self.held: list[dict[str, Tensor]] = []

    async def begin_update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.begun = tensors

    async def commit_update(self, version: int) -> Committed:
        self.held.append({name: tensor.clone() for name, tensor in self.begun.items()})
        return Committed(0.25)


@pytest.fixture
def coordinator() -> Iterator[dcs.CoordinatorProcess]:
    with dcs.serve(token="t", lease_seconds=20.0) as process:
        yield process


@asynccontextmanager
async def following(
    engines: Mapping[str, Engine], endpoint: Endpoint, settings: WeightSettings
) -> AsyncIterator[list[Arrival]]:
    """Engines that follow run `r`; gives the list of what has arrived."""
    arrivals: list[Arrival] = []
    layout = dcs.layout.of(tensors(0))
    tasks = [
        asyncio.create_task(follow(engine, endpoint, "r", name, layout, settings, arrivals.append))
        for name, engine in engines.items()
    ]
    try:
        yield arrivals
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def publish_until_all_take(publisher: WeightPublisher, version: int, names: set[str]) -> int:
    """Publish until every engine is there to be waited for; the next version to publish."""
    async with asyncio.timeout(30):
        while True:
            await asyncio.to_thread(publisher.publish, version, tensors(version))
            stats = await asyncio.to_thread(publisher.settle)
            version += 1
            if stats is not None and stats.acked.keys() == names:
                return version


@pytest.mark.parametrize(
    ("settings", "wire"),
    [
        (WeightSettings(), "shm"),
        (WeightSettings(wires=["tcp"]), "tcp"),
        (WeightSettings(wires=["tcp"], delta=True), "tcp+delta"),
    ],
    ids=["shm", "tcp", "delta"],
)
async def test_every_version_is_in_every_engine_before_the_next_by_the_wire_of_the_settings(
    coordinator: dcs.CoordinatorProcess, settings: WeightSettings, wire: str
) -> None:
    endpoint = Endpoint(coordinator.address, "t")
    engines = {"engine-0": Engine(), "engine-1": Engine()}
    publisher = WeightPublisher(endpoint, "r", tensors(0), settings)
    try:
        async with following(engines, endpoint, settings) as arrivals:
            first = await publish_until_all_take(publisher, 0, set(engines))
            for version in range(first, first + 3):
                before = await asyncio.to_thread(publisher.publish, version, tensors(version))
                assert before is not None
                assert before.version == version - 1
                assert {name: taken.pause_seconds for name, taken in before.acked.items()} == {
                    "engine-0": 0.25,
                    "engine-1": 0.25,
                }
                told = [arrival for arrival in arrivals if arrival.version == version - 1]
                assert {arrival.engine for arrival in told} == engines.keys()
            await asyncio.to_thread(publisher.settle)
        for engine in engines.values():
            assert all(
                torch.equal(engine.held[-1][name], value) for name, value in tensors(first + 2).items()
            )
        assert {arrival.wire for arrival in arrivals if arrival.version == first + 2} == {wire}
        assert {arrival.received > 0 for arrival in arrivals} == {wire != "shm"}
    finally:
        publisher.close()


async def test_a_coordinator_that_is_started_again_costs_a_wait_and_no_version(
    coordinator: dcs.CoordinatorProcess,
) -> None:
    endpoint, settings = Endpoint(coordinator.address, "t"), WeightSettings(timeout_seconds=60)
    engines = {"engine-0": Engine(), "engine-1": Engine()}
    publisher = WeightPublisher(endpoint, "r", tensors(0), settings)
    try:
        async with following(engines, endpoint, settings) as arrivals:
            first = await publish_until_all_take(publisher, 0, set(engines))
            os.kill(coordinator.pid, signal.SIGKILL)
            for version in range(first, first + 3):
                await asyncio.to_thread(publisher.publish, version, tensors(version))
            await asyncio.to_thread(publisher.settle)
        assert coordinator.restarts == 1
        taken = {(arrival.engine, arrival.version) for arrival in arrivals}
        assert taken >= {(name, version) for name in engines for version in range(first, first + 3)}
        for engine in engines.values():
            assert torch.equal(engine.held[-1]["b"], tensors(first + 2)["b"])
    finally:
        publisher.close()


async def test_an_engine_that_is_lost_is_not_waited_for(coordinator: dcs.CoordinatorProcess) -> None:
    """It has not left: the coordinator keeps a member that died for a lease, 20 s here."""
    endpoint, settings = Endpoint(coordinator.address, "t"), WeightSettings(timeout_seconds=60)
    publisher = WeightPublisher(endpoint, "r", tensors(0), settings)
    lost: dcs.Subscriber | None = None
    try:
        async with following({"engine-0": Engine()}, endpoint, settings):
            first = await publish_until_all_take(publisher, 0, {"engine-0"})
            lost = dcs.Subscriber(
                endpoint.address, run="r", name="engine-1", layout=dcs.layout.of(tensors(0)), token="t"
            )
            await asyncio.to_thread(publisher.publish, first, tensors(first))
            asked = asyncio.create_task(asyncio.to_thread(publisher.publish, first + 1, tensors(first + 1)))
            await asyncio.wait({asked}, timeout=1.5)
            assert not asked.done()  # it may yet take it
            publisher.away = frozenset({"engine-1"})
            stats = await asyncio.wait_for(asked, 10)
            assert stats is not None
            assert stats.pending == ("engine-1",)
            assert stats.acked.keys() == {"engine-0"}
    finally:
        if lost is not None:
            lost.close()
        publisher.close()


async def test_versions_below_the_first_of_an_engine_pass_it_by_and_hold_nobody_up(
    coordinator: dcs.CoordinatorProcess,
) -> None:
    """As in a replay of a run that the engine joined late."""
    endpoint, settings = Endpoint(coordinator.address, "t"), WeightSettings(timeout_seconds=60)
    publisher, late = WeightPublisher(endpoint, "r", tensors(0), settings), Engine()
    layout = dcs.layout.of(tensors(0))
    arrivals: list[Arrival] = []
    task = asyncio.create_task(
        follow(late, endpoint, "r", "engine-0", layout, settings, arrivals.append, 10_000)
    )
    try:
        first = await publish_until_all_take(publisher, 0, {"engine-0"})
        assert late.held == arrivals == []
        for version in (first, 10_000, 10_001):
            await asyncio.to_thread(publisher.publish, version, tensors(version))
        stats = await asyncio.to_thread(publisher.settle)
        assert stats is not None
        assert stats.acked.keys() == {"engine-0"}
        assert [float(held["b"][0]) for held in late.held] == [10_000.0, 10_001.0]
        assert [arrival.version for arrival in arrivals] == [10_000, 10_001]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.close()


def test_the_first_version_has_none_before_it(coordinator: dcs.CoordinatorProcess) -> None:
    publisher = WeightPublisher(Endpoint(coordinator.address, "t"), "r", tensors(0), WeightSettings())
    try:
        assert publisher.settle() is None
        assert publisher.publish(0, tensors(0)) is None
        again = publisher.publish(1, tensors(1))
        assert again is not None
        assert (again.version, again.acked) == (0, {})
    finally:
        publisher.close()


def test_a_step_tells_when_the_last_engine_had_committed() -> None:
    taken = {"engine-0": Taken(0.1, 0.5, 0.03), "engine-1": Taken(0.2, 0.4, 0.01)}
    stats = dcs.Stats(3, 1000, 0.0, 0.007, 0.001, taken, {}, {}, ())
    assert publish_metrics(stats) == {
        "weights/payload": 1000.0,
        "weights/freeze": 0.007,
        "weights/commit": 0.5,
    }
    nobody = dcs.Stats(3, 1000, 0.0, 0.007, 0.001, {}, {}, {}, ())
    assert publish_metrics(nobody)["weights/commit"] == 0.0
