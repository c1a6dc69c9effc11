"""How versions came into engines, read from a file that others are writing."""

import io
import json
from pathlib import Path

import pytest
from relax.ops.arrivals import Arrivals
from relax.ops.progress import PlainDisplay, RichDisplay
from rich.console import Console


def line(
    engine: int, version: int, wire: str = "shm", received: int = 0, transfer_seconds: float = 0.0012
) -> str:
    entry = {
        "engine": f"engine-{engine}",
        "version": version,
        "wire": wire,
        "nbytes": 2048,
        "received": received,
        "transfer_seconds": transfer_seconds,
        "pause_seconds": 0.25,
    }
    return json.dumps(entry) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "weights.jsonl"


def add(file: Path, text: str) -> None:
    with file.open("a") as stream:
        stream.write(text)


def test_a_version_is_counted_by_wire_whatever_was_written_since(file: Path) -> None:
    arrivals = Arrivals(file)
    add(file, line(0, 4, "tcp", 100, 0.5) + line(1, 4, "tcp+delta", 7) + line(0, 5, "tcp+delta", 9))
    assert arrivals.metrics(4) == {
        "weights/by_shm": 0.0,
        "weights/by_tcp": 1.0,
        "weights/by_delta": 1.0,
        "weights/received": 107.0,
        "weights/transfer": 0.5,
        "weights/pause": 0.25,
    }
    add(file, line(1, 5, "tcp+delta", 1))
    assert arrivals.metrics(5)["weights/by_delta"] == 2.0
    assert arrivals.metrics(5)["weights/by_delta"] == 0.0  # it has been told


def test_a_line_that_is_being_written_is_read_when_it_is_whole(file: Path) -> None:
    arrivals = Arrivals(file)
    whole = line(0, 1)
    add(file, whole[:20])
    assert arrivals.metrics(0)["weights/by_shm"] == 0.0
    add(file, whole[20:])
    assert arrivals.metrics(1)["weights/by_shm"] == 1.0


def test_what_an_earlier_start_wrote_is_not_of_this_one(file: Path) -> None:
    add(file, line(0, 1) + line(1, 1)[:30])  # a crash cut it short; whoever goes on ends the line first
    arrivals = Arrivals(file)
    add(file, "\n" + line(0, 1))
    assert arrivals.metrics(1)["weights/by_shm"] == 1.0


def test_a_summary_says_the_wire_the_transfer_and_the_pause(file: Path) -> None:
    arrivals = Arrivals(file)
    assert arrivals.summary == ""
    add(file, line(0, 0))
    assert arrivals.summary.startswith("1 version of 2 KiB in 1 engine by shm; ")
    add(file, line(1, 0) + line(0, 1) + line(1, 1))
    assert arrivals.summary == (
        "2 versions of 2 KiB in 2 engines by shm; transfer 1.2 ms, pause 250 ms (medians)"
    )
    add(file, line(0, 2, "tcp", 2048))
    assert "by shm (4x), tcp (1x);" in arrivals.summary


METRICS = {
    "reward/mean": 0.5,
    "loss": 0.1,
    "staleness/mean": 1.0,
    "staleness/max": 1.0,
    "perf/tokens_per_second": 1000.0,
    "response/tokens_mean": 16.0,
    "queue/depth": 64.0,
    "queue/payload": 1024.0,
    "queue/waited": 0.0,
    "time/step": 0.2,
    "time/wait": 0.0,
    "time/train": 0.1,
    "time/optim": 0.0,
    "time/publish": 0.1,
    "weights/transfer": 0.0034,
    "weights/pause": 0.0008,
    "weights/by_shm": 0.0,
    "weights/by_tcp": 1.0,
    "weights/by_delta": 3.0,
}


def test_a_step_is_shown_with_the_wires_of_its_weights() -> None:
    shown = io.StringIO()
    display = PlainDisplay(Console(file=shown, width=200), 10)
    display.step(0, METRICS)
    assert "weights tcp+delta and tcp 3.4 ms" in shown.getvalue()


def test_a_live_display_shows_the_wires_and_the_pause() -> None:
    shown = io.StringIO()
    display = RichDisplay(Console(file=shown, width=120), "a run", 10, 0)
    display.step(0, METRICS)
    display.close()
    assert "weights tcp+delta and tcp 3.4 ms, commit pauses decoding for 0.8 ms" in shown.getvalue()
