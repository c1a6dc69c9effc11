"""What is made of the arrays of an item, once for all requests that share them, and as long as they live."""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

type _Refs = list[weakref.ref[np.ndarray]]


class Shared[T]:
    """Made things by the arrays they were made of. Thread-safe: the requests of a group come at once, each in
    a thread, and all but the first wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, ...], tuple[_Refs, Future[T | None]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, arrays: Sequence[np.ndarray], make: Callable[[], T]) -> T:
        """What `make` gives, or gave of these very arrays before.

        Args:
            arrays: all that it depends on; nobody writes to them.
            make: called by the first. What it raises is raised to that one alone, and the next one tries.
        """
        key = tuple(map(id, arrays))
        while True:
            with self._lock:
                known = self._known.get(key)
                if known is None or any(ref() is not one for ref, one in zip(known[0], arrays, strict=True)):
                    refs = [weakref.ref(one, lambda _, key=key: self._known.pop(key, None)) for one in arrays]
                    mine: Future[T | None] = Future()
                    self._known[key] = refs, mine
                    break
            if (made := known[1].result()) is not None:
                return made
        try:
            made = make()
        except BaseException:
            self._known.pop(key, None)
            mine.set_result(None)
            raise
        mine.set_result(made)
        return made
