"""The main job as a person starts it: the command line, Ray, every role in a process of its own."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from relax.backends.inference.sglang.guard import mapped

pytestmark = pytest.mark.timeout(600)  # a start of Ray and all roles is half a minute on an idle machine
Start = Callable[..., Any]
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "actor.micro_batch_size=8",
    "rollout.max_new_tokens=8",
    "ray.num_cpus=2",
)


def left_behind(before: set[str], within: float = 20.0) -> list[str]:
    """Shared memory and Ray folders that were not there before, and stay, with nobody alive who has them in
    memory: other tests, which may run at the same time, have some, for a moment or as long as a server runs.
    """
    deadline = time.monotonic() + within
    while (left := sorted(surroundings() - before - in_use())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def in_use() -> set[str]:
    """Shared memory that a process has mapped. What was run has ended, so it is not one of its processes."""
    inodes = set[int]().union(*map(mapped, psutil.pids()))
    with os.scandir("/dev/shm") as files:
        return {file.path for file in files if file.inode() in inodes}


def surroundings() -> set[str]:
    shared = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return shared | {str(path) for path in Path("/tmp").glob("relax-ray-*")}


def gone(processes: list[psutil.Process], within: float = 20.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_the_quick_start_learns_and_leaves_everything_promised(command: Start) -> None:
    before = surroundings()
    started = command("train", "configs/quickstart.yaml")
    started.wait_for(lambda: started.steps_done() >= 1, timeout=300)
    family = started.descendants()
    run = started.finish(timeout=300)
    assert run.code == 0, run.output
    assert np.mean(run.rewards[-6:]) > 0.95
    last = run.output.strip().splitlines()[-1]
    assert last.startswith(f"reward {run.rewards[0]:.3f} -> {run.rewards[-1]:.3f} in 60 steps, ")
    assert last.endswith(f"run at {run.folder}")
    assert "3840 samples put = 3840 trained + 0 dropped (exact)" in run.output
    assert list((run.folder / "tensorboard").glob("events*"))
    assert (run.folder / "config.yaml").is_file()
    assert len(run.lines("samples.jsonl")) >= 60
    assert (run.folder / "checkpoints" / "step-000060").is_dir()
    assert gone(family)
    assert left_behind(before) == []


def test_ctrl_c_ends_with_a_checkpoint_and_a_resume_goes_on(command: Start) -> None:
    before = surroundings()
    started = command("train", "configs/quickstart.yaml", *SMALL, "steps=400")
    started.wait_for(lambda: started.steps_done() >= 5, timeout=300)
    family = started.descendants()
    os.killpg(started.process.pid, signal.SIGINT)
    run = started.finish(timeout=90)
    assert run.code == 0, run.output
    assert f"go on with: relax train --resume {run.folder}" in run.output
    assert gone(family)
    assert left_behind(before) == []
    done = len(run.metrics)
    assert (run.folder / "checkpoints" / f"step-{done:06d}").is_dir()
    resumed = command(
        "train", "--resume", str(run.folder), f"steps={done + 3}", root=run.folder.parent
    ).finish(300)
    assert resumed.code == 0, resumed.output
    assert [step["step"] for step in resumed.metrics] == list(range(done + 3))
    ordinals = [ordinal for _, group in resumed.trained() for ordinal in group]
    assert sorted(ordinals) == list(range((done + 3) * 4))
    assert [accounts["faults"] for accounts in resumed.accounting] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["starting Ray", "starting roles"])
@pytest.mark.parametrize("after", [0.5, 3.0])
def test_a_run_that_is_ended_while_it_starts_says_so_and_is_gone_in_seconds(
    command: Start, phase: str, after: float
) -> None:
    before = surroundings()
    started = command("train", "configs/quickstart.yaml", *SMALL, "steps=400", "log.progress=plain")
    assert started.process.stdout is not None
    assert any(line.startswith(phase) for line in started.process.stdout)
    time.sleep(after)
    family = started.descendants()
    ended = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    run = started.finish(timeout=60)
    assert time.monotonic() - ended < 25  # 4 s on two busy cores
    assert run.code == 130
    assert run.output.strip().splitlines()[-1] == f"interrupted; run at {run.folder}"
    assert "Traceback" not in run.output
    assert gone(family)
    assert left_behind(before) == []


def holder(family: list[psutil.Process], file: str) -> psutil.Process:
    """The process of a role: the one that has its file open."""
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if any(opened.path.endswith(file) for opened in process.open_files()):
                return process
    raise AssertionError(f"none of {[process.name() for process in family]} has {file} open")


def test_a_role_that_dies_ends_the_run_with_its_name_and_no_hang(command: Start) -> None:
    before = surroundings()
    started = command("train", "configs/quickstart.yaml", *SMALL, "steps=100000")
    started.wait_for(lambda: started.steps_done() >= 2, timeout=300)
    family = started.descendants()
    killed = time.monotonic()
    holder(family, "rollout.jsonl").send_signal(signal.SIGKILL)
    run = started.finish(timeout=90)
    assert run.code == 1
    assert "rollout failed:" in run.output
    assert time.monotonic() - killed < 60
    assert gone(family)
    assert left_behind(before) == []


def test_an_engine_that_is_killed_loses_nothing_and_comes_back(command: Start) -> None:
    before = surroundings()
    long = ("rollout.max_new_tokens=160", "steps=100000")  # it is generating most of the time
    started = command("train", "configs/quickstart.yaml", *SMALL, *long)
    started.wait_for(lambda: started.steps_done() >= 1, timeout=300)
    family = started.descendants()
    done = started.steps_done()
    holder(family, "engine-1.jsonl").send_signal(signal.SIGKILL)
    started.wait_for(lambda: bool(happened(started.folder, "engine back")), timeout=90)
    (lost,), (back,) = (happened(started.folder, f"engine {what}") for what in ("lost", "back"))
    assert started.steps_done() > done  # by the engine that was left
    assert lost["engine"] == back["engine"] == "engine-1"
    assert "process died" in lost["reason"]
    assert back["version"] > 0
    family += started.descendants()
    os.killpg(started.process.pid, signal.SIGINT)
    run = started.finish(timeout=90)
    assert run.code == 0, run.output
    assert "engine-1 is back after" in run.output
    assert "engines: lost engine-1 (1x); back 1x" in run.output
    check_exact(run)
    assert max(step["staleness/max"] for step in run.metrics) <= 1
    assert max(step["weights/commit"] for step in run.metrics) < 15  # none waited for the dead one's lease
    assert gone(family)
    assert left_behind(before) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_engines_killed_at_random_lose_nothing(command: Start) -> None:
    words = ("rollout.max_new_tokens=64", "rollout.engine_restarts=10", "steps=100000")
    started = command("train", "configs/quickstart.yaml", *SMALL, *words)
    started.wait_for(lambda: started.steps_done() >= 1, timeout=300)
    chosen = random.Random(5)
    for kill in range(10):
        time.sleep(chosen.uniform(0.0, 2.0))
        files = [f"engine-{number}.jsonl" for number in (0, 1)]
        chosen.shuffle(files)

        def kill_one(files: list[str] = files) -> bool:
            for file in files:
                with contextlib.suppress(AssertionError):
                    holder(started.descendants(), file).send_signal(signal.SIGKILL)
                    return True
            return False  # both are on their way back

        started.wait_for(kill_one, timeout=120)
        started.wait_for(lambda kill=kill: len(happened(started.folder, "engine lost")) > kill, timeout=120)
        steps = started.steps_done()
        started.wait_for(lambda steps=steps: started.steps_done() > steps, timeout=300)
    started.wait_for(lambda: len(happened(started.folder, "engine back")) >= 9, timeout=300)
    os.killpg(started.process.pid, signal.SIGINT)
    run = started.finish(timeout=90)
    assert run.code == 0, run.output
    lost = happened(run.folder, "engine lost")
    assert len(lost) == 10
    assert any(event["requests"] for event in lost)  # some were in the middle of an answer
    assert happened(run.folder, "engine given up") == []
    check_exact(run)


def happened(folder: Path, event: str) -> list[dict[str, Any]]:
    """The events of a name so far."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def check_exact(run: Any) -> None:
    """Every prompt in order was trained by one step; what was not was only begun."""
    trained = [ordinal for _, group in run.trained() for ordinal in group]
    assert len(trained) == 4 * len(run.metrics)
    assert len(set(trained)) == len(trained)
    (accounts,) = run.accounting
    assert accounts["faults"] == []
    assert set(accounts["dropped"]) <= {"the run ended before this sample's step"}
    assert accounts["trained"] == 16 * len(run.metrics)


def test_colocate_on_ray_is_bit_for_bit_the_run_in_one_process(command: Start, local: Start) -> None:
    words = (*SMALL, "mode=colocate", "max_staleness=0", "steps=4")
    run = command("train", "configs/quickstart.yaml", *words).finish(300)
    assert run.code == 0, run.output
    assert run.untimed == local("quickstart", *words).untimed
