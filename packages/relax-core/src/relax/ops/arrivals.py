"""How the versions of a run came into its engines, read from what the engines write down."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from relax.ops.quantities import counted, short_time, size

WIRES = {"shm": "weights/by_shm", "tcp": "weights/by_tcp", "tcp+delta": "weights/by_delta"}
"""The metric that counts the engines which took a version by each wire."""


class Arrivals:
    """Reads the lines that this start of a run adds to `weights.jsonl`.

    An engine writes a version's line before it acknowledges it, and the trainer reports a step after all of
    them have acknowledged the version that the step began with. So the lines of a version are there when its
    step is reported.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_to = file.stat().st_size if file.is_file() else 0
        self._waiting: dict[int, list[dict[str, Any]]] = {}
        self._engines: set[str] = set()
        self._by_wire: Counter[str] = Counter()
        self._versions: set[int] = set()
        self._nbytes = 0
        self._transfer: list[float] = []
        self._pause: list[float] = []

    def metrics(self, version: int) -> dict[str, float]:
        """How a version came: engines by wire, the bytes that all of them together received, and the seconds
        of the slowest engine.
        """
        self._read()
        arrived = self._waiting.get(version, [])
        self._waiting = {later: lines for later, lines in self._waiting.items() if later > version}
        found = dict.fromkeys(WIRES.values(), 0.0)
        for line in arrived:
            found[WIRES[line["wire"]]] += 1
        found["weights/received"] = float(sum(line["received"] for line in arrived))
        for name in ("transfer", "pause"):
            found[f"weights/{name}"] = max((line[f"{name}_seconds"] for line in arrived), default=0.0)
        return found

    @property
    def summary(self) -> str:
        """All of it in one line; empty when no version has come into an engine."""
        self._read()
        if not self._versions:
            return ""
        wires = ", ".join(f"{wire} ({count}x)" for wire, count in self._by_wire.most_common())
        return (
            f"{counted(len(self._versions), 'version')} of {size(self._nbytes)} in "
            f"{counted(len(self._engines), 'engine')} by "
            f"{wires if len(self._by_wire) > 1 else next(iter(self._by_wire))}; transfer "
            f"{short_time(median(self._transfer))}, pause {short_time(median(self._pause))} (medians)"
        )

    def _read(self) -> None:
        if not self._file.is_file():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._read_to)
            new = stream.read()
        new = new[: new.rfind(b"\n") + 1]  # what follows is still being written
        self._read_to += len(new)
        for line in new.splitlines():
            if line:  # an empty one ends what a crash of an earlier start has cut short
                self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        self._waiting.setdefault(line["version"], []).append(line)
        self._engines.add(line["engine"])
        self._versions.add(line["version"])
        self._by_wire[line["wire"]] += 1
        self._nbytes = line["nbytes"]
        self._transfer.append(line["transfer_seconds"])
        self._pause.append(line["pause_seconds"])


def wires(metrics: Mapping[str, float]) -> list[str]:
    """The wires by which a step's version came, the most used first."""
    used = [wire for wire, name in WIRES.items() if metrics.get(name)]
    return sorted(used, key=lambda wire: -metrics[WIRES[wire]])
