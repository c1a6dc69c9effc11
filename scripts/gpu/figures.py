"""What a GPU check prints: a JSON line a figure, and in the end a summary."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Figures:
    """All figures of one check, printed as they come.

    Attributes:
        failed: claims that did not hold.
        count: figures so far that say something.
        moot: figures that say nothing here.
    """

    failed: list[str] = field(default_factory=list)
    count: int = 0
    moot: int = 0

    def add(self, claim: str, value: Any, unit: str, goal: str, ok: bool | None, how: str) -> None:
        """`goal` in words; "" for a figure that is only reported. `ok` is None where the goal says nothing on
        this machine, and `how` says why.
        """
        if isinstance(value, float):
            value = round(value, 4)
        line = {"claim": claim, "value": value, "unit": unit, "goal": goal, "ok": ok, "how": how}
        print(json.dumps(line), flush=True)
        if ok is None:
            self.moot += 1
            return
        self.count += 1
        if not ok:
            self.failed.append(claim)

    def run(self, name: str, check: Callable[["Figures"], None]) -> None:
        """A check that raises is a figure that failed; the others still run."""
        try:
            check(self)
        except Exception as error:  # noqa: BLE001  the boundary of a check: whatever it is, it is reported
            self.add(name, None, "", "no error", False, f"{type(error).__name__}: {error}")

    def summary(self) -> int:
        """Prints it and returns the exit status."""
        held = self.count - len(self.failed)
        print(
            f"{held} of {self.count} figures hold"
            + (f", {self.moot} say nothing on this machine" if self.moot else "")
            + "".join(f"\n  FAILED: {claim}" for claim in self.failed)
        )
        return 1 if self.failed else 0


def median_seconds(once: Callable[[], object], repeats: int = 5) -> float:
    """Of a call that returns when its work is done; the first, which warms up, is not counted."""
    once()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        once()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
