"""Bad input ends in seconds, with a message that names the thing and the way out; nothing stays behind."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELAX = str(Path(sys.executable).parent / "relax")
SECONDS = 30
"""Generous for a loaded machine; alone it is about three."""


def refused(tmp_path: Path, *words: str) -> str:
    """The message of a command that must refuse; checks what every refusal has in common."""
    begun = time.monotonic()
    done = subprocess.run(
        [RELAX, "train", *words, f"run.root={tmp_path / 'runs'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert time.monotonic() - begun < SECONDS
    assert "Traceback" not in done.stderr
    left = list((tmp_path / "runs").iterdir()) if (tmp_path / "runs").exists() else []
    assert left == []
    return done.stderr


QUICK = "configs/quickstart.yaml"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((QUICK, "actor.lrr=1"), "actor.lrr = 1: there is no such key; did you mean actor.lr?"),
        (("configs/quickstrat.yaml",), "configs/quickstart.yaml is there"),
        ((QUICK, "mode=colocate", "max_staleness=2"), "max_staleness = 2 with mode = colocate"),
        ((QUICK, "data.path=configs/data/seven.jsonl"), "did you mean configs/data/sevens.jsonl?"),
        ((QUICK, "data.prompt_column=promt"), "did you mean 'prompt'?"),
        ((QUICK, "model.context_length=24"), "the prompt of row 0 has"),
        ((QUICK, "reward.name=char_shar"), "char_share"),
        ((QUICK, "reward.kwargs={character: seven}"), "char_share"),
        ((QUICK, "environment=calculater"), "calculator"),
        ((QUICK, "algorithm=gropo"), "grpo"),
        ((QUICK, "ray.num_cpus=1", "ray.cpus_per_worker=0.5"), "too few CPUs"),
        ((QUICK, "model=./no/such/folder"), "there is no such folder"),
        ((QUICK, "rollout.engine=vllm"), "rollout.engine"),
        ((QUICK, "actor.backend=megatorn"), "actor.backend"),
        ((QUICK, "run.name=../escape"), "run.name"),
    ],
)
def test_it_is_refused_by_name(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    assert expected in refused(tmp_path, *words)


def test_empty_data(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert "is empty" in refused(tmp_path, QUICK, f"data.path={tmp_path / 'empty.jsonl'}")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"queue.port = {port}" in refused(tmp_path, QUICK, f"queue.port={port}")
        assert f"weights.port = {port}" in refused(tmp_path, QUICK, f"weights.port={port}")


def test_a_model_folder_without_a_tokenizer(tmp_path: Path) -> None:
    from relax.backends.tiny import write_tiny

    folder = write_tiny(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "has no tokenizer" in refused(tmp_path, QUICK, f"model={folder}")
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"")
    assert "has no config.json" in refused(tmp_path, QUICK, f"model={folder}")


def test_a_resume_of_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [RELAX, "train", "--resume", str(tmp_path / "none")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "no run lies there" in done.stderr


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    done = subprocess.run(
        [RELAX, "train", QUICK, f"run.root={tmp_path / 'runs'}", "run.name=mine"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "is already there; resume it with --resume" in done.stderr
    assert list((tmp_path / "runs" / "mine").iterdir()) == []
