"""Child processes that run a function which may hang or crash, under a deadline for each call.

The pool works from any event loop and any thread: each child is driven by a thread of the pool, which waits
on pipes with a deadline. A child that is late or broken is killed, and the next call starts a fresh one.
"""

import asyncio
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relax.engine.rewards.base import RewardError
from relax.engine.rewards.frames import HEADER, READY, decode, encode

_END_SECONDS = 2.0
_KILL_SECONDS = 10.0


class WorkerTimeout(Exception):
    """The call took longer than its timeout; its child was killed."""


class WorkerDied(Exception):
    """The child ended during the call; its traceback is on the standard error it shares with this process."""


class WorkerPool:
    """Runs `target` (plain data -> plain data) in child processes.

    Args:
        target: "module:function", imported in the child only.
        workers: most children at once. They start when first needed.
        timeout: seconds of one call, from when a child takes it; waiting for a free child is not counted.
        start_timeout: seconds a child may take to start and import the target.
        memory_bytes: address space of a child.
    """

    def __init__(
        self,
        target: str,
        *,
        workers: int,
        timeout: float,
        start_timeout: float = 60.0,
        memory_bytes: int = 2 << 30,
    ) -> None:
        self._target = target
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._memory_bytes = memory_bytes
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward-worker")
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._closed = False

    async def call(self, request: Any) -> Any:
        """target(request), run in a child.

        Raises:
            WorkerTimeout: it took too long.
            WorkerDied: the child ended.
            RewardError: the pool is closed, or a child cannot start.
        """
        message = encode([self._timeout, request])
        with self._lock:
            if self._closed:
                raise self._closed_error()
            answer = self._threads.submit(self._run, message)
        return await asyncio.wrap_future(answer)

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that are alive."""
        with self._lock:
            return [child.pid for child in self._all]

    def close(self) -> None:
        """Kill the children and join the threads. Calls under way raise. Idempotent."""
        with self._lock:
            self._closed = True
            for child in self._all:
                child.kill()
        self._threads.shutdown(wait=True)
        for child in list(self._all):
            self._discard(child)

    def _run(self, message: bytes) -> Any:
        child = self._take()
        try:
            answer = child.ask(message, self._timeout)
        except TimeoutError:
            self._discard(child)
            raise WorkerTimeout(
                f"{self._target} took longer than {self._timeout:g} s and was killed"
            ) from None
        except _Ended:
            status = self._discard(child, ending=True)
            if self._closed:
                raise self._closed_error() from None
            raise WorkerDied(f"the process of {self._target} ended with status {status}") from None
        with self._lock:
            self._idle.append(child)
        return answer

    def _take(self) -> "_Child":
        with self._lock:
            if self._closed:
                raise self._closed_error()
            if self._idle:
                return self._idle.pop()
            child = _Child(self._target, self._memory_bytes)
            self._all.add(child)
        try:
            ready = child.receive(time.monotonic() + self._start_timeout)
        except (TimeoutError, _Ended) as error:
            late = isinstance(error, TimeoutError)
            status = self._discard(child, ending=not late)
            if self._closed:
                raise self._closed_error() from None
            what = f"was not ready after {self._start_timeout:g} s" if late else f"ended with status {status}"
            raise RewardError(
                f"the worker process for {self._target} {what} while starting: see its traceback on standard "
                "error; is the package it needs installed?"
            ) from None
        assert ready == READY, ready
        return child

    def _discard(self, child: "_Child", *, ending: bool = False) -> int:
        with self._lock:
            self._all.discard(child)
            if child in self._idle:
                self._idle.remove(child)
        return child.close(ending=ending)

    def _closed_error(self) -> RewardError:
        return RewardError(f"the worker pool of {self._target} is closed: build the reward anew")


class _Ended(Exception):
    """The child closed its pipe."""


class _Child:
    """One child process and the pipes to it. Driven by one thread; others may call `kill` only."""

    def __init__(self, target: str, memory_bytes: int) -> None:
        # A session of its own keeps the terminal's Ctrl-C away: the parent decides when it ends.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relax.engine.rewards.worker", target, str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._in_fd, self._out_fd = self._in.fileno(), self._out.fileno()
        os.set_blocking(self._in_fd, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: bytes, timeout: float) -> Any:
        """Send one encoded message and wait for the answer. Raises TimeoutError, _Ended."""
        deadline = time.monotonic() + timeout
        left = memoryview(message)
        while left:
            _wait(self._in_fd, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._in_fd, left) :]
            except BrokenPipeError:
                raise _Ended from None
        return self.receive(deadline)

    def receive(self, deadline: float) -> Any:
        """Wait for one message. Raises TimeoutError, _Ended."""
        (length,) = HEADER.unpack(self._read(HEADER.size, deadline))
        return decode(self._read(length, deadline))

    def kill(self) -> None:
        self._process.kill()

    def close(self, *, ending: bool = False) -> int:
        """Kill (one that is `ending` only if it does not), reap, and close the pipes.

        Returns the exit status, negative for the signal that ended it.
        """
        try:
            status = self._process.wait(timeout=_END_SECONDS if ending else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait(timeout=_KILL_SECONDS)
        self._in.close()
        self._out.close()
        return status

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _wait(self._out_fd, select.POLLIN, deadline)
            chunk = os.read(self._out_fd, size - len(data))
            if not chunk:
                raise _Ended
            data += chunk
        return bytes(data)


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
