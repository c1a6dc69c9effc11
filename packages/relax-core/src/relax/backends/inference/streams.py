"""From the compute thread back to event loops: results that are awaited, each on the loop that asked."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from relax.backends.inference.base import FinishedGeneration


class Waiter[T]:
    """One result for one event loop, set from any thread. Made on the loop that awaits it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def set_result(self, value: T) -> None:
        _call(self._loop, self._set, value, None)

    def set_exception(self, error: BaseException) -> None:
        _call(self._loop, self._set, None, error)

    def _set(self, value: Any, error: BaseException | None) -> None:
        if self.future.done():
            return  # cancelled by its caller
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)
            self.future.exception()  # its caller may have stopped waiting


class GenerationStream:
    """The generations of one call, each as it finishes: an async iterator, made on the loop that reads it.

    Left early (`aclose`, or a reader that is cancelled), it aborts what is unfinished.
    """

    def __init__(self, ids: Iterable[str], abort: Callable[[Sequence[str]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._open = dict.fromkeys(ids)
        self._abort = abort
        self._finished: deque[FinishedGeneration] = deque()
        self._error: BaseException | None = None
        self._wake: asyncio.Future[None] | None = None

    def __aiter__(self) -> "GenerationStream":
        return self

    async def __anext__(self) -> FinishedGeneration:
        while not self._finished:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._wake = self._loop.create_future()
            try:
                await self._wake
            except asyncio.CancelledError:
                await self.aclose()
                raise
        return self._finished.popleft()

    async def aclose(self) -> None:
        """Abort what is unfinished and end. Idempotent."""
        rest, self._open = list(self._open), {}
        self._finished.clear()
        if rest:
            self._abort(rest)

    def put(self, finished: Sequence[FinishedGeneration]) -> None:
        """Deliver generations; from any thread."""
        _call(self._loop, self._put, finished)

    def fail(self, error: BaseException) -> None:
        """End with an error, after what was delivered; from any thread."""
        _call(self._loop, self._fail, error)

    def _put(self, finished: Sequence[FinishedGeneration]) -> None:
        for one in finished:
            if one.id in self._open:  # else it was given up
                del self._open[one.id]
                self._finished.append(one)
        self._ring()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._ring()

    def _ring(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *values: Any) -> None:
    if loop.is_closed():
        return  # whoever asked is gone
    try:
        loop.call_soon_threadsafe(function, *values)
    except RuntimeError:
        if not loop.is_closed():  # it closed between the check and the call, or this is another error
            raise
