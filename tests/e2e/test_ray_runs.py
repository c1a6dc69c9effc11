"""The main job as a person starts it: the command line, Ray, every role in a process of its own."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

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
    """Shared memory and Ray folders that were not there before, and stay: other tests, which may run at the
    same time, have some for a moment.
    """
    deadline = time.monotonic() + within
    while (left := sorted(surroundings() - before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


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


def test_a_role_that_dies_ends_the_run_with_its_name_and_no_hang(command: Start) -> None:
    before = surroundings()
    started = command("train", "configs/quickstart.yaml", *SMALL, "steps=100000")
    started.wait_for(lambda: started.steps_done() >= 2, timeout=300)
    family = started.descendants()
    engines = [process for process in family if "RoleWorker" in " ".join(process.cmdline())]
    assert len(engines) >= 5, [process.cmdline() for process in family]
    killed = time.monotonic()
    engines[0].send_signal(signal.SIGKILL)
    run = started.finish(timeout=90)
    assert run.code == 1
    assert "failed:" in run.output
    assert time.monotonic() - killed < 60
    assert gone(family)
    assert left_behind(before) == []


def test_colocate_on_ray_is_bit_for_bit_the_run_in_one_process(command: Start, local: Start) -> None:
    words = (*SMALL, "mode=colocate", "max_staleness=0", "steps=4")
    run = command("train", "configs/quickstart.yaml", *words).finish(300)
    assert run.code == 0, run.output
    assert run.untimed == local("quickstart", *words).untimed
