"""Engines that die or stall in the middle of a run: it goes on, and every sample is trained exactly once."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax.orchestration.launcher import RoleFailed

Local = Callable[..., Any]
SMALL = (
    "rollout.engine=breaking_engine:BreakingEngine",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "actor.micro_batch_size=8",
    "rollout.max_new_tokens=16",
    "rollout.stall_seconds=2",
)


def events(run: Any, name: str) -> list[dict[str, Any]]:
    return [event for event in run.lines("events.jsonl") if event["event"] == name]


def check_exact(run: Any, steps: int) -> None:
    """Each prompt in order was trained by one step, and each of its samples once."""
    assert sorted(ordinal for _, group in run.trained() for ordinal in group) == list(range(steps * 4))
    (accounts,) = run.accounting
    assert accounts["faults"] == []
    assert accounts["dropped"] == {}
    assert accounts["put"] == accounts["trained"] == steps * 16


def test_engines_that_die_and_stall_lose_nothing_and_come_back(local: Local, plan: Any) -> None:
    plan.faults = deque([("dies", 40), ("stalls", 20), ("dies", 60)])
    run = local("quickstart", *SMALL, "steps=14")
    check_exact(run, 14)
    lost = events(run, "engine lost")
    assert not plan.faults
    assert len(lost) == 3
    assert all(event["requests"] > 0 and event["seconds"] >= 0 for event in lost)
    assert [("made to fail" in e["reason"], "has not got on" in e["reason"]) for e in lost] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    back = events(run, "engine back")
    assert [event["engine"] for event in back] == [event["engine"] for event in lost][: len(back)]
    assert len(back) >= 2
    assert all(event["version"] > 0 and event["seconds"] > 0 for event in back)
    assert max(step["staleness/max"] for step in run.metrics) <= 1
    assert max(step["loss/ratio_gap_max"] for step in run.metrics if step["staleness/max"] == 0) <= 1e-4


def test_the_answer_does_not_depend_on_the_engine_that_was_lost(local: Local, plan: Any) -> None:
    """On-policy in float32: the same seeds give the same tokens, wherever, and however often, they run."""
    words = (*SMALL, "max_staleness=0", "steps=3")
    whole = local("quickstart", *words, name="whole")
    plan.faults = deque([("dies", 5), ("dies", 7)])
    broken = local("quickstart", *words, name="broken")
    assert len(events(broken, "engine lost")) == 2
    assert broken.rewards == pytest.approx(whole.rewards)


def test_colocate_goes_on_with_the_engines_that_are_left(local: Local, plan: Any) -> None:
    plan.faults = deque([("dies", 20)])
    run = local(
        "quickstart", *SMALL, "steps=6", "mode=colocate", "max_staleness=0", "rollout.engine_restarts=0"
    )
    check_exact(run, 6)
    assert plan.made == 2
    assert len(events(run, "engine given up")) == 1


def test_one_engine_alone_is_waited_for_and_its_requests_asked_again(local: Local, plan: Any) -> None:
    plan.faults = deque([("dies", 20)])
    run = local("quickstart", *SMALL, "steps=5", "rollout.replicas=1")
    check_exact(run, 5)
    assert [event["engine"] for event in events(run, "engine back")] == ["engine-0"]


def test_the_run_ends_by_name_when_no_engine_is_left(local: Local, plan: Any, tmp_path: Path) -> None:
    plan.faults = deque([("dies", 10)] * 4)
    with pytest.raises(
        RoleFailed, match="no engine is left, and none is started again: engine-0: started again 1"
    ):
        local("quickstart", *SMALL, "steps=60", "rollout.engine_restarts=1")
    assert plan.made == 4
