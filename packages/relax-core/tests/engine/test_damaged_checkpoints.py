"""A damaged checkpoint is named, with the way to go on without it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from relax.backends.train.base import StateTree
from relax.config.base import ConfigError
from relax.engine.checkpoints import Checkpoints, read_checkpoint, read_source

SOURCE = {"next": 9, "returned": [4]}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run with whole checkpoints of steps 2 and 5."""
    state = StateTree({"w": torch.arange(64.0)}, {"step": 1})
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (2, 5):
        checkpoints.save(step, state, SOURCE)
    return tmp_path


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def digests_of_another(file: Path) -> None:
    content = json.loads(file.read_text())
    content["sha256"]["data.json"] = "0" * 64
    file.write_text(json.dumps(content))


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("data.json", cut, "data.json: its sha256 is"),
    ("data.json", lambda file: file.write_text("{}"), "data.json: its sha256 is"),
    ("data.json", Path.unlink, "data.json"),
    ("manifest.json", cut, "manifest.json"),
    ("manifest.json", lambda file: file.write_text("{}"), "manifest.json: it lacks 'sha256'"),
    ("manifest.json", lambda file: file.write_text("[]"), "manifest.json"),
    ("manifest.json", Path.unlink, "manifest.json"),
    ("manifest.json", digests_of_another, "data.json: its sha256 is"),
    ("tensors.safetensors", Path.unlink, "tensors.safetensors"),
    ("tensors.safetensors", cut, "tensors.safetensors: it has .* bytes, its header says"),
    ("tensors.safetensors", lambda file: file.write_bytes(b""), "tensors.safetensors"),
]


@pytest.mark.parametrize(("name", "damage", "expected"), DAMAGE)
def test_a_damaged_file_is_named_with_the_way_out(
    run_folder: Path, name: str, damage: Callable[[Path], object], expected: str
) -> None:
    newest = Checkpoints(run_folder, keep=5).newest()
    assert newest is not None
    assert read_source(newest.folder) == SOURCE
    damage(newest.folder / name)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_source(newest.folder)
    assert f"remove {newest.folder} to go on from step 2" in str(caught.value)
    with pytest.raises(ConfigError, match=r"is damaged.*to go on from step 2"):
        read_checkpoint(newest.folder)


def test_damaged_tensors_of_the_right_length_are_found_when_they_are_read(run_folder: Path) -> None:
    file = run_folder / "checkpoints" / "step-000005" / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert read_source(file.parent) == SOURCE
    with pytest.raises(ConfigError, match=r"sha256.*to go on from step 2"):
        read_checkpoint(file.parent)


def test_without_an_older_checkpoint_the_run_begins_again(run_folder: Path) -> None:
    oldest = Checkpoints(run_folder, keep=5).all()[0].folder
    cut(oldest / "data.json")
    with pytest.raises(ConfigError, match=r"remove .*step-000002, and the run begins again"):
        read_source(oldest)


def test_a_folder_renamed_to_another_step_is_refused(run_folder: Path) -> None:
    folder = run_folder / "checkpoints"
    renamed = (folder / "step-000005").rename(folder / "step-000006")
    with pytest.raises(ConfigError, match="it is of step 5"):
        read_source(renamed)


def test_reading_the_source_imports_no_torch(run_folder: Path) -> None:
    folder = run_folder / "checkpoints" / "step-000005"
    code = (
        "import sys, pathlib; from relax.engine.checkpoints import read_source; "
        f"read_source(pathlib.Path({str(folder)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
