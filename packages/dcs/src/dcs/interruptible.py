"""A condition whose lock is let go of, once, whatever a signal handler raises.

`with` on a `threading.Condition` calls methods written in Python, and Ctrl-C may come at the first
instruction of the one that releases the lock: it is never released then, and `close` waits for ever for a
thread that wants it. A lock's own methods are C, in which no handler runs.
"""

import operator
import threading
from typing import TYPE_CHECKING, Protocol


class _Owned(Protocol):
    def _is_owned(self) -> bool: ...

    def acquire(self) -> bool: ...


class Condition(threading.Condition):
    """The same otherwise; its lock has to be one that knows its owner, as that of its own does."""

    if not TYPE_CHECKING:
        # `with` looks both up before it calls the first, so that what it calls are the lock's.
        __enter__ = property(operator.attrgetter("_lock.__enter__"))
        __exit__ = property(operator.attrgetter("_lock.__exit__"))

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Condition.wait`; interrupted, too, it returns with the lock held."""
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._lock._is_owned():  # between its release and the wait
                self._lock.acquire()
            raise

    if TYPE_CHECKING:
        _lock: "_Owned"
