"""The thread behind `Subscriber.follow`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dcs.appliers.version import Applied
from dcs.arguments import require_timeout, require_whole
from dcs.errors import ApplyFailed, Closed, DcsError, LayoutMismatch, Timeout
from dcs.interruptible import Condition

if TYPE_CHECKING:
    from dcs.staged import Staged
    from dcs.subscriber import Subscriber

_ASK_SECONDS = 60.0


class Follower:
    """Applies every newest version until its subscriber is closed.

    Attributes:
        version: the version applied last; `after` before the first.
        error: why it ended, or `LayoutMismatch` while it waits for a publisher whose layout fits; or None.
    """

    def __init__(self, subscriber: Subscriber, apply: Callable[[Staged], None], after: int) -> None:
        self.version = after
        self.error: DcsError | None = None
        self._subscriber = subscriber
        self._apply = apply
        self._changed = Condition()
        self._thread = threading.Thread(target=self._run, name="dcs-follow", daemon=True)

    def start(self) -> None:
        """Called by `Subscriber.follow`."""
        self._thread.start()

    def wait_for(self, version: int, timeout: float) -> int:
        """Wait until `version` or a newer one is applied and return it; raises `Timeout`, or `error`."""
        version, within = require_whole(version, "version", -math.inf), require_timeout(timeout)
        with self._changed:
            self._changed.wait_for(lambda: self.version >= version or self.error, within)
            if self.version >= version:
                return self.version
            if self.error is not None:
                raise self.error
        raise Timeout(
            f"version {version} was not applied within {timeout} s; the newest applied is {self.version}"
        )

    def join(self, timeout: float | None) -> None:
        """Wait for the thread to end (from `apply` itself: does nothing)."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout)

    def is_here(self) -> bool:
        """Whether the caller is its thread."""
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        # What is told when `apply` ends the thread itself, as with sys.exit().
        error: DcsError | None = ApplyFailed("the function given to follow has ended its thread")
        try:
            while True:
                try:
                    staged = self._subscriber.next(self.version, _ASK_SECONDS)
                except LayoutMismatch as unfit:
                    self._tell(unfit)
                    self._subscriber.await_fitting()
                    self._tell(None)
                    continue
                if staged is not None:
                    self._take(staged)
        except Closed:
            error = None
        except DcsError as known:
            error = known
        finally:
            if error is not None:
                self._end(error)

    def _end(self, error: DcsError) -> None:
        self._subscriber.fail(error)
        self._tell(error)

    def _tell(self, error: DcsError | None) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _take(self, staged: Staged) -> None:
        began = time.monotonic()
        try:
            self._apply(staged)
        except Exception as cause:
            error = ApplyFailed(
                f"applying version {staged.version} raised {cause!r}; this engine is unusable"
            )
            raise error from cause
        applied = getattr(self._apply, "last", None)
        known = isinstance(applied, Applied)  # what dcs.appliers say of the newest version
        staged.ack(applied.pause_seconds if known else time.monotonic() - began)
        with self._changed:
            self.version = staged.version
            self._changed.notify_all()
