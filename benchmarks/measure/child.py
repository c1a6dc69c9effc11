"""A side of a benchmark as a child process: a line of JSON asks, one answers, and it sleeps between them."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

READY_SECONDS = 120.0
CLOSE_SECONDS = 30.0


class ChildError(RuntimeError):
    """A child failed, or did not answer in time. The message holds what it said last."""


class Child:
    """`python script WORK` as a context manager that is entered when the child's first line has come.

    Args:
        script: what to run; it prints one line of JSON when it is ready, and one for every line it is sent.
        work: its one argument.
        python: the interpreter, of another environment perhaps.
        ready_seconds: longest wait for the first line.
        environment: variables beside those of this process.

    Attributes:
        ready: what the first line said.
    """

    def __init__(
        self,
        script: Path,
        work: str = "{}",
        *,
        python: Path | str = sys.executable,
        ready_seconds: float = READY_SECONDS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [str(python), str(script), work]
        self._name = script.name
        self._environment = {**os.environ, **(environment or {})}
        self._ready_seconds = ready_seconds
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self.ready: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if self._process is not None:
            raise RuntimeError(f"{self._name} runs already; enter a child once")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._environment,
        )
        try:
            self.ready = self.answer(self._ready_seconds)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "enter the child first"
        return self._process.pid

    def ask(self, timeout: float, **words: Any) -> dict[str, Any]:
        """Send one line, wait for its answer.

        Raises:
            ChildError: the child failed or did not answer in `timeout` seconds.
        """
        self.tell(**words)
        return self.answer(timeout)

    def tell(self, **words: Any) -> None:
        """Send one line; `answer` then waits for what it brings. For children that work at the same time."""
        assert self._process is not None, "enter the child first"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a child that is gone shows in the answer
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, timeout: float) -> dict[str, Any]:
        """Wait for one line.

        Raises:
            ChildError: as for `ask`.
        """
        assert self._process is not None, "enter the child first"
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise ChildError(f"{self._name} did not answer in {timeout:g} s; {self._said()}")
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    self._process.wait(CLOSE_SECONDS)
                    raise ChildError(f"{self._name} ended ({self._process.returncode}); {self._said()}")
                self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        """Tell the child to end by closing its input, and end it when it does not. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(CLOSE_SECONDS)
        process.stdout.close()
        self._errors.close()

    def _said(self) -> str:
        self._errors.seek(0)
        return "it said last:\n" + self._errors.read().decode(errors="replace")[-4000:]
