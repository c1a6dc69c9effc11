"""Files of JSON lines that a crash cut short: what is appended later stays readable."""

import json
from pathlib import Path

import pytest
from relax.distributed.schedule import Record, read
from relax.ops.sinks import JsonLines

WHOLE = '{"event":"start","ordinal":1}\n'


@pytest.mark.parametrize("torn", ['{"event":"sta', "{", '{"event":"\x00\x00', "\x00\x00\x00"])
def test_a_record_goes_on_behind_a_torn_line(tmp_path: Path, torn: str) -> None:
    file = tmp_path / "rollout.jsonl"
    file.write_text(WHOLE + torn)
    assert list(read(file)) == [{"event": "start", "ordinal": 1}]
    for ordinal in (2, 3):  # opened twice: nothing is added to a file that ends in a whole line
        record = Record(file)
        record.write(event="start", ordinal=ordinal)
        record.close()
    assert [entry["ordinal"] for entry in read(file)] == [1, 2, 3]
    assert len(file.read_bytes().split(b"\n")) == 5


def test_bytes_that_are_no_text_are_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "rollout.jsonl"
    file.write_bytes(b"\xff\xfe\x80\n" + WHOLE.encode())
    assert list(read(file)) == [{"event": "start", "ordinal": 1}]


def test_metrics_go_on_behind_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step":0,"lo')
    lines = JsonLines(file)
    lines.step(1, {"loss": 0.5})
    lines.close()
    assert json.loads(file.read_text().splitlines()[1]) == {"step": 1, "loss": 0.5}


def test_a_new_and_an_empty_file_begin_with_their_first_line(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("new", "empty"):
        lines = JsonLines(tmp_path / name)
        lines.write({"a": 1})
        lines.close()
        assert (tmp_path / name).read_text() == '{"a":1}\n'
