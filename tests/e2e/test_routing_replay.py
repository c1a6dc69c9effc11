"""Whole runs of a mixture of experts whose trainer follows the engine's routes."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax.config import ConfigError

Local = Callable[..., Any]
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "actor.micro_batch_size=8",
    "rollout.max_new_tokens=8",
)


@pytest.mark.parametrize("mode", ["colocate", pytest.param("async", marks=pytest.mark.slow)])
def test_a_mixture_of_experts_learns_while_its_routes_are_replayed(local: Local, mode: str) -> None:
    steps = 60 if mode == "async" else 24
    run = local("moe", f"mode={mode}", f"max_staleness={int(mode == 'async')}", f"steps={steps}")
    assert run.rewards[0] < 0.2
    assert np.mean(run.rewards[-4:]) > (0.9 if mode == "async" else 0.3)
    (accounts,) = run.accounting
    assert accounts["faults"] == []
    assert accounts["trained"] == steps * 64


def test_on_policy_the_trainer_computes_what_the_engine_did(local: Local) -> None:
    run = local("moe", *SMALL, "max_staleness=0", "steps=4")
    assert max(step["loss/ratio_gap_max"] for step in run.metrics) <= 1e-4


def test_routes_outlive_an_update_in_the_middle_of_a_generation(local: Local) -> None:
    """Spans of two versions in one sample: its routes stay those of the first time, and of its length."""
    run = local("moe", *SMALL, "rollout.max_new_tokens=48", "steps=8", "rollout.replicas=1")
    assert (run.accounting[0]["faults"], run.accounting[0]["trained"]) == ([], 8 * 16)


@pytest.mark.slow
def test_routes_grow_with_the_turns_of_an_episode(local: Local) -> None:
    """A further turn shows the engine all before it again; a group whose routes did not fit is dropped."""
    run = local(
        "calculator",
        "model=tiny_moe",
        "actor.routing_replay=true",
        "actor.supervised.steps=80",
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "steps=3",
    )
    assert max(step["response/turns_mean"] for step in run.metrics) > 1.2
    assert [e for e in run.lines("events.jsonl") if e["event"] == "group dropped"] == []
    assert run.accounting[0]["trained"] == 3 * 16


def test_groups_with_bad_routes_are_dropped_and_counted_and_the_run_goes_on(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "breaking")
    wrong = importlib.import_module("misrouting_engine").WRONG
    wrong.clear()
    wrong.update(
        {
            1: lambda routes: routes[:-1],
            2: lambda routes: routes.astype(np.int16),
            4: lambda routes: routes + 100,
            5: lambda routes: np.zeros_like(routes),
            7: lambda routes: None,
        }
    )
    engine = "rollout.engine=misrouting_engine:MisroutingEngine"
    run = local("moe", *SMALL, "mode=colocate", "max_staleness=0", "steps=4", engine)

    dropped = {e["ordinal"]: e["reason"] for e in run.lines("events.jsonl") if e["event"] == "group dropped"}
    assert dropped.keys() == wrong.keys()
    assert "routes" in dropped[1]
    assert "routes are int16" in dropped[2]
    assert "goes to expert 1" in dropped[4]
    assert "goes to experts [0, 0]" in dropped[5]
    assert "routes are NoneType" in dropped[7]
    trained = {ordinal for _, group in run.trained() for ordinal in group}
    assert len(trained) == 16
    assert not trained & wrong.keys()
    assert run.accounting[0]["faults"] == []


def test_a_dense_model_is_refused_before_anything_starts(local: Local) -> None:
    with pytest.raises(ConfigError, match=r"routing_replay = true .* a qwen3 is dense"):
        local("quickstart", "actor.routing_replay=true")
