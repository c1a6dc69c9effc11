"""A server process: started under a guard, watched, its log kept, ended with everything it has started."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from relax.backends.inference.errors import EngineError, EngineTimeout
from relax.backends.inference.sglang.guard import descendants

GUARD = Path(__file__).with_name("guard.py")
PROBE_SECONDS = 0.25
"""Between two questions whether a server that starts is ready: it has no other way to say so."""
END_SECONDS = 60.0
"""Longest end of a process tree that is killed; only what hangs in a driver takes long."""
TAIL_LINES = 25
FAULT_LINES = 6
FAULT = re.compile(r"\bERROR\b|\[Errno|^[\w.]*(Error|Exception):")
TAIL_BYTES = 65_536


class ServerFailed(EngineError):
    """A server that did not start, or not in time; the message holds the end of its log."""


class ReservedPort:
    """A free port of loopback, kept from others until the server itself listens there."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


class ServerProcess:
    """One start of a server. Made on the event loop that it is used from; see `start`.

    Attributes:
        log: the file that holds what it prints.
        ended: done when the server, or one of the processes that `watch` was told of, is gone; its result
            says how, with the end of the log.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, began: int) -> None:
        self._process = process
        self.log = log
        self._began = began
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._descriptors: list[int] = []
        self._closing = False
        self._gone = asyncio.Event()
        self._on_end(process.pid, self._finished)

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> "ServerProcess":
        """Run a command under the guard, in a session of its own; what it prints is appended to `log`.

        Raises:
            ServerFailed: there is no such program.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            began = out.tell()
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        return cls(process, log, began)

    async def ready(self, probe: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Wait until `probe` says that the server answers.

        Raises:
            ServerFailed: it ended first, or took longer than `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                while not await probe():
                    done, _ = await asyncio.wait({self.ended}, timeout=PROBE_SECONDS)
                    if done:
                        raise ServerFailed(f"the server did not start: {self.ended.result()}")
        except TimeoutError:
            raise ServerFailed(
                f"the server did not start within {seconds:g} s (rollout.sglang.start_seconds)\n{self.tail()}"
            ) from None

    def watch(self, pids: Sequence[int]) -> None:
        """Take the end of any of these processes, parts of the server, for the end of the server. SGLang's
        own main process lives on for up to a minute after one of its parts has died.
        """
        for pid in pids:
            self._on_end(pid, lambda pid=pid: self._told(f"its process {pid} died"))

    def parts(self) -> list[int]:
        """The server's own processes below its main one: those whose names begin with `sglang::`."""
        return [pid for pid in descendants(self._process.pid) if _title(pid).startswith("sglang::")]

    def tail(self) -> str:
        """The last lines of the log since this start, under its name, and before them the first that speak of
        an error: what follows from one is often longer than the end.
        """
        with self.log.open("rb") as content:
            size = content.seek(0, os.SEEK_END)
            content.seek(max(self._began, size - TAIL_BYTES))
            text = content.read(TAIL_BYTES).decode(errors="replace")  # it may grow meanwhile
        lines = [line[:400] for line in text.splitlines() if line.strip()]
        before, last = lines[:-TAIL_LINES], lines[-TAIL_LINES:]
        faults = [line for line in before if FAULT.search(line)][:FAULT_LINES]
        told = [*faults, "..."] if faults else []
        return "\n".join([f"the end of {self.log}:", *told, *(last or ["(it is empty)"])])

    async def close(self) -> None:
        """End the server and all that it has started, and wait for that. Idempotent.

        Raises:
            EngineTimeout: something cannot be killed.
        """
        if not self._closing:
            self._closing = True
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._gone.wait()
        except TimeoutError:
            raise EngineTimeout(
                f"process {self._process.pid}, which runs the server of {self.log}, has not ended within "
                f"{END_SECONDS:g} s of being killed"
            ) from None
        self._forget()

    def _finished(self) -> None:
        code = self._process.wait()
        code = code if code >= 0 else 128 - code  # the guard itself was killed
        self._gone.set()
        if self._process.stdin is not None:
            self._process.stdin.close()
        how = f"exit code {code}"
        if code > 128:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(code - 128).name}"
        self._told(f"its process ended ({how})")

    def _told(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result("it was closed" if self._closing else f"{how}\n{self.tail()}")

    def _on_end(self, pid: int, call: Callable[[], None]) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(call)
            return
        self._descriptors.append(descriptor)

        def once() -> None:
            self._loop.remove_reader(descriptor)
            call()

        self._loop.add_reader(descriptor, once)

    def _forget(self) -> None:
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)


def _title(pid: int) -> str:
    """How a process calls itself; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""
