"""What roles report while they work, on its way to the display, the metric files and the accounting."""

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["step", "rollout", "event", "sample"]


@dataclass(frozen=True)
class Report:
    """One thing a role says.

    `step`: metrics of an optimizer step. `rollout`: counters of generation so far. `event`: something that
    happened (a phase began, a group was dropped). `sample`: a sample worth showing.
    """

    kind: Kind
    role: str
    data: dict[str, Any]


@dataclass
class Reports:
    """A role's outbox; written by the role, drained by whoever supervises it. Safe from any thread."""

    role: str
    _waiting: list[Report] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: Kind, **data: Any) -> None:
        with self._lock:
            self._waiting.append(Report(kind, self.role, data))

    def drain(self) -> list[Report]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting
