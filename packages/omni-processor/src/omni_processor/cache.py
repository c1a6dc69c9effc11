"""A bounded cache of tensorised items by content, so that the n samples of a group decode a picture once."""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from omni_processor import cancellation
from omni_processor.errors import Cancelled
from omni_processor.sample import MediaItem


class ItemCache:
    """Least recently used items up to a number of bytes; thread-safe.

    Threads that ask for the same item at once wait for the first one's work instead of repeating it. A
    failure is raised to all who waited and not remembered; where the first one gave up, another goes on.
    Items are shared, hence their arrays must be read-only.

    Another process, be it forked or given a pickled cache, begins with an empty one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._begin()
        _caches.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._items: OrderedDict[bytes, MediaItem] = OrderedDict()
        self._bytes = 0
        self._running: dict[bytes, Future[MediaItem]] = {}

    def __reduce__(self) -> tuple[type[ItemCache], tuple[int]]:
        return ItemCache, (self._max_bytes,)

    @property
    def nbytes(self) -> int:
        """Bytes held by cached items."""
        return self._bytes

    def get_or_make(self, key: bytes, make: Callable[[], MediaItem]) -> MediaItem:
        """The item of `key`, made now if it is not there; what `make` raises is passed on."""
        while True:
            cancellation.check()
            with self._lock:
                if key in self._items:
                    self._items.move_to_end(key)
                    return self._items[key]
                running = self._running.get(key)
                if running is None:
                    mine: Future[MediaItem] = Future()
                    self._running[key] = mine
                    break
            try:
                return running.result()
            except Cancelled:  # who made it gave up; we may still want it
                continue
        try:
            item = make()
        except BaseException as error:
            # Whoever waits must be told, also of a KeyboardInterrupt; the error goes on to our caller.
            with self._lock:
                del self._running[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._running[key]
            self._store(key, item)
        mine.set_result(item)
        return item

    def _store(self, key: bytes, item: MediaItem) -> None:
        size = _nbytes(item)
        if size > self._max_bytes:
            return
        self._items[key] = item
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self._bytes -= _nbytes(oldest)


_caches: weakref.WeakSet[ItemCache] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a forked child: a lock may be held, and items be in the making, by threads that are not there."""
    for cache in list(_caches):
        cache._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def _nbytes(item: MediaItem) -> int:
    return sum(value.nbytes for value in item.values() if isinstance(value, np.ndarray))
