"""Engines under Ray whose start takes long, or fails: the run waits, or says why, and leaves nothing."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax.backends.inference.sglang.process import GUARD

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


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("the command", signal.SIGKILL),
        ("the command", signal.SIGTERM),
        ("the engine's worker", signal.SIGKILL),
        ("the guard", signal.SIGKILL),
    ],
)
def test_nothing_of_a_server_that_still_starts_outlives_its_run(
    command: Callable[..., Any], what: str, how: signal.Signals
) -> None:
    started = command("train", *SMALL, "rollout.engine=late_engine:StartingEngine")
    started.wait_for(lambda: len(parts(started.root)) == 2, timeout=300)
    family = [psutil.Process(pid) for pid in parts(started.root)]
    (guard, *_) = (one for one in started.descendants() if str(GUARD) in one.cmdline())
    worker = guard.parent()
    assert worker is not None
    ends = {"the command": started.process.pid, "the engine's worker": worker.pid, "the guard": guard.pid}
    psutil.Process(ends[what]).send_signal(how)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    run = started.finish(timeout=120)
    if what == "the guard":
        assert "the server did not start: its process ended (killed by SIGKILL)" in run.output
        assert f"the end of {run.folder}/logs/engine-0.sglang.log:" in run.output


def parts(root: Path) -> list[int]:
    """The processes that a server's log names."""
    logs = list(root.glob("*/logs/engine-0.sglang.log"))
    words = logs[0].read_text().split() if logs else []
    return [int(word) for word in words[1::2]]
