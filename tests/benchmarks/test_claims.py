import io
import json
import math
import subprocess
import sys
from pathlib import Path

import claims  # pyright: ignore[reportMissingImports] - see conftest
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("claim", "ok"),
    [
        (claims.at_most("c", 0.5, "x", 0.5, "h"), True),
        (claims.at_most("c", 0.51, "x", 0.5, "h"), False),
        (claims.at_most("c", math.nan, "x", 0.5, "h"), False),
        (claims.at_least("c", 0.99, "1", 0.99, "h"), True),
        (claims.at_least("c", math.nan, "1", 0.99, "h"), False),
        (claims.above("c", 0.95, "1", 0.95, "h"), False),
        (claims.above("c", 0.96, "1", 0.95, "h"), True),
        (claims.figure("c", 7.0, "s", "h"), None),
    ],
)
def test_a_claim_holds_exactly_when_its_value_meets_its_goal(claim: claims.Claim, ok: bool | None):
    assert claim.ok is ok
    assert (claim.goal is None) == (ok is None)


def test_a_claim_prints_as_one_json_line_with_the_agreed_keys():
    out = io.StringIO()
    claims.print_claim(claims.at_most("start-up", 12.34567, "s", 45, "command to first step"), out)
    line = out.getvalue()
    assert line.count("\n") == 1
    assert json.loads(line) == {
        "claim": "start-up",
        "value": 12.35,
        "unit": "s",
        "goal": "<= 45",
        "ok": True,
        "how": "command to first step",
    }


def test_rounding_of_the_shown_value_does_not_decide_the_claim():
    claim = claims.at_most("c", 0.50001, "x", 0.5, "h")
    assert json.loads(claim.line())["value"] == 0.5
    assert claim.ok is False


def test_the_ratio_compares_medians_not_means():
    assert claims.ratio_of_medians([1.0, 1.0, 100.0], [2.0, 2.0, 2.0]) == 0.5


def test_nothing_measured_is_an_error_not_a_number():
    with pytest.raises(ValueError, match="no value was measured"):
        claims.median([])
    with pytest.raises(ValueError, match="above 0"):
        claims.ratio_of_medians([1.0], [0.0])


def test_a_loaded_machine_is_named_in_how():
    assert "UNDER LOAD" in claims.load_note(1.2)
    assert "UNDER LOAD" not in claims.load_note(0.1)


def test_the_frame_itself_runs_as_a_script_and_prints_the_machine():
    # `make bench` runs every file of the folder, this one first.
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "claims.py"), "--quick"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (line,) = done.stdout.splitlines()
    machine = json.loads(line)["machine"]
    assert machine["cores"] >= 1
    assert machine["python"] == ".".join(map(str, sys.version_info[:3]))
