"""Threads in which media are decoded, so that a long video holds up neither other episodes nor engines."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from omni_processor import Sample, cancellable

THREADS = min(8, os.cpu_count() or 1)
"""Items that are decoded at once. FFmpeg and torch let go of the interpreter meanwhile."""

CLOSE_SECONDS = 60.0
"""In which work that was given up has reached its next frame."""


class Decoding:
    """Threads of its own: asyncio's are held for half a minute at a time by those who wait for weights."""

    def __init__(self, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, "decoding")
        self._running: dict[Future[Sample], threading.Event] = {}

    async def run(self, encode: Callable[[], Sample]) -> Sample:
        """What `encode` gives, called in a thread.

        When this is cancelled, so is the work: it is not begun, or ends at its next frame.

        Raises: what `encode` does.
        """
        cancelled = threading.Event()

        def work() -> Sample:
            with cancellable(cancelled):
                return encode()

        future = self._pool.submit(work)
        self._running[future] = cancelled
        try:
            return await asyncio.wrap_future(future)
        finally:
            cancelled.set()
            for ended in [future for future in self._running if future.done()]:
                del self._running[ended]

    async def close(self) -> None:
        """Give up what is running, and see it end. Idempotent.

        Raises:
            TimeoutError: something does not.
        """
        for cancelled in self._running.values():
            cancelled.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        ending = asyncio.gather(*map(asyncio.wrap_future, self._running), return_exceptions=True)
        self._running.clear()
        try:
            await asyncio.wait_for(ending, CLOSE_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(
                f"media were still being decoded {CLOSE_SECONDS:g} s after that was given up: one frame of "
                "them takes so long"
            ) from error
        self._pool.shutdown(wait=True)
