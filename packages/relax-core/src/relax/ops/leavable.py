"""Work in a thread that nobody has to wait for: of a start that may be interrupted."""

import asyncio
import threading
from collections.abc import Callable


async def leavable[T](work: Callable[[], T]) -> T:
    """What `work()` returns or raises, as `asyncio.to_thread`; but neither the event loop nor the process
    waits for it when its caller is cancelled. What it holds then ends with the process, so it may hold
    nothing that does not.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(call: Callable[[], None]) -> None:
        if not done.done():
            call()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 - its caller raises it
            raised = error
            tell = lambda: done.set_exception(raised)  # noqa: E731
        else:
            tell = lambda: done.set_result(found)  # noqa: E731
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, tell)

    threading.Thread(target=run, name="relax-start", daemon=True).start()
    return await done
