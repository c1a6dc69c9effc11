"""Bad input ends in seconds, with a message that names the thing and the way out; nothing stays behind."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from relax.entrypoints.cli import app

ROOT = Path(__file__).parents[2]
SECONDS = 30
"""Generous for a loaded machine; alone it is about three, all but a few hundredths of them imports."""

Refused = Callable[..., str]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """The message of a command that must refuse, run in this process, where everything is imported already.
    Whatever else it raises fails the test, as a traceback would.
    """

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            app(args=["train", *words], standalone_mode=False)
        assert ended.value.code == 2
        return capfd.readouterr().err

    return run


@pytest.fixture
def refused_without_a_trace(refused: Refused, tmp_path: Path) -> Refused:
    def run(*words: str) -> str:
        message = refused(*words, f"run.root={tmp_path / 'runs'}")
        left = list((tmp_path / "runs").iterdir()) if (tmp_path / "runs").exists() else []
        assert left == []
        return message

    return run


QUICK = "configs/quickstart.yaml"


def test_a_command_that_refuses_ends_in_seconds_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "relax"),
            "train",
            QUICK,
            "reward.name=char_shar",
            f"run.root={tmp_path / 'runs'}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert time.monotonic() - begun < SECONDS
    assert "char_share" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


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
def test_it_is_refused_by_name(
    refused_without_a_trace: Refused, words: tuple[str, ...], expected: str
) -> None:
    assert expected in refused_without_a_trace(*words)


def test_empty_data(refused_without_a_trace: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert "is empty" in refused_without_a_trace(QUICK, f"data.path={tmp_path / 'empty.jsonl'}")


def test_a_port_in_use(refused_without_a_trace: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"queue.port = {port}" in refused_without_a_trace(QUICK, f"queue.port={port}")
        assert f"weights.port = {port}" in refused_without_a_trace(QUICK, f"weights.port={port}")


def test_a_model_folder_without_a_tokenizer(refused_without_a_trace: Refused, tmp_path: Path) -> None:
    from relax.backends.tiny import write_tiny

    folder = write_tiny(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "has no tokenizer" in refused_without_a_trace(QUICK, f"model={folder}")
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "weights.bin").write_bytes(b"")
    assert "has no config.json" in refused_without_a_trace(QUICK, f"model={folder}")


@pytest.mark.parametrize("asked", ["--resume", "--replay"])
def test_a_run_that_is_not_there(refused: Refused, tmp_path: Path, asked: str) -> None:
    assert "no run lies there" in refused(asked, str(tmp_path / "none"))


def test_an_equals_sign_between_spaces(refused: Refused) -> None:
    assert "a word is key=value" in refused(QUICK, "steps", "=", "5")


def test_a_name_that_is_taken(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    message = refused(QUICK, f"run.root={tmp_path / 'runs'}", "run.name=mine")
    assert "is already there; resume it with --resume" in message
    assert list((tmp_path / "runs" / "mine").iterdir()) == []
