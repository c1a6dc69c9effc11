"""The recipes run as they are, and do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parent.parent / "recipes"


def run(name: str) -> str:
    finished = subprocess.run(
        [sys.executable, str(RECIPES / name)], capture_output=True, text=True, timeout=110, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_verl_style_step_trains_what_it_rolled_out() -> None:
    pytest.importorskip("tensordict")
    found = re.search(r"(\d+) samples, (\d+) tokens trained\n(\d+) samples left", run("verl_style.py"))
    assert found is not None
    assert (int(found[1]), int(found[2]), int(found[3])) == (16, 74, 0)


def test_the_pytorch_loop_has_forty_lines_and_learns() -> None:
    pytest.importorskip("torch")
    lines = (RECIPES / "pytorch_loop.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 40
    found = re.search(r"true weights: ([0-9.]+) \(([0-9.]+) at the start\)", run("pytorch_loop.py"))
    assert found is not None
    assert float(found[1]) < float(found[2]) / 2
