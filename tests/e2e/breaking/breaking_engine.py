"""The `transformers` engine, made to fail at a decode step: its compute thread ends, or stands still."""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from relax.backends.inference.schedule import Decode
from relax.backends.inference.transformers_engine import TransformersEngine


@dataclass
class Plan:
    """What is to go wrong: (kind, decode steps of one engine before it); the first that is due, in order."""

    faults: deque[tuple[str, int]] = field(default_factory=deque)
    made: int = 0
    """Engines that were built."""


PLAN = Plan()


class BreakingEngine(TransformersEngine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._go_on = threading.Event()
        self._decoded = 0
        PLAN.made += 1
        super().__init__(*args, **kwargs)

    def _perform(self, action: Any) -> None:
        if isinstance(action, Decode):
            self._decoded += 1
            if PLAN.faults and self._decoded > PLAN.faults[0][1]:
                self._decoded = 0
                kind, _ = PLAN.faults.popleft()
                if kind == "dies":
                    raise RuntimeError("made to fail")
                self._go_on.wait()  # it answers, and does not get on
        super()._perform(action)

    async def close(self) -> None:
        self._go_on.set()
        await super().close()
