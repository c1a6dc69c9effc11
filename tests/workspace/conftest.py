"""What the workspace's own tests share: its root, a uv that runs, the text of the lock it commits."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def runs(uv: str) -> bool:
    return subprocess.run([uv, "cache", "dir"], cwd=ROOT, capture_output=True, timeout=60).returncode == 0


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def uv() -> str:
    """The uv that `make setup` uses: the one on PATH if it runs here, else the one in .tools/."""
    if shutil.which("uv") and runs("uv"):
        return "uv"
    own = ROOT / ".tools/bin/uv"
    assert own.exists(), f"no uv runs here: neither one on PATH nor {own}; run make setup"
    return str(own)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For a Python of another virtual environment: nothing leaks into its imports, and no hub is asked."""
    leaks = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
    return {name: value for name, value in os.environ.items() if name not in leaks} | {"HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def neutral(root: Path) -> Callable[[str], str]:
    """The clean filter, run as git runs it: the text of a lock in, its index-neutral form out."""

    def through_the_filter(lock: str) -> str:
        command = [sys.executable, str(root / "scripts/neutral_lock.py")]
        return subprocess.run(
            command, input=lock, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    return through_the_filter


@pytest.fixture(scope="session")
def neutral_lock(root: Path, neutral: Callable[[str], str]) -> str:
    """The lock as it is committed: the working tree's, which uv has filled in, through the clean filter."""
    return neutral((root / "uv.lock").read_text())
