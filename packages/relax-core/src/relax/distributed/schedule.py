"""The record of a run's scheduling decisions, enough to replay it bit for bit.

One JSON line a decision, appended when it is taken: `rollout.jsonl` says which group was started for which
step, which replica it was placed on, and which of its requests went elsewhere; `actor.jsonl` which groups
each step trained, in which order; `engine-N.jsonl` what each engine admitted, decoded and committed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from relax.ops.sinks import appended


class Record:
    """An append-only file of JSON lines; a line is with the operating system when `write` returns."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stream: IO[str] = appended(file)

    def write(self, **entry: Any) -> None:
        self._stream.write(json.dumps(entry, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._stream.close()


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record. One cut short by a crash is left out, also where a later start went on."""
    if not file.is_file():
        return
    with file.open("rb") as stream:
        for line in stream:
            try:
                yield json.loads(line)
            except ValueError:  # no beginning of a JSON object is JSON, so this is how a torn line shows
                continue


def placements(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Where a recorded run placed its groups, by the names they have in requests, and those single requests
    that went elsewhere than their group: name -> replica.
    """
    groups: dict[str, str] = {}
    requests: dict[str, str] = {}
    for entry in read(file):
        match entry["event"]:
            case "place" if "ordinal" in entry:
                groups[f"{entry['ordinal']:08d}"] = entry["replica"]
            case "place":
                requests[entry["request"]] = entry["replica"]
            case "start" if "replica" in entry:  # as an earlier relax recorded it
                groups[f"{entry['ordinal']:08d}"] = entry["replica"]
    return groups, requests


def losses(file: Path) -> list[str]:
    """The engines that a recorded run lost, in order."""
    return [entry["engine"] for entry in read(file) if entry["event"] == "engine lost"]
