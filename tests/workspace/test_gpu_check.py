"""The GPU check where there is no GPU: it says so, and rehearsed on the CPU its script works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def check(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "scripts/gpu_check.sh"), *arguments]
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("parts", [("dcs",), ("train",), ()], ids=["dcs", "train", "all"])
def test_without_a_gpu_it_says_so(root, parts):
    done = check(root, *parts)
    assert (done.returncode, done.stdout) == (2, "no CUDA device here\n")


def test_a_part_that_there_is_not_is_refused(root):
    done = check(root, "nothing")
    assert done.returncode == 64
    assert "nothing is called nothing" in done.stderr


def test_a_folder_without_wheels_is_refused(root, tmp_path):
    done = check(root, "train", f"--wheels={tmp_path}")
    assert done.returncode == 64
    assert "there are no wheels in" in done.stderr


def test_a_python_that_lacks_something_is_told_what_to_carry(root):
    # Without site-packages, as on a machine that has only some of them.
    done = subprocess.run(
        [sys.executable, "-S", str(root / "scripts/gpu/check_train.py")],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "lacks torch, " in done.stdout
    assert "scripts/gpu/carry.sh" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("part", "least", "moot"), [("dcs", 14, 3), ("train", 23, 3)])
def test_rehearsed_on_the_cpu_every_figure_holds_that_says_something_there(root, part, least, moot):
    done = check(root, part, "--rehearse")
    *lines, summary = done.stdout.splitlines()
    figures = [json.loads(line) for line in lines]
    assert done.returncode == 0, done.stdout + done.stderr
    held = len(figures) - moot
    assert summary == f"{held} of {held} figures hold, {moot} say nothing on this machine"
    assert [one["ok"] for one in figures].count(None) == moot
    for one in figures:
        assert (one["ok"] is None) == one["how"].startswith("says nothing on a CPU: "), one
    assert {"claim", "value", "unit", "goal", "ok", "how"} == set(figures[0])
    assert len(figures) >= least
