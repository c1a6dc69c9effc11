"""The frame of every benchmark here: one JSON line a claim, under a line about the machine.

    {"machine": {"cores": 2, "cpu": "...", "python": "3.12.1", "torch": "2.14.1", "load": 0.3}}
    {"claim": "...", "value": 17.2, "unit": "s", "goal": "<= 45", "ok": true, "how": "..."}

`goal` and `ok` are null for a figure that is only reported. A missed goal is a result and ends a benchmark
with exit code 0; a benchmark that could not measure raises.
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

# A script's own folder comes first on the path, where queue.py would hide the standard library's.
_FOLDER = str(Path(__file__).parent)
if _FOLDER in sys.path:
    sys.path.remove(_FOLDER)
    sys.path.append(_FOLDER)

BUSY = 0.5
"""Cores that others keep busy, above which a figure says that it was measured under load."""


@dataclass(frozen=True)
class Claim:
    """One figure, with the goal it is held against and how it was measured.

    Attributes:
        claim: what is claimed, in words that stay the same from run to run.
        value: the figure.
        unit: of the value: "s", "CPU-s", "x" for a ratio, "1" for a share.
        goal: such as "<= 45"; None for a figure that is only reported.
        ok: whether the value meets the goal; None without one.
        how: sizes, order of measurement, what was taken as the figure of each side.
    """

    claim: str
    value: float
    unit: str
    goal: str | None
    ok: bool | None
    how: str

    def line(self) -> str:
        """The JSON line; the value rounded to four significant digits."""
        return json.dumps({**asdict(self), "value": _significant(self.value)}, ensure_ascii=False)


def at_most(claim: str, value: float, unit: str, goal: float, how: str) -> Claim:
    """A claim that holds when the value is at or below the goal; NaN never holds."""
    return Claim(claim, value, unit, f"<= {goal:g}", value <= goal, how)


def at_least(claim: str, value: float, unit: str, goal: float, how: str) -> Claim:
    """A claim that holds when the value is at or above the goal; NaN never holds."""
    return Claim(claim, value, unit, f">= {goal:g}", value >= goal, how)


def above(claim: str, value: float, unit: str, goal: float, how: str) -> Claim:
    """A claim that holds when the value is above the goal; NaN never holds."""
    return Claim(claim, value, unit, f"> {goal:g}", value > goal, how)


def figure(claim: str, value: float, unit: str, how: str) -> Claim:
    """A figure without a goal."""
    return Claim(claim, value, unit, None, None, how)


def machine() -> dict[str, Any]:
    """What the figures below it were measured on. `load` is the number of cores in use at this moment."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "load": round(os.getloadavg()[0], 2),
    }


def print_machine(to: IO[str] = sys.stdout) -> None:
    """Print the line that begins every benchmark's output."""
    print(json.dumps({"machine": machine()}), file=to, flush=True)


def print_claim(claim: Claim, to: IO[str] = sys.stdout) -> None:
    """Print one claim as soon as it is known."""
    print(claim.line(), file=to, flush=True)


def median(values: Sequence[float]) -> float:
    """The median.

    Raises:
        ValueError: nothing was measured.
    """
    if not values:
        raise ValueError("no value was measured, so there is no median")
    return statistics.median(values)


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """median(ours) / median(theirs).

    Raises:
        ValueError: a side without values, or a median of theirs that is not above 0.
    """
    of_ours, of_theirs = median(ours), median(theirs)
    if not of_theirs > 0:
        raise ValueError(f"the median to compare with is {of_theirs}; it has to be above 0")
    return of_ours / of_theirs


def load_note(busy: float) -> str:
    """What a `how` says of the cores that others kept busy during the measurement."""
    quiet = f"others used {busy:.2f} cores meanwhile"
    return quiet if busy <= BUSY else f"MEASURED UNDER LOAD: {quiet}"


def _significant(value: float) -> float:
    return float(f"{value:.4g}")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print_machine()
