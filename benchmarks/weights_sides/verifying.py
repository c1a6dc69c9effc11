"""What verifying costs, measured where it happens."""

import time
from collections.abc import Callable
from typing import Any

import xxhash


class Verifying:
    """Measures every xxh3-64 of this process from now on, by the clock of the thread that computes it.

    Both of xxhash's ways are replaced, the one-shot function and the object, where they are looked up in the
    module; a benchmark that then finds nothing measured has to say so.

    Attributes:
        on: whether to measure. Reading that clock is a system call, and measuring costs as much as a third of
            a chunk's hash: what is said to cost nothing must not be measured meanwhile.
    """

    def __init__(self) -> None:
        self.on = True
        self._spent: list[float] = []  # appended to by many threads, which a list allows
        make = xxhash.xxh3_64
        xxhash.xxh3_64_intdigest = self._measured(xxhash.xxh3_64_intdigest)
        xxhash.xxh3_64 = lambda *arguments, **options: _Measured(make(*arguments, **options), self._measured)

    @property
    def seconds(self) -> float:
        """CPU-seconds so far."""
        return sum(self._spent)

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:
            if not self.on:
                return call(*arguments, **options)
            begun = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                self._spent.append(time.thread_time() - begun)

        return measured


class _Measured:
    """A hash object whose `update` is measured; the rest of it costs nothing."""

    def __init__(self, made: Any, measured: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._made = made
        self.update = measured(made.update)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)
