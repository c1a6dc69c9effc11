"""Engines under Ray whose start takes long, or fails: the run waits, or says why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = (
    "configs/quickstart.yaml",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "actor.micro_batch_size=8",
    "actor.supervised.steps=0",
    "rollout.max_new_tokens=8",
    "rollout.replicas=1",
    "ray.num_cpus=2",
    "ray.start_seconds=300",
    "steps=2",
)


@pytest.fixture(autouse=True)
def _engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "breaking"))


def test_a_first_start_may_take_longer_than_a_standstill(command: Callable[..., Any]) -> None:
    words = ("rollout.engine=late_engine:LateEngine", "rollout.stall_seconds=4")
    run = command("train", *SMALL, *words).finish(timeout=400)
    assert run.code == 0, run.output
    assert "engine lost" not in (run.folder / "events.jsonl").read_text()
    assert len(run.metrics) == 2


def test_why_an_engine_could_not_be_built_is_said_where_the_run_ends(command: Callable[..., Any]) -> None:
    run = command("train", *SMALL, "rollout.engine=late_engine:NoEngine").finish(timeout=400)
    assert run.code == 1
    assert "engine-0 failed:" in run.output
    assert "libno.so.1: cannot open shared object file" in run.output
    assert "RayActorError" not in run.output
