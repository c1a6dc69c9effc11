"""A process in a role: what `weights_sides/worker.py` is told, as calls."""

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from measure.child import Child
from measure.cpu_clock import cpu_seconds

ANSWER_SECONDS = 120.0


class Worker:
    """A process while it is in one role. `Sides.workers` makes them.

    Attributes:
        pid: of the process.
        lives: False once it was killed.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid
        self.lives = True

    def ask(self, what: str, **words: Any) -> dict[str, Any]:
        """Do something in the role, and wait for it."""
        self.tell(what, **words)
        return self.answer()

    def tell(self, what: str, **words: Any) -> None:
        """Begin something; `answer` then waits for it."""
        self._child.tell(do="call", what=what, **words)

    def answer(self) -> dict[str, Any]:
        """Wait for what was begun. Raises `ChildError` when the process failed."""
        return self._child.answer(ANSWER_SECONDS)

    def kill(self) -> None:
        """Kill the process, as the system does when memory is short."""
        self.lives = False
        os.kill(self.pid, signal.SIGKILL)

    def open(self, role: str, words: Mapping[str, Any]) -> None:
        """Begin to take a role."""
        self._child.tell(do="open", role=role, **words)

    def opened(self) -> None:
        """Wait until it has been taken."""
        self._child.answer(ANSWER_SECONDS)

    def leave(self) -> None:
        """Begin to give the role up."""
        self._child.tell(do="close")

    def left(self) -> Child:
        """Wait until it has been given up; the process, for another role."""
        self._child.answer(ANSWER_SECONDS)
        return self._child


def together(workers: Sequence[Worker], what: str, **words: Any) -> list[dict[str, Any]]:
    """Ask the same of all of them at once, and wait for every answer."""
    for worker in workers:
        worker.tell(what, **words)
    return [worker.answer() for worker in workers]


def spent(workers: Sequence[Worker]) -> float:
    """CPU-seconds of their processes so far."""
    return cpu_seconds(worker.pid for worker in workers)
