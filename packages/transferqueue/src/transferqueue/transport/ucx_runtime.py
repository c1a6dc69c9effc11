"""UCX in this process: one context, and one thread whose event loop runs everything that talks through it.

It is built on the classes beneath ucxx's own asyncio layer. That layer is one for the whole process, so that
a program's own use of it and ours would stop each other, and it wakes up a thousand times a second.
"""

import asyncio
import atexit
import importlib
import importlib.util
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from ..errors import QueueError

_PROGRESS_INTERVAL_MS = 100  # UCX wakes its thread when there is work; this is for a wake-up that is lost
_CLOSE_TIMEOUT = 10.0  # seconds


class UcxUnusable(QueueError):
    """UCX is not installed or does not start here. The message says what to do."""


class Runtime:
    """Owns the event loop, the UCX worker and their threads.

    Attributes:
        api: the module with UCX's classes.
        worker: shared by all endpoints and listeners.
        loop: everything below runs on it.
    """

    def __init__(self) -> None:
        self.api = _library()
        self.loop = asyncio.new_event_loop()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="transferqueue-ucx", daemon=True)
        try:
            self._context = self.api.UCXContext({})
            self.worker = self.api.UCXWorker(
                self._context, enable_delayed_submission=True, enable_python_future=True
            )
            self.worker.start_progress_thread(polling_mode=False, epoll_timeout=_PROGRESS_INTERVAL_MS)
        except (self.api.UCXError, RuntimeError) as error:
            self.loop.close()
            raise UcxUnusable(f"UCX does not start here: {type(error).__name__}: {error}") from error
        self._thread.start()
        self._notifier = threading.Thread(
            target=self._notify, args=(self.worker,), name="transferqueue-ucx-notifier", daemon=True
        )
        self._notifier.start()

    def submit[T](self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Runs a coroutine on the loop. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        """Cancels what runs and stops the threads. Not to be called on the loop."""
        self.submit(self._finish()).result(_CLOSE_TIMEOUT)
        self._stopping.set()
        self.worker.stop_request_notifier_thread()
        self._notifier.join(_CLOSE_TIMEOUT)
        self.worker.stop_progress_thread()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_TIMEOUT)
        self.loop.close()
        del self.worker, self._context

    async def _finish(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        await self.loop.shutdown_default_executor()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def _notify(self, worker: Any) -> None:
        """Tells the loop about requests that UCX has finished, from UCX's progress thread's queue."""
        asyncio.set_event_loop(self.loop)  # the futures it makes are that loop's
        while not self._stopping.is_set():
            worker.populate_python_futures_pool()
            state = worker.wait_request_notifier(period_ns=1_000_000_000)
            if state == self.api.PythonRequestNotifierWaitState.Shutdown:
                break
            if state == self.api.PythonRequestNotifierWaitState.Ready:
                told = threading.Event()
                self.loop.call_soon_threadsafe(_run_notifier, worker, told)
                told.wait(1)
        worker.clear_python_futures_pool()


def _run_notifier(worker: Any, told: threading.Event) -> None:
    try:
        worker.run_request_notifier()
    finally:
        told.set()


def _library() -> Any:
    """UCX's classes.

    Raises:
        UcxUnusable: ucxx is not there or cannot be imported.
    """
    if importlib.util.find_spec("ucxx") is None:
        raise UcxUnusable("ucxx is not installed; pip install relax-transferqueue[ucx]")
    # Read when UCX is loaded. Its warnings belong on stderr, not stdout; ucxx sets variables that UCX calls
    # unused; a unit that restarts gets its port again at once.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_TCP_CM_REUSEADDR", "y")
    os.environ.setdefault("UCXX_LOG_LEVEL", "fatal")  # what it calls errors, peers that leave, is told by us
    try:
        importlib.import_module("ucxx")
        api = importlib.import_module("ucxx._lib.libucxx")
        for name in ("UCXContext", "UCXWorker", "UCXListener", "UCXEndpoint", "UCXError"):
            getattr(api, name)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise UcxUnusable(f"ucxx cannot be used: {type(error).__name__}: {error}") from error
    return api


class _Shared:
    """The runtime of this process, while anyone uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.runtime: Runtime | None = None
        self.users = 0
        self.pid = 0
        self.inherited: list[
            Runtime
        ] = []  # a parent process's: its threads are not here, so it stays as it is

    def close_at_exit(self) -> None:
        """UCX's threads must not outlive the interpreter, also where a program forgot to close."""
        with self.lock:
            runtime, self.runtime = self.runtime, None
        if runtime is not None and self.pid == os.getpid():
            runtime.close()


_shared = _Shared()
atexit.register(_shared.close_at_exit)


def acquire() -> Runtime:
    """The runtime of this process, started by the first who asks. Pair it with `release`.

    Raises:
        UcxUnusable: UCX is not installed or does not start.
    """
    with _shared.lock:
        if _shared.pid not in (0, os.getpid()):
            raise UcxUnusable(
                "UCX was started before this process was forked, and does not survive that; start it "
                "by spawn or forkserver"
            )
        if _shared.runtime is None:
            _shared.runtime, _shared.users, _shared.pid = Runtime(), 0, os.getpid()
        _shared.users += 1
        return _shared.runtime


def release(runtime: Runtime) -> None:
    """Ends one use; the last one closes it. Not to be called on its loop."""
    with _shared.lock:
        if runtime is not _shared.runtime or _shared.pid != os.getpid():
            return
        _shared.users -= 1
        if _shared.users:
            return
        _shared.runtime = None
    runtime.close()
