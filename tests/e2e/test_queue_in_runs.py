"""What a run makes of its queue: byte limits, token budgets, transports, processes that die."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transferqueue as tq
from relax.entrypoints.cli import app
from relax.orchestration.launcher import RoleFailed

Local = Callable[..., Any]
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "actor.micro_batch_size=8",
    "rollout.max_new_tokens=8",
)


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[float]]:
    """Kills a process of the run's queue once the run has done so many steps: killer(0, after=2); 0 is the
    controller, then come the storage units. Returns a list that gets the time of the kill.
    """

    def arm(process: int, after: int) -> list[float]:
        serve, killed = tq.serve, []

        def watched(**options: Any) -> tq.Server:
            server = serve(**options)

            def kill() -> None:
                deadline = time.monotonic() + 90
                metrics = tmp_path / "run" / "metrics.jsonl"
                while time.monotonic() < deadline:
                    if metrics.is_file() and len(metrics.read_text().splitlines()) >= after:
                        server.processes[process].send_signal(signal.SIGKILL)
                        killed.append(time.monotonic())
                        return
                    time.sleep(0.02)

            threading.Thread(target=kill, daemon=True).start()
            return server

        monkeypatch.setattr("relax.orchestration.services.tq.serve", watched)
        return killed

    return arm


def event(run: Any, name: str) -> list[dict[str, Any]]:
    return [entry for entry in run.lines("events.jsonl") if entry["event"] == name]


def test_a_queue_with_room_for_little_more_than_a_step_is_enough(local: Local) -> None:
    first = local("quickstart", *SMALL, "steps=3", name="measured")
    step = max(step["queue/payload"] for step in first.metrics)  # when one is trained, the next is all there
    limit = int(1.3 * step)
    run = local("quickstart", *SMALL, "steps=12", f"queue.max_bytes={limit}", name="full")
    (accounts,) = run.accounting
    assert accounts["faults"] == []
    assert accounts["put"] == accounts["trained"] == 12 * 16
    assert max(step["queue/payload"] for step in run.metrics) <= limit
    assert max(step["staleness/max"] for step in run.metrics) == 1


def test_a_queue_that_cannot_hold_a_step_ends_the_run_by_name(local: Local) -> None:
    with pytest.raises(RoleFailed, match=r"rollout failed") as failed:
        local("quickstart", *SMALL, "steps=4", "queue.max_bytes=3000", "queue.wait_seconds=2")
    assert "queue.max_bytes = 3000 has to hold at least the samples of one step; raise it" in str(
        failed.value
    )


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_run_survives_the_death_of_a_storage_unit(
    local: Local, killer: Callable[..., list[float]], transport: str
) -> None:
    killed = killer(1, after=2)
    run = local("quickstart", *SMALL, "steps=30", f"queue.transport={transport}")
    assert killed
    (accounts,) = run.accounting
    assert accounts["faults"] == []
    assert accounts["put"] == accounts["trained"] == 30 * 16
    assert [entry["unit"] for entry in event(run, "storage unit restarted")] == [0]
    assert event(run, "queue started")[0]["transport"] == transport


def test_the_death_of_the_controller_ends_the_run_by_name(
    local: Local, killer: Callable[..., list[float]]
) -> None:
    killed = killer(0, after=2)
    with pytest.raises(RoleFailed, match="the queue failed: the controller ended with status -9"):
        local("quickstart", *SMALL, "steps=100000")
    assert time.monotonic() - killed[0] < 45


def test_micro_batches_by_tokens_replay_bit_for_bit(local: Local) -> None:
    words = (*SMALL, "actor.micro_batch_tokens=360", "steps=6")
    recorded = local("quickstart", *words, name="recorded")
    cut = [entry["micro_batches"] for entry in recorded.lines("schedule/segment-0/actor.jsonl")]
    assert [sum(sizes) for sizes in cut] == [4] * 6
    assert {len(sizes) for sizes in cut} == {2}  # 4 groups of 4 samples of 38 to 45 tokens
    assert [step["perf/micro_batches"] for step in recorded.metrics] == [2.0] * 6
    replayed = local("quickstart", *words, name="replayed", replay=recorded)
    assert [entry["micro_batches"] for entry in replayed.lines("schedule/segment-0/actor.jsonl")] == cut
    timed = ("time/", "perf/", "queue/", "weights/")
    kept = [
        [{k: v for k, v in step.items() if not k.startswith(timed)} for step in run.metrics]
        for run in (recorded, replayed)
    ]
    assert kept[0] == kept[1]


def test_micro_batches_by_tokens_repeat_bit_for_bit_in_colocate(local: Local) -> None:
    words = (*SMALL, "actor.micro_batch_tokens=360", "mode=colocate", "steps=4")
    first, again = (local("quickstart", *words, name=name) for name in "ab")
    assert first.untimed == again.untimed
    assert [e["micro_batches"] for e in first.lines("schedule/segment-0/actor.jsonl")] == [[2, 2]] * 4


def test_doctor_says_how_samples_travel_and_what_the_queue_may_hold(
    capfd: pytest.CaptureFixture[str],
) -> None:
    app(args=["doctor", "configs/quickstart.yaml", "queue.max_bytes=1GiB"], standalone_mode=False)
    assert "queue: shm, at most 1.0 GiB (queue.max_bytes = 1GiB)" in capfd.readouterr().out


def test_the_memory_of_trained_steps_is_let_go_of(local: Local) -> None:
    run = local("quickstart", *SMALL, "steps=20", "algorithm.kl_coef=0.01")
    one_step = max(step["queue/memory"] for step in run.metrics[:4])
    assert max(step["queue/memory"] for step in run.metrics) <= 2 * one_step
