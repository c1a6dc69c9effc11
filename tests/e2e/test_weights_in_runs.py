"""How the versions of a run travel into its engines, and what the death of their coordinator does to it."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcs
import pytest

Local = Callable[..., Any]
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "actor.micro_batch_size=8",
    "rollout.max_new_tokens=8",
)
ENGINES = 2


def came_by(run: Any) -> list[dict[str, float]]:
    """For each step the engines that took the version it began with, by wire."""
    return [
        {
            name.removeprefix("weights/by_"): engines
            for name, engines in step.items()
            if name.startswith("weights/by_") and engines
        }
        for step in run.metrics
    ]


def wires_told(run: Any) -> list[str]:
    return [entry["wire"] for entry in run.lines("events.jsonl") if entry["event"] == "weights travel"]


def every_engine_has_every_version(run: Any, last: int) -> bool:
    arrived = [(line["engine"], line["version"]) for line in run.lines("weights.jsonl")]
    return sorted(arrived) == [
        (f"engine-{n}", version) for n in range(ENGINES) for version in range(last + 1)
    ]


@pytest.mark.parametrize(
    ("lr", "wire"),
    [("3e-3", "tcp"), ("1e-9", "tcp+delta")],  # the larger changes every number, so that whole ones are sent
    ids=["whole", "differences"],
)
def test_what_is_sent_over_tcp_makes_the_very_run_that_mapped_memory_makes(
    local: Local, lr: str, wire: str
) -> None:
    words = (*SMALL, "mode=colocate", "steps=3", f"actor.lr={lr}")
    mapped = local("quickstart", *words, name="mapped")
    sent = local("quickstart", *words, "weights.wires=[tcp]", "weights.delta=true", name="sent")
    assert sent.untimed == mapped.untimed
    assert sent.trained() == mapped.trained()

    assert came_by(mapped) == [{"shm": ENGINES}] * 3
    assert wires_told(mapped) == ["shm"]
    assert [step["weights/received"] for step in mapped.metrics] == [0.0] * 3

    whole = ENGINES * sent.metrics[0]["weights/payload"]
    assert came_by(sent) == [{"tcp": ENGINES}] + [{wire.removeprefix("tcp+"): ENGINES}] * 2
    assert wires_told(sent) == list(dict.fromkeys(["tcp", wire]))
    assert sent.metrics[0]["weights/received"] == whole  # there was nothing to differ from
    assert all((step["weights/received"] < whole / 2) == ("delta" in wire) for step in sent.metrics[1:])

    for run in (mapped, sent):
        assert every_engine_has_every_version(run, last=3)
        for step in run.metrics:
            assert all(0 < step[f"weights/{name}"] < 10 for name in ("freeze", "transfer", "pause"))


@pytest.fixture
def kill_coordinator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], list[int]]:
    """Kills the run's weight coordinator once an engine has so many versions; the list gets its pid then.

    Engines say so at once: metrics are written behind the steps, and on a busy machine behind the last.
    """

    def arm(after: int) -> list[int]:
        serve, killed = dcs.serve, []

        def watched(*where: Any, **options: Any) -> dcs.CoordinatorProcess:
            process = serve(*where, **options)

            def kill() -> None:
                deadline = time.monotonic() + 90
                taken = tmp_path / "run" / "weights.jsonl"
                while time.monotonic() < deadline:
                    if taken.is_file() and len(taken.read_text().splitlines()) >= after:
                        killed.append(process.pid)
                        os.kill(process.pid, signal.SIGKILL)
                        return
                    time.sleep(0.02)

            threading.Thread(target=kill, daemon=True).start()
            return process

        monkeypatch.setattr("relax.orchestration.services.dcs.serve", watched)
        return killed

    return arm


def test_a_run_survives_the_death_of_the_weight_coordinator(
    local: Local, kill_coordinator: Callable[[int], list[int]]
) -> None:
    killed = kill_coordinator(2)
    run = local("quickstart", *SMALL, "steps=15")
    assert killed
    (accounts,) = run.accounting
    assert accounts["faults"] == []
    assert accounts["put"] == accounts["trained"] == 15 * 16
    told = [entry for entry in run.lines("events.jsonl") if entry["event"] == "weight coordinator restarted"]
    assert len(told) == 1
    assert every_engine_has_every_version(run, last=15)
    assert max(step["staleness/max"] for step in run.metrics) <= 1


@pytest.mark.slow
def test_a_run_on_ray_survives_the_death_of_the_weight_coordinator(command: Callable[..., Any]) -> None:
    started = command("train", "configs/quickstart.yaml", *SMALL, "ray.num_cpus=2", "steps=60")
    started.wait_for(lambda: started.steps_done() >= 2, timeout=180)
    coordinators = [p for p in started.descendants() if {"dcs.cli", "serve"} <= set(p.cmdline())]
    (coordinator,) = coordinators
    coordinator.kill()
    run = started.finish(timeout=180)
    assert run.code == 0, run.output
    assert "the weight coordinator died and was started again" in run.output
    assert f"61 versions of 411 KiB in {ENGINES} engines by shm" in run.output
    assert [accounts["faults"] for accounts in run.accounting] == [[]]
