"""Memory for small puts: taken from slabs that the controller granted in advance."""

import threading
from dataclasses import dataclass

from ..wire.messages import Granted, Range

SMALL = 1 << 18  # bytes of a block; larger ones get memory of their own


@dataclass(slots=True)
class _Slab:
    granted: Granted
    at: int
    under_way: int = 0


class Slabs:
    """The slab at hand, and those that wait for their last put to be answered. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: _Slab | None = None
        self._slabs: dict[int, _Slab] = {}

    def take(self, nbytes: int) -> tuple[Range, int] | None:
        """Room for a block and the unit it is written through; None if a new slab is needed. Every range
        taken has to be given to `done`.
        """
        with self._lock:
            slab = self._current
            if slab is None or slab.at + nbytes > slab.granted.range.stop:
                return None
            whole = slab.granted.range
            where = Range(whole.grant, whole.arena, slab.at, slab.at + nbytes)
            slab.at += nbytes
            slab.under_way += 1
            return where, slab.granted.unit

    def add(self, granted: Granted) -> list[int]:
        """Makes a new slab the one at hand; returns the grants that can be given back."""
        with self._lock:
            before, self._current = self._current, _Slab(granted, granted.range.start)
            self._slabs[granted.range.grant] = self._current
            return [] if before is None else self._finished(before)

    def done(self, where: Range) -> list[int]:
        """A put from a slab is over; returns the grants that can be given back."""
        with self._lock:
            slab = self._slabs.get(where.grant)
            if slab is None:
                return []
            slab.under_way -= 1
            return self._finished(slab)

    def forget(self, grant: int) -> None:
        """The controller does not know this slab (any more)."""
        with self._lock:
            self._slabs.pop(grant, None)
            if self._current is not None and self._current.granted.range.grant == grant:
                self._current = None

    def _finished(self, slab: _Slab) -> list[int]:
        grant = slab.granted.range.grant
        if slab is self._current or slab.under_way or grant not in self._slabs:
            return []
        del self._slabs[grant]
        return [grant]
