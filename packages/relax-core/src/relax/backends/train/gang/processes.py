"""Ranks as processes of this machine: started, logged, watched, ended.

A process is told by its standard input: first the token, then nothing until it ends, which a rank takes for
the end of whoever started it. It cannot outlive its parent.
"""

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

MODULE = "relax.backends.train.gang.rank"
END_SECONDS = 10.0
LOOK_SECONDS = 2.0
EXIT_ORPHANED = 71
TAIL = 2000
"""Characters of a log that a message shows."""


class RankProcess:
    """`python -m relax.backends.train.gang.rank` for one rank. Its output goes to `log`."""

    def __init__(self, address: str, token: str, rank: int, log: Path) -> None:
        self.rank = rank
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, address, str(rank)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LOCAL_RANK": str(rank)},
            )
        pipe = self._process.stdin
        assert pipe is not None
        self._pipe: IO[bytes] = pipe
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which `failure` tells
            pipe.write(token.encode() + b"\n")
            pipe.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def failure(self) -> str | None:
        """Why it is no more, if it ended otherwise than well."""
        status = self._process.poll()
        return None if status in (None, 0) else self._told(status)

    def wait(self) -> None:
        """Until it ends.

        Raises:
            ChildProcessError: it ended otherwise than well.
        """
        status = self._process.wait()
        if status:
            raise ChildProcessError(self._told(status))

    def _told(self, status: int) -> str:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        try:
            last = self.log.read_text(errors="replace").strip()[-TAIL:]
        except OSError as error:
            last = str(error)
        return f"the process of rank {self.rank} (pid {self.pid}) {how}; the end of {self.log}:\n{last}"

    def end(self, seconds: float = END_SECONDS) -> None:
        """Wait for its tidy end, then end it. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def first_failure(processes: Sequence[RankProcess]) -> str | None:
    """What has become of the first process that failed, if one has."""
    return next((told for process in processes if (told := process.failure) is not None), None)


def end_with_parent() -> None:
    """In a rank: end when whoever started it has ended or closed standard input. By a thread of its own."""
    parent = os.getppid()

    def watch() -> None:
        told = False
        while os.getppid() == parent and not told:
            readable, _, _ = select.select([0], [], [], LOOK_SECONDS)
            told = bool(readable) and not os.read(0, 4096)
        never.wait(END_SECONDS)  # for a tidy end, which the leader has asked for if it could
        os._exit(EXIT_ORPHANED)

    never = threading.Event()
    threading.Thread(target=watch, name="gang-parent", daemon=True).start()
