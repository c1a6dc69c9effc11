"""Where the numbers of a run are kept: JSON lines and TensorBoard events in the run folder."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol


class Sink(Protocol):
    """Takes the metrics of one step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def appended(file: Path) -> IO[str]:
    """A file of lines opened at its end, which begins a line: one that a crash cut short stays by itself."""
    torn = False
    if file.is_file() and file.stat().st_size:
        with file.open("rb") as before:
            before.seek(-1, 2)
            torn = before.read() != b"\n"
    stream = file.open("a", buffering=1)
    if torn:
        stream.write("\n")
    return stream


class JsonLines:
    """One JSON object a line, appended; a line is with the operating system when `write` returns."""

    def __init__(self, file: Path) -> None:
        self._stream: IO[str] = appended(file)

    def write(self, entry: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(entry, separators=(",", ":"), default=str) + "\n")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write({"step": step, **metrics})

    def close(self) -> None:
        self._stream.close()


class TensorBoard:
    """Event files that TensorBoard reads. Written without torch, whose import would cost seconds."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        summary: Any = getattr(summary_pb2, "Summary")()  # noqa: B009 - protobuf makes its classes at import
        for name, value in metrics.items():
            summary.value.add(tag=name, simple_value=value)
        event: Any = getattr(event_pb2, "Event")(wall_time=time.time(), step=step, summary=summary)  # noqa: B009
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()
