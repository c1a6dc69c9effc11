"""A peer as a child process that works in blocks, and sleeps between them while the other side works."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

READY_SECONDS = 120.0
CLOSE_SECONDS = 30.0


class PeerError(RuntimeError):
    """The peer failed, or did not answer in time. The message holds what it said last."""


class Peer:
    """`script WORK` as a context manager. One line in asks for a block, one line out answers it."""

    def __init__(self, script: Path, work: str) -> None:
        self._script = script
        self._work = work
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def __enter__(self) -> Self:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(self._script), self._work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        try:
            self._line(READY_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def block(self, *, steps: int, threads: int, seconds: float) -> dict[str, list[float]]:
        """Have a block done.

        Args:
            steps: at most.
            threads: of torch.
            seconds: after which the block ends with the step it is in.

        Returns:
            A value for each step done: `walls`, `cpus`, `rewards`, `tokens`.

        Raises:
            PeerError: the peer failed or did not answer.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        asked = json.dumps({"steps": steps, "threads": threads, "seconds": seconds})
        with contextlib.suppress(BrokenPipeError):  # a peer that is gone shows in the answer
            self._process.stdin.write(asked.encode() + b"\n")
            self._process.stdin.flush()
        return self._line(seconds + READY_SECONDS)

    def close(self) -> None:
        """Tell the peer to end, and end it when it does not. Idempotent."""
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

    def _line(self, timeout: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise PeerError(f"{self._script.name} did not answer in {timeout:g} s; {self._said()}")
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    self._process.wait(CLOSE_SECONDS)
                    raise PeerError(f"{self._script.name} ended ({self._process.returncode}); {self._said()}")
                self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def _said(self) -> str:
        self._errors.seek(0)
        return "it said last:\n" + self._errors.read().decode(errors="replace")[-4000:]
