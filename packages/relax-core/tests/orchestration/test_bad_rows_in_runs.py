"""Bad rows: refused by name before a run among the first, dropped with a reason during it further on."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax.config import ConfigError, load
from relax.engine.checkpoints import Checkpoints, read_source
from relax.orchestration import run_folder
from relax.orchestration.launcher import RoleFailed
from relax.orchestration.preflight import PROMPTS_CHECKED
from relax.orchestration.train import prepare, train

ROWS = f"""
GOOD = {{"prompt": "say 7", "m": [{{"role": "user", "content": "x"}}]}}

def half():
    return [GOOD if i < {PROMPTS_CHECKED} else {{"question": i}} for i in range(2 * {PROMPTS_CHECKED})]

def missing():
    return [GOOD, GOOD, {{"m": 1}}]

def surrogate():
    return [GOOD, {{"prompt": "a" + chr(0xD800)}}]

def strings():
    return ["a", "b"]

def string_inside():
    return [GOOD, "b"]

def messages():
    return [GOOD, {{"prompt": "x", "m": None}}]

def not_a_dict():
    return [GOOD, {{"prompt": "x", "m": ["hi"]}}]

def parts():
    return [GOOD, {{"m": [{{"role": "user", "content": [{{"type": "noise"}}]}}]}}]

def picture():
    return [GOOD, {{"m": [{{"role": "user", "content": [{{"type": "image", "image": b"no picture"}}]}}]}}]

def nothing():
    return None
"""

SMALL = {
    "launcher": "local",
    "log.progress": "none",
    "log.tensorboard": "false",
    "model": "tiny",
    "reward.name": "char_share",
    "reward.kwargs": '{character: "7", length: 4}',
    "rollout.replicas": "2",
    "rollout.prompts_per_step": "4",
    "rollout.samples_per_prompt": "2",
    "rollout.max_new_tokens": "4",
    "rollout.ignore_eos": "true",
    "actor.micro_batch_size": "8",
    "max_staleness": "0",
}

Start = Callable[..., Path]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "some_rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_rows", raising=False)
    return tmp_path


@pytest.fixture
def start(rows: Path) -> Start:
    """Run on the rows of a function, in this process: start("half", name="a", steps=3)."""

    def begin(function: str, name: str = "run", resume: bool = False, **words: Any) -> Path:
        given = {key.replace("__", "."): value for key, value in words.items()}
        if resume:
            folder, config = run_folder.reopen(
                rows / name, [f"{key}={value}" for key, value in given.items()]
            )
        else:
            all_words = {
                **SMALL,
                "run.root": rows,
                "run.name": name,
                "data": f"some_rows:{function}",
                **given,
            }
            config = load(None, [f"{key}={value}" for key, value in all_words.items()])
            folder = run_folder.create(config, name)
        context = prepare(config, folder, resume=resume)
        train(config, folder, context, name)
        return folder.path

    return begin


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def schedule(run: Path, role: str) -> list[dict[str, Any]]:
    files = sorted(run.glob(f"schedule/segment-*/{role}.jsonl"))
    return [entry for file in files for entry in lines(file)]


@pytest.mark.parametrize(
    ("function", "words", "expected"),
    [
        ("missing", {}, "row 2 is no prompt: it has no column 'prompt', only 'm'"),
        ("surrogate", {}, "row 1 is no prompt: UnicodeEncodeError: .*surrogates not allowed"),
        ("strings", {}, "rows must be mappings"),
        ("string_inside", {}, "row 1 is no prompt: expected a mapping"),
        ("messages", {"data__messages_column": "m"}, "row 1 is no prompt: column 'm' holds None"),
        ("not_a_dict", {"data__messages_column": "m"}, "row 1 is no prompt: message 0 of column 'm' is 'hi'"),
        ("parts", {"data__messages_column": "m"}, "row 1 cannot be encoded: UnsupportedModality"),
        (
            "picture",
            {"data__messages_column": "m", "model": "tiny_vl"},
            "row 1 cannot be encoded: .*image 0",
        ),
        ("nothing", {}, "returned None; expected a list of rows"),
    ],
)
def test_a_bad_row_among_the_first_is_refused_by_name(
    start: Start, function: str, words: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        start(function, **words)
    assert f"data.path = 'some_rows:{function}'" in str(caught.value)


def test_the_command_line_ends_with_code_2_and_leaves_no_folder(rows: Path) -> None:
    words = {**SMALL, "run.root": rows / "runs", "data": "some_rows:missing"}
    done = subprocess.run(
        [str(Path(sys.executable).parent / "relax"), "train", *(f"{k}={v}" for k, v in words.items())],
        env={**os.environ, "PYTHONPATH": str(rows)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "data.path = 'some_rows:missing': row 2 is no prompt" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((rows / "runs").glob("*"))


@pytest.mark.parametrize("mode", ["async", "colocate"])
def test_a_bad_row_further_on_drops_its_group_and_the_slot_goes_to_the_next_prompt(
    start: Start, mode: str
) -> None:
    run = start("half", mode=mode, steps=4)
    trained = [ordinal for entry in schedule(run, "actor") for ordinal in entry["ordinals"]]
    drops = [entry for entry in schedule(run, "rollout") if entry["event"] == "drop"]
    dropped = [entry["ordinal"] for entry in drops]
    assert len(trained) == 4 * 4
    assert len(dropped) > 4
    assert sorted(trained + dropped) == list(range(len(trained) + len(dropped)))
    assert all("no column 'prompt', only 'question'" in entry["reason"] for entry in drops)
    told = [event for event in lines(run / "events.jsonl") if event["event"] == "group dropped"]
    assert [(event["ordinal"], event["step"]) for event in told] == [(d["ordinal"], d["step"]) for d in drops]


def test_colocate_with_bad_rows_resumes_bit_for_bit(start: Start) -> None:
    timed = ("time/", "perf/", "queue/", "weights/")
    whole = start("half", name="whole", mode="colocate", steps=6, rollout__max_failures=5)
    start("half", name="parts", mode="colocate", steps=4, rollout__max_failures=5)
    parts = start("half", name="parts", steps=6, resume=True)
    untimed = [
        [{k: v for k, v in step.items() if not k.startswith(timed)} for step in lines(run / "metrics.jsonl")]
        for run in (whole, parts)
    ]
    trained = [[entry["ordinals"] for entry in schedule(run, "actor")] for run in (whole, parts)]
    assert untimed[0] == untimed[1]
    assert trained[0] == trained[1]
    # The resume tried more bad rows again than may fail in a row, and went on.
    first = lines(parts / "schedule" / "segment-1" / "rollout.jsonl")
    again = next(place for place, entry in enumerate(first) if entry["event"] == "start")
    assert again > 5
    newest = Checkpoints(parts, keep=1).newest()
    assert newest is not None
    assert len(read_source(newest.folder)["returned"]) >= again


@pytest.mark.parametrize("mode", ["async", "colocate"])
def test_bad_rows_in_a_row_end_the_run(start: Start, mode: str) -> None:
    with pytest.raises(RoleFailed, match=r"1 groups failed in a row \(rollout.max_failures = 0\)"):
        start("half", mode=mode, steps=4, rollout__max_failures=0)
