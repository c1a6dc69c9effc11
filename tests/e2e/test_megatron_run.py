"""The quick start, small, with Megatron on two tensor-parallel ranks: the whole run of it that CI makes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHIM = Path(__file__).parents[2] / "packages/relax-core/tests/train/megatron/shim"
"""Lets megatron-core compute on CPUs."""
SMALL = (
    "mode=colocate",
    "max_staleness=0",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=8",
    "actor.micro_batch_size=8",
    "ray.start_seconds=300",
    "steps=2",
)


@pytest.mark.timeout(600)
def test_megatron_on_two_tensor_ranks_rewards_as_torch_native(
    command: Callable[..., Any], local: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SHIM))
    words = ("train", "configs/quickstart.yaml", *SMALL, "launcher=local", "log.progress=plain")
    started = command(*words, "actor.backend=megatron", "actor.tensor_parallel=2")
    run = started.finish(timeout=500)
    assert run.code == 0, run.output
    native = local("quickstart", *SMALL, name="native").metrics
    assert len(run.metrics) == len(native) == 2
    for ours, theirs in zip(run.metrics, native, strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
