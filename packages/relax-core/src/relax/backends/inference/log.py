"""The decisions of an engine, in order: recorded as they are taken, and followed in a replay.

An event is plain JSON data:
    ["admit", [request ids]]    prefilled together, in this order; each sampled its first token
    ["decode", count]           that many decode steps in a row
    ["commit", version]         the version was copied in, KV of everything running was recomputed
    ["abort", request id]       the request was ended early
Requests' tokens and seeds and the weights of a version are not in the log: a replay is given the same ones.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

Event = list[Any]


class EngineLog:
    """Events of one engine. Written by its compute thread, read from any."""

    def __init__(self, events: Iterable[Sequence[Any]] = ()) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = [list(event) for event in events]

    def admit(self, ids: Sequence[str]) -> None:
        self._append(["admit", list(ids)])

    def decode(self) -> None:
        """One more decode step; consecutive ones share an event."""
        with self._lock:
            if self._events and self._events[-1][0] == "decode":
                self._events[-1][1] += 1
            else:
                self._events.append(["decode", 1])

    def commit(self, version: int) -> None:
        self._append(["commit", version])

    def abort(self, request_id: str) -> None:
        self._append(["abort", request_id])

    def events(self) -> list[Event]:
        """A copy of what is held."""
        with self._lock:
            return [list(event) for event in self._events]

    def take(self) -> list[Event]:
        """What was recorded since the last call, no longer held then: a long run writes it piecewise."""
        with self._lock:
            taken, self._events = self._events, []
            return taken

    def _append(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
