"""Memory that stays free goes back to the system, so that a burst does not hold it for ever."""

from collections.abc import Callable
from typing import Protocol

from .blocks import Grant
from .memory import Memory
from .timers import Timers

_WINDOW = 20.0  # seconds in which memory must have been free all the time
_KEPT = 256 << 20  # bytes that are kept whatever was used
_PIECE = 64 << 20  # bytes that a unit gives back in one go


class Punching(Protocol):
    """Who gives pages back."""

    def punch(self, arena: int, start: int, stop: int, done: Callable[[str], None]) -> bool: ...


class Reclaim:
    """Looks now and then how much of the memory was free since the last look.

    What is free between two bursts is taken again by the next: only bytes that were free all through a window
    are surplus, as far as they exceed half of what was used at most in this window and the one before.

    Args:
        window: seconds.
        kept: bytes that are never given back.
    """

    def __init__(
        self,
        memory: Memory,
        units: Punching,
        timers: Timers,
        *,
        window: float = _WINDOW,
        kept: int = _KEPT,
    ) -> None:
        self._memory = memory
        self._units = units
        self._timers = timers
        self._window = window
        self._kept = kept
        self._before = 0
        self._look_again()

    def _look_again(self) -> None:
        memory = self._memory
        memory.least_idle, memory.most_taken = memory.idle, memory.capacity - memory.free
        self._timers.at(self._timers.now() + self._window, self._look)

    def _look(self) -> None:
        memory = self._memory
        kept = max(self._kept, max(self._before, memory.most_taken) // 2)
        self._before = memory.most_taken
        surplus = memory.least_idle - kept
        if surplus > 0:
            for grant in memory.surplus(surplus, _PIECE):

                def done(error: str, grant: Grant = grant) -> None:
                    memory.hollow(grant)  # also after an error: who is gone may have done it

                if not self._units.punch(grant.arena, grant.start, grant.stop, done):
                    memory.end(grant)
        self._look_again()
