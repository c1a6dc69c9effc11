"""A progress bar for the transfers of a subscriber, where there is a terminal to show it on."""

import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol, TextIO

from dcs.introspection.rows import size

_REFRESH_SECONDS = 0.1
_WIDTH = 30


class _Drawn(Protocol):
    """One way to draw a bar."""

    def draw(self, label: str, done: int, total: int) -> None: ...

    def finish(self) -> None: ...


def bar(label: str = "weights", out: TextIO | None = None) -> "TransferBar | None":
    """What to give as `Subscriber(progress=...)`: a bar on a terminal, else None.

    Args:
        label: written before the version.
        out: where to draw; standard error when None. Drawn with rich when that is installed.
    """
    out = sys.stderr if out is None else out
    if out is None or not out.isatty():
        return None
    return TransferBar(label, out)


class TransferBar:
    """Draws the transfer under way, at most ten times a second. May be called from any thread."""

    def __init__(self, label: str, out: TextIO) -> None:
        self._label = label
        self._new: Callable[[], _Drawn] = _rich(out) if find_spec("rich") else lambda: _Line(out)
        self._lock = threading.Lock()
        self._version = -1
        self._drawn: _Drawn | None = None
        self._next = 0.0

    def __call__(self, done_bytes: int, total_bytes: int, version: int) -> None:
        """So much of a version is here."""
        now = time.monotonic()
        with self._lock:
            if self._drawn is not None and version != self._version:
                self._end()
            ended = done_bytes >= total_bytes
            if now < self._next and not ended:
                return
            if self._drawn is None:
                if ended and version == self._version:
                    return  # it was said before
                self._drawn = self._new()
            self._version, self._next = version, now + _REFRESH_SECONDS
            self._drawn.draw(f"{self._label} {version}", done_bytes, total_bytes)
            if ended:
                self._end()

    def close(self) -> None:
        """Leave the bar as it is and go to the next line. May be called twice."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._drawn is not None:
            self._drawn.finish()
        self._drawn, self._next = None, 0.0


class _Line:
    """A line that is written anew; needs nothing."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._began = time.monotonic()

    def draw(self, label: str, done: int, total: int) -> None:
        share = done / total if total else 1.0
        rate = done / max(time.monotonic() - self._began, 1e-3)
        filled = int(share * _WIDTH)
        line = (
            f"{label} [{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%} of {size(total)}, {size(rate)}/s"
        )
        self._out.write(f"\r{line}\x1b[K")
        self._out.flush()

    def finish(self) -> None:
        self._out.write("\n")
        self._out.flush()


def _rich(out: TextIO) -> Callable[[], _Drawn]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    class Quiet(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # a program that is ended in the middle would leave a terminal without one

    class Rich:
        def __init__(self) -> None:
            columns = (
                TextColumn("{task.description}"), BarColumn(_WIDTH), DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
            )  # fmt: skip
            self._progress = Progress(
                *columns,
                console=Quiet(file=out),
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._progress.add_task("")
            self._progress.start()

        def draw(self, label: str, done: int, total: int) -> None:
            self._progress.update(self._task, description=label, completed=done, total=total, refresh=True)

        def finish(self) -> None:
            self._progress.stop()

    return Rich
