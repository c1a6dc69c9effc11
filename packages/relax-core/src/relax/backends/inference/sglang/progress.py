"""Whether a server that has requests gets on: what it says of its load, and since when that stands still."""

import asyncio
import time

from relax.backends.inference.sglang.client import Load


class Progress:
    """Bookkeeping of one engine; made on its event loop.

    Attributes:
        load: what the server has said last.
        generated: tokens that have come from it.
        busy: set while there are requests.
    """

    def __init__(self) -> None:
        self.load = Load(0, 0, 0, 0, 0)
        self.generated = 0
        self.busy = asyncio.Event()
        self._prefills = 0
        self._busy_seconds = 0.0
        self._busy_since: float | None = None
        self._moved = time.monotonic()

    @property
    def steps(self) -> int:
        """Decode steps, and looks since which it has read prompts: this only grows while it works."""
        return self.load.decode_steps + self._prefills

    @property
    def busy_seconds(self) -> float:
        """For how long it has had requests, added up."""
        now = time.monotonic()
        return self._busy_seconds + (0.0 if self._busy_since is None else now - self._busy_since)

    @property
    def still_seconds(self) -> float:
        """Since it has got on last."""
        return time.monotonic() - self._moved

    def moved(self) -> None:
        """It has got on."""
        self._moved = time.monotonic()

    def came(self, tokens: int) -> None:
        """So many tokens have come. None is no progress: it may say again and again that there is nothing."""
        self.generated += tokens
        if tokens:
            self.moved()

    def note_load(self, load: Load) -> None:
        """It has said how it fares."""
        before, self.load = self.load, load
        self._prefills += load.prefilled != before.prefilled
        if (load.prefilled, load.decode_steps, load.decoded) != (
            before.prefilled,
            before.decode_steps,
            before.decoded,
        ):
            self.moved()

    def note_requests(self, there: bool) -> None:
        """Requests have come or gone, and whether there are any now."""
        now = time.monotonic()
        if there and self._busy_since is None:
            self._busy_since = self._moved = now
            self.busy.set()
        elif not there and self._busy_since is not None:
            self._busy_seconds += now - self._busy_since
            self._busy_since = None
            self.busy.clear()
