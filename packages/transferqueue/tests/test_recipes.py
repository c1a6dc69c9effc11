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


def test_the_pytorch_loop_has_forty_lines_and_learns() -> None:
    pytest.importorskip("torch")
    lines = (RECIPES / "pytorch_loop.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 40
    found = re.search(r"true weights: ([0-9.]+) \(([0-9.]+) at the start\)", run("pytorch_loop.py"))
    assert found is not None
    assert float(found[1]) < float(found[2]) / 2
