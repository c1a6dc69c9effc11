"""The index-neutral lock pins every version: what uv resolves from it is what it says."""

import difflib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

UNREACHABLE = (
    "error sending request",
    "client error (Connect)",
    "dns error",
    "Network connectivity is disabled",
)


def test_the_neutral_form_is_its_own_neutral_form_and_names_no_address(
    neutral: Callable[[str], str], neutral_lock: str
) -> None:
    assert neutral(neutral_lock) == neutral_lock
    assert "://" not in neutral_lock
    assert "sha256:" not in neutral_lock
    assert 'source = { registry = "pypi" }' in neutral_lock


def test_locking_again_from_the_neutral_form_changes_no_line(
    root: Path, uv: str, neutral: Callable[[str], str], neutral_lock: str, tmp_path: Path
) -> None:
    for source in [
        root / "pyproject.toml",
        root / ".python-version",
        *root.glob("packages/*/pyproject.toml"),
    ]:
        copy = tmp_path / source.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    (tmp_path / "uv.lock").write_text(neutral_lock)

    done = subprocess.run([uv, "lock"], cwd=tmp_path, capture_output=True, text=True, timeout=110)

    if done.returncode and not os.environ.get("CI") and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip("the package registry cannot be reached from here, and uv needs it to resolve the lock")
    assert done.returncode == 0, done.stderr
    again = neutral((tmp_path / "uv.lock").read_text())
    diff = difflib.unified_diff(
        neutral_lock.splitlines(), again.splitlines(), "committed", "again", lineterm=""
    )
    assert not (changed := list(diff)), "\n".join(
        ["uv resolves other versions than the lock says: run `make setup` and commit uv.lock", *changed]
    )
