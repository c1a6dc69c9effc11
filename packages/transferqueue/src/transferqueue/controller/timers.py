"""Callbacks by time."""

import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Timers:
    """A callback checks for itself whether it still matters: none is ever taken back."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Calls `callback` once `when`, in monotonic seconds, has come."""
        heappush(self._heap, (when, next(self._numbers), callback))

    @staticmethod
    def now() -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def run(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            heappop(self._heap)[2]()

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None
