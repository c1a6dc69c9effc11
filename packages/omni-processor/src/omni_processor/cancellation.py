"""Work that nobody waits for any more ends at its next frame, packet or block, instead of running on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from omni_processor.errors import Cancelled

_event: ContextVar[threading.Event | None] = ContextVar("omni_processor.cancelled", default=None)


@contextmanager
def cancellable(cancelled: threading.Event) -> Iterator[None]:
    """Calls of a processor inside the block raise `Cancelled` soon after the event is set.

    Decoding a long video takes minutes, and a thread cannot be ended from outside. Within one frame or one
    packet nothing looks at the event.
    """
    token = _event.set(cancelled)
    try:
        yield
    finally:
        _event.reset(token)


def check() -> None:
    """Raises: Cancelled, if the event of the innermost `cancellable` block is set."""
    event = _event.get()
    if event is not None and event.is_set():
        raise Cancelled("the work was given up before it was done: nobody waits for it any more")
