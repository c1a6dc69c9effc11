"""Adapters on their way: the base travels once, versions are small, an engine is given whole tensors."""

import asyncio
from collections.abc import Mapping

import dcs
import pytest
import torch
from relax.config.lora import LoraSettings
from relax.config.system import WeightSettings
from relax.distributed.adapters import AdapterPublisher, MergingEngine, adapter_layout
from relax.distributed.bus import Endpoint
from relax.distributed.weights import Arrival, follow
from torch import Tensor

LORA = LoraSettings(rank=2, alpha=4.0, targets=["q_proj"])
BASE = {
    "layers.0.q_proj.weight": torch.arange(64 * 32, dtype=torch.float32).view(64, 32) / 100,
    "layers.0.norm.weight": torch.ones(32),
    "layers.0.o_proj.weight": torch.full((32, 64), 3.0),
}


class Committed:
    pause_seconds = 0.0


class Engine:
    def __init__(self) -> None:
        self.begun: Mapping[str, Tensor] = {}
        self.held: list[dict[str, Tensor]] = []

    async def begin_update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self.begun = tensors

    async def commit_update(self, version: int) -> Committed:
        self.held.append({name: tensor.clone() for name, tensor in self.begun.items()})
        return Committed()


def matrices(version: int) -> dict[str, Tensor]:
    return {
        "layers.0.q_proj.lora_A.weight": torch.full((2, 32), 0.5),
        "layers.0.q_proj.lora_B.weight": torch.full((64, 2), float(version)),
    }


def test_an_engine_asks_for_the_matrices_of_the_layers_that_have_an_adapter():
    assert adapter_layout(dcs.layout.of(BASE), LORA) == dcs.layout.of(matrices(0))


async def test_an_engine_is_given_merged_weights_and_only_matrices_travel() -> None:
    settings = WeightSettings()
    with dcs.serve(token="t", lease_seconds=20.0) as coordinator:
        endpoint = Endpoint(coordinator.address, "t")
        version = 0
        publisher = await asyncio.to_thread(
            AdapterPublisher,
            endpoint,
            "r",
            lambda: BASE.items(),
            lambda: matrices(version).items(),
            settings,
            "float32",
        )
        engine, arrivals, seen = Engine(), list[Arrival](), asyncio.Event()

        def arrived(arrival: Arrival) -> None:
            arrivals.append(arrival)
            seen.set()

        layout = dcs.layout.of(BASE)
        merging = MergingEngine(engine, endpoint, "r", "engine-0", layout, settings, LORA)
        following = asyncio.create_task(
            follow(merging, endpoint, "r", "engine-0", adapter_layout(layout, LORA), settings, arrived)
        )
        try:
            for version in range(2):
                seen.clear()
                await asyncio.to_thread(publisher.publish, version)
                await asyncio.wait_for(seen.wait(), 30)
                await asyncio.to_thread(publisher.settle)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await asyncio.to_thread(publisher.close)
    first, second = engine.held[-2:]
    assert all(torch.equal(first[name], tensor) for name, tensor in BASE.items())
    # scale 2, times 1 * 0.5 over a rank of 2
    assert torch.equal(second["layers.0.q_proj.weight"], BASE["layers.0.q_proj.weight"] + 2.0)
    assert torch.equal(second["layers.0.o_proj.weight"], BASE["layers.0.o_proj.weight"])
    assert arrivals[-1].nbytes == dcs.layout.of(matrices(0)).offsets()[1]
    assert arrivals[-1].nbytes == pytest.approx(768, abs=64)
