"""Mixtures from Megatron's ranks to an engine: experts one by one, or parts of them, to those of a layer
together.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcs
import pytest
import torch
from relax.backends.inference.transformers_engine import TransformersEngine
from relax.backends.models import build_model, named_weights
from relax.config.system import WeightSettings
from relax.distributed.bus import Endpoint
from relax.distributed.weights import subscribe

# The first test of a session starts the ranks that all of them share: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

VOCABULARY = 101
SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
TENSOR: dict[str, Any] = {"tensor_parallel": 2, "megatron": SEQUENCE}
EXPERTS: dict[str, Any] = {"expert_parallel": 2, "data_parallel": 2}


@pytest.mark.parametrize(
    ("kind", "actor"),
    [
        pytest.param("qwen3_moe", TENSOR, id="qwen3_moe"),
        pytest.param("qwen3_moe", EXPERTS, id="qwen3_moe-experts", marks=pytest.mark.slow),
        pytest.param(
            "qwen3_omni_moe_thinker", {**TENSOR, "expert_tensor_parallel": 2}, marks=pytest.mark.slow
        ),
        pytest.param("qwen3_vl_moe", EXPERTS, id="qwen3_vl_moe", marks=pytest.mark.slow),
    ],
)
async def test_the_embedded_engine_has_the_weights_of_a_mixture_after_a_step(
    kind: str, actor: dict[str, Any], two: Any, model: Callable[..., str], tmp_path: Path
) -> None:
    folder, exported = model(kind, tied=False), tmp_path / "exported"
    engine = TransformersEngine(folder)
    try:
        with dcs.serve(token="t") as coordinator:
            endpoint = Endpoint(coordinator.address, "t")
            layout = dcs.layout.of(engine.weights())
            subscriber = await asyncio.to_thread(
                subscribe, endpoint, "run", "engine-0", layout, WeightSettings()
            )
            words = {"folder": folder, "actor": actor, "out": str(exported), "vocabulary": VOCABULARY}
            async with asyncio.TaskGroup() as group:
                ranks = group.create_task(
                    asyncio.to_thread(two, "publish", endpoint=[endpoint.address, "t"], **words)
                )
                try:
                    staged = await asyncio.to_thread(subscriber.next, after=-1, timeout=120)
                    assert staged is not None
                    await engine.begin_update(0, staged.tensors)
                    await engine.commit_update(0)
                    await asyncio.to_thread(staged.ack, 0.0)
                    await ranks
                finally:
                    await asyncio.to_thread(subscriber.close)
        stepped, before = (dict(named_weights(build_model(place))) for place in (exported, folder))
        held = engine.weights()
        assert held.keys() == stepped.keys()
        assert [name for name in held if not torch.equal(held[name], stepped[name])] == []
        experts = [name for name in held if ".experts." in name]
        assert experts
        assert not any(torch.equal(held[name], before[name]) for name in experts)
    finally:
        await engine.close()
