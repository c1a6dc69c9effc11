"""The benchmark of transferqueue: what its claims rest on, and two of its goals run for real."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from measure import cpu_clock  # pyright: ignore[reportMissingImports] - see conftest
from measure.child import Child, ChildError  # pyright: ignore[reportMissingImports]
from measure.cpu_clock import cpu_seconds, tree  # pyright: ignore[reportMissingImports]
from measure.rounds import in_turn  # pyright: ignore[reportMissingImports]
from queue_goals import encoding, sides, store  # pyright: ignore[reportMissingImports]
from queue_sides import batches  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
TICK = 0.02
"""Seconds: what the start and end of a measured piece of work add."""

ECHO = """
import json, sys
print(json.dumps({"ready": json.loads(sys.argv[1])}), flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""
FAILS = """
import sys
print("{}", flush=True)
sys.stdin.readline()
sys.exit("the disk is on fire")
"""
SILENT = """
import sys
print("{}", flush=True)
sys.stdin.read()
"""
BURN = """
import sys, time
while time.process_time() < 0.8:
    pass
print("{}", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "child.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def some_sides() -> Iterator[sides.Sides]:
    with sides.Sides(quick=True) as entered:
        yield entered


def run(*names: str) -> list[dict]:
    """The lines of a quick run of some goals."""
    only = [word for name in names for word in ("--only", name)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "queue.py"), "--quick", *only],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_goals_run_for_real_and_print_a_machine_and_then_claims():
    machine, *lines = run("encode", "small")
    assert machine["machine"]["cores"] >= 1
    claims = {line["claim"]: line for line in lines if "claim" in line}
    for line in claims.values():
        assert line["value"] > 0
        assert (line["goal"] is None) == (line["ok"] is None)
        assert line["how"]
    goals = {claim: line["goal"] for claim, line in claims.items() if line["goal"]}
    goals = {claim: goal for claim, goal in goals.items() if "Redis" not in claim}  # a machine may lack it
    assert goals == {
        "encode of 1,536 arrays, against memcpy of the same bytes": "<= 2",
        "encode of text and dense images, against memcpy of the same bytes": "<= 2",
        "frames of a message of a put": "<= 3",
        "one small put, against a bare ZMQ round trip": "<= 2",
        "one small get, against a bare ZMQ round trip": "<= 2",
    }
    measured = any("Redis SET" in claim for claim in claims)
    skipped = [line for line in lines if line.get("skipped") == "Redis" and line["why"]]
    assert measured or len(skipped) == 1


def test_a_goal_that_does_not_exist_is_refused_by_name():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "queue.py"), "--only", "speed"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "speed" in done.stderr
    assert "streaming" in done.stderr


def test_a_script_beside_queue_py_still_has_the_standard_queue(tmp_path: Path):
    program = "import claims, queue; assert queue.Queue().qsize() == 0, queue.__file__"
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}  # first, as the folder of a script is
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_sides_take_turns_and_the_one_that_begins_changes():
    order: list[str] = []

    def side(name: str):
        def once() -> dict[str, float]:
            order.append(name)
            return {"s": float(len(order))}

        return once

    figures = in_turn({"a": side("a"), "b": side("b"), "c": side("c")}, rounds=2, warm_up=1)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert figures == {"a": {"s": [6.0, 8.0]}, "b": {"s": [4.0, 9.0]}, "c": {"s": [5.0, 7.0]}}


def test_a_child_says_what_it_is_ready_with_and_answers_line_by_line(script):
    with Child(script(ECHO), json.dumps({"n": 1})) as child:
        assert child.ready == {"ready": {"n": 1}}
        assert child.ask(30, do="x", n=2) == {"do": "x", "n": 2}
        child.tell(n=3)
        child.tell(n=4)
        assert [child.answer(30), child.answer(30)] == [{"n": 3}, {"n": 4}]


def test_a_child_is_started_once(script):
    with Child(script(ECHO)) as child, pytest.raises(RuntimeError, match="enter a child once"):
        child.__enter__()


def test_a_child_that_fails_is_an_error_with_what_it_said_last(script):
    with Child(script(FAILS)) as child, pytest.raises(ChildError, match="the disk is on fire"):
        child.ask(30, do="x")


def test_a_child_that_does_not_answer_in_time_is_an_error_and_is_ended(script):
    with Child(script(SILENT)) as child:
        with pytest.raises(ChildError, match=r"did not answer in 0\.1 s"):
            child.ask(0.1, do="x")
        assert child.pid in tree(os.getpid())
        pid = child.pid
    assert pid not in tree(os.getpid())


def test_the_clock_of_another_process_is_finer_than_a_tick_and_ends_with_it(script):
    with Child(script(BURN)) as child:
        seconds = cpu_seconds([child.pid])
        assert seconds >= 0.8
        assert cpu_seconds([child.pid, child.pid]) == pytest.approx(2 * seconds, abs=TICK)
        assert round(seconds, 2) != seconds  # the kernel's ticks would be hundredths
        pid = child.pid
    with pytest.raises(ProcessLookupError, match=f"process {pid} has ended"):
        cpu_seconds([pid])


def test_the_cpu_of_children_counts_once_as_our_own_before_and_after_they_end(script):
    before = cpu_clock._own_seconds()
    with Child(script(BURN)):
        during = cpu_clock._own_seconds() - before
    after = cpu_clock._own_seconds() - before
    assert 0.8 <= during <= after < 1.5  # twice would be 1.6


def test_only_what_others_use_is_load(monkeypatch):
    now = {"monotonic": 0.0, "busy": 100.0, "own": 7.0}
    monkeypatch.setattr(cpu_clock, "time", SimpleNamespace(monotonic=lambda: now["monotonic"]))
    monkeypatch.setattr(cpu_clock, "system_busy", lambda: now["busy"])
    monkeypatch.setattr(cpu_clock, "_own_seconds", lambda: now["own"])
    meanwhile = cpu_clock.Meanwhile()
    now.update(monotonic=2.0, busy=103.0, own=9.0)
    assert meanwhile.others() == 0.5
    now.update(busy=100.9)  # its ticks lag behind our clock
    assert meanwhile.others() == 0.0


def test_the_large_batch_is_the_one_of_the_goal():
    batch = batches.rows(256, patches=1)
    text = sum(row.nbytes for name in batches.TEXT for row in batch.ragged[name])
    images = 256 * int(np.prod(batches.IMAGE)) * 4
    assert (text + images) / 1e6 == pytest.approx(158, abs=1)
    assert len(batches.TEXT) + 1 == 6


def test_samples_are_known_again_by_their_numbers():
    batch = batches.rows(3, images=True)
    batch.number(10)
    assert [row[0] for row in batch.ragged["tokens"]] == [10, 11, 12]
    assert batch.images is not None
    assert batch.images[:, 0, 0, 0].tolist() == [10.0, 11.0, 12.0]
    assert batch.nbytes == sum(np.concatenate(column).nbytes for column in batch.fields().values())


class Column:
    def __init__(self, rows: list[np.ndarray]) -> None:
        self.values = np.concatenate(rows)
        self.offsets = np.cumsum([0, *(len(row) for row in rows)])


@pytest.mark.parametrize("field", ["tokens", "advantages", "pixel_values"])
def test_a_store_that_gives_back_other_values_is_not_measured(field: str):
    batch = batches.rows(2, images=True)
    columns = {name: Column(list(column)) for name, column in batch.fields().items()}
    store._compare(columns, batch, whole=True)
    columns[field].values.reshape(-1)[-1] += 1
    with pytest.raises(RuntimeError, match="other values"):
        store._compare(columns, batch, whole=True)


def test_an_older_round_of_the_same_batch_is_noticed_in_every_round():
    batch = batches.rows(2, images=True)
    batch.number(0)
    columns = {name: Column([row.copy() for row in column]) for name, column in batch.fields().items()}
    batch.number(2)
    with pytest.raises(RuntimeError, match="tokens, pixel_values"):
        store._compare(columns, batch, whole=False)


def test_parts_of_messages_are_counted_for_every_way_to_send():
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        push.bind("inproc://parts")
        pull.connect("inproc://parts")
        with encoding.sent_messages() as messages:
            push.send_multipart([b"head", np.zeros(100, np.uint8)], copy=False)
            push.send(b"one", zmq.SNDMORE)
            push.send(b"and two")
            push.send(b"alone")
        push.send(b"not counted")
    assert messages == [[4, 100], [3, 7], [5]]


def test_a_peer_without_its_environment_is_skipped_with_one_line(some_sides, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sides, "PEERS_PYTHON", tmp_path / "nothing" / "python")
    assert some_sides.transfer_queue() is None
    assert some_sides.transfer_queue_guest() is None
    assert some_sides.transfer_queue() is None
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["skipped"] == sides.TRANSFER_QUEUE
    assert "make bench-peers" in json.loads(line)["why"]


def test_redis_is_skipped_with_one_line_where_it_is_not_installed(some_sides, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert some_sides.redis() is None
    assert some_sides.redis() is None
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "skipped": "Redis",
        "why": "redis-server is not installed; the system's package manager has it",
    }


def test_the_peers_are_pinned_alike_with_the_workspace():
    folder = BENCHMARKS / "queue_sides"
    pinned = dict(line.split("==") for line in (folder / "requirements.txt").read_text().splitlines())
    asked = [line for line in (folder / "requirements.in").read_text().splitlines() if "==" in line]
    assert asked
    assert dict(line.split("==") for line in asked).items() <= pinned.items()
    assert f"transferqueue {pinned['transferqueue']}" == sides.TRANSFER_QUEUE
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    for constraint in workspace["constraint-dependencies"]:
        name, version = constraint.split("==")
        assert pinned.get(name, version) == version, name
