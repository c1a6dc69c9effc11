"""The GPU check where there is no GPU: it says so, and rehearsed on the CPU its script works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def check(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "scripts/gpu_check.sh"), *arguments]
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_without_a_gpu_it_says_so(root):
    done = check(root, "dcs")
    assert (done.returncode, done.stdout) == (2, "no CUDA device here\n")


def test_a_part_that_there_is_not_is_refused(root):
    done = check(root, "nothing")
    assert done.returncode == 64
    assert "no part is called nothing" in done.stderr


@pytest.mark.slow
def test_rehearsed_on_the_cpu_every_figure_holds(root):
    done = check(root, "--rehearse")
    *lines, summary = done.stdout.splitlines()
    figures = [json.loads(line) for line in lines]
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary == f"{len(figures)} of {len(figures)} figures hold"
    assert {"claim", "value", "unit", "goal", "ok", "how"} == set(figures[0])
    assert len(figures) >= 14
