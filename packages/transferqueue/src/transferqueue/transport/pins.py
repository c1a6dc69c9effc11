"""Which blocks this client looks at."""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np

_TELL_BYTES = 1 << 20  # let go of since the controller last heard, above which it is told at once
_TELL_BLOCKS = 64


class Pins:
    """Counts, for every block, the replies that named it and whose views are still alive.

    `received` counts up where a reply arrives, `hold` counts down when the last view of an array is gone.
    Finalizers run in any thread at any moment, so `let_go` takes no lock: it leaves the numbers for `taken`,
    which the owner of the connection calls before it sends. Only when much has been let go it is told to
    send.

    Attributes:
        notify: called when what was let go should be told at once; it must not block. Set by the
            connection's owner.
        eager: everything should be told at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[int] = Counter()
        self._released: deque[int] = deque()
        self._untold_bytes = 0
        self._writing: set[int] = set()
        self.notify: Callable[[], None] | None = None
        self.eager = False

    def received(self, blocks: Iterable[int]) -> None:
        """A reply has named these blocks."""
        with self._lock:
            self._counts.update(blocks)

    def hold(self, block: int, base: np.ndarray) -> None:
        """Lets go of one count of the block when `base` and every view of it are gone."""
        weakref.finalize(base, self._gone, block, base.nbytes).atexit = False

    def writing(self, place: np.ndarray) -> None:
        """Something is laid out at `place`, memory that must not be given to others before it is gone."""
        key = id(place)
        self._writing.add(key)
        weakref.finalize(place, self._written, key).atexit = False

    def _written(self, key: int) -> None:
        self._writing.discard(key)
        if self.eager and self.notify is not None:
            self.notify()

    @property
    def any(self) -> bool:
        """Whether this client looks at anything, as far as the controller was told, or writes."""
        return bool(self._counts or self._writing)

    @property
    def untold(self) -> bool:
        """Whether something was let go that the controller has not been told."""
        return bool(self._released)

    def _gone(self, block: int, nbytes: int) -> None:
        self._untold_bytes += nbytes
        self.let_go(block)

    def let_go(self, *blocks: int) -> None:
        """Releases one count of each."""
        self._released.extend(blocks)
        if self.eager or self._untold_bytes >= _TELL_BYTES or len(self._released) >= _TELL_BLOCKS:
            self._untold_bytes = 0
            if self.notify is not None:
                self.notify()

    def taken(self) -> list[int]:
        """What was let go since the last call, to be told to the controller. Only one thread calls it at a
        time.
        """
        if not self._released:
            return []
        self._untold_bytes = 0
        blocks: list[int] = []
        while self._released:
            blocks.append(self._released.popleft())
        if blocks:
            with self._lock:
                self._counts.subtract(blocks)
                for block in set(blocks):
                    if not self._counts[block]:
                        del self._counts[block]
        return blocks

    def held(self) -> list[int]:
        """Every count, for a hello that tells the controller all of them."""
        self.taken()
        with self._lock:
            return list(self._counts.elements())
