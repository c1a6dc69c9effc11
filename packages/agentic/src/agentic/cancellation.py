"""Time limits that say which they are, and cleaning up that cancellation does not cut short."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def to_the_end[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end though the caller is cancelled meanwhile; then raise the cancellation.

    The coroutine must bound its own waits.
    """
    running = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            # Unlike `await running`, this leaves it running when we are cancelled.
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if running.cancelled() else running.exception())
    return running.result()


@asynccontextmanager
async def within(seconds: float | None, limit: str, until: float | None = None) -> AsyncIterator[None]:
    """A time limit, None for none, whose TimeoutError names it. One raised inside passes as it is.

    Args:
        seconds: how long it is.
        limit: its name.
        until: when it is over, in the loop's time, if it began before.
    """
    scope = asyncio.timeout(seconds) if until is None else asyncio.timeout_at(until)
    try:
        async with scope:
            yield
    except TimeoutError as error:
        if scope.expired():
            raise TimeoutError(f"{limit} = {seconds} s passed") from error
        raise
