"""Callbacks by time."""

import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

_FEW = 64


class Timers:
    """None is ever taken back. A callback checks for itself whether it still matters; those that say so
    beside it are thrown out when they no longer do, so that a day's deadline of a request long answered is
    not kept.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None], Callable[[], bool] | None]] = []
        self._numbers = count()
        self._sweep_at = _FEW

    def at(
        self, when: float, callback: Callable[[], None], matters: Callable[[], bool] | None = None
    ) -> None:
        """Calls `callback` once `when`, in monotonic seconds, has come, unless it no longer `matters`."""
        heappush(self._heap, (when, next(self._numbers), callback, matters))
        if len(self._heap) >= self._sweep_at:
            self._heap = [timer for timer in self._heap if timer[3] is None or timer[3]()]
            heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _FEW

    @staticmethod
    def now() -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def run(self, now: float) -> bool:
        """Calls what has become due; returns whether anything had."""
        ran = False
        while self._heap and self._heap[0][0] <= now:
            _, _, callback, matters = heappop(self._heap)
            if matters is None or matters():
                callback()
                ran = True
        return ran

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None
