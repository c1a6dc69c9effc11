"""The sides of a run: how large it is, a folder for what they leave, and the processes that they are."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from measure.child import Child

from .workers import Worker

BENCHMARKS = Path(__file__).parent.parent
SCRIPTS = BENCHMARKS / "weights_sides"
READY_SECONDS = 60.0
COMPILE_SECONDS = 60.0
MEGA = 1_000_000
WHOLE, QUICK = 400 * MEGA, 64 * MEGA
"""Bytes of the weights."""
SHARED_MEMORY = Path("/dev/shm")


class Sides:
    """What one run of the benchmark needs. A context manager that ends what it started.

    Args:
        quick: small sizes and few rounds.
        megabytes: of the weights; None: 400, and 64 in a quick run.

    Attributes:
        quick: as given.
        asked: bytes of the weights that were asked for, if any.
        nbytes: of the weights that are moved.
        receivers: how many, for the goals that ask for several numbers.
        folder: for sockets, sources and files; on a disk, or what the system takes for one.
    """

    def __init__(self, quick: bool, megabytes: int | None = None) -> None:
        self.quick = quick
        self.asked = None if megabytes is None else megabytes * MEGA
        self.nbytes = self.asked or (QUICK if quick else WHOLE)
        self.receivers = (1, 2, 4) if quick else (1, 2, 4, 8)
        self._exits = ExitStack()
        self._idle: list[Child] = []
        self._program: Path | None = None
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        folder = tempfile.TemporaryDirectory(prefix="dcs-", ignore_cleanup_errors=True)
        self.folder = Path(self._exits.enter_context(folder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def rounds(self, whole: int, quick: int = 2) -> int:
        """How many rounds count."""
        return quick if self.quick else whole

    @contextlib.contextmanager
    def workers(self, roles: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[list[Worker]]:
        """Processes in these roles: the module of each in `weights_sides`, and the words for it."""
        workers = [Worker(child) for child in self._take(len(roles))]
        for worker, (role, words) in zip(workers, roles, strict=True):
            worker.open(role, words)
        for worker in workers:
            worker.opened()
        yield list(workers)
        # After an error they are not given back: nobody knows what they are doing.
        living = [worker for worker in workers if worker.lives]
        for worker in living:
            worker.leave()
        self._idle += [worker.left() for worker in living]

    def child(self, script: str, *, seconds: float = READY_SECONDS, **work: object) -> Child:
        """A side in Python that is no worker, to be entered; it has to be ready in so many seconds."""
        return Child(SCRIPTS / script, json.dumps(work), ready_seconds=seconds, environment=_environment())

    def c_child(self, role: str, **work: object) -> Child | None:
        """A sender or receiver in C, to be entered, or None, said once, where there is no compiler."""
        compiler = shutil.which("gcc")
        if compiler is None:
            self.skip("C sender and receivers", "gcc is not installed; the system's package manager has it")
            return None
        if self._program is None:
            self._program = self.folder / "one_to_many"
            source = SCRIPTS / "one_to_many.c"
            command = [compiler, "-O2", "-Wall", "-pthread", "-o", str(self._program), str(source), "-ldl"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            if done.returncode:
                raise RuntimeError(f"gcc could not compile {source.name}:\n{done.stderr}")
        return Child(Path(role), json.dumps(work), python=self._program, ready_seconds=READY_SECONDS)

    def has(self, package: str, name: str) -> bool:
        """Whether a package can be imported; if not, says once that a side is skipped."""
        if importlib.util.find_spec(package) is not None:
            return True
        self.skip(name, f"{package} is not installed in {sys.prefix}")
        return False

    def skip(self, name: str, why: str) -> None:
        """Print, once, that a side is not measured."""
        if name not in self._said:
            self._said.add(name)
            print(json.dumps({"skipped": name, "why": why}), flush=True)

    def _take(self, count: int) -> list[Child]:
        taken, self._idle = self._idle[:count], self._idle[count:]
        new = [
            Child(SCRIPTS / "worker.py", ready_seconds=READY_SECONDS, environment=_environment())
            for _ in range(count - len(taken))
        ]
        if new:
            for child in new:
                self._exits.push(child)
            with ThreadPoolExecutor(len(new)) as pool:  # each waits for a process to be ready
                list(pool.map(Child.__enter__, new))
        return taken + new


def memory_folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder in memory; raises where the system has none."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        raise RuntimeError(f"{SHARED_MEMORY} cannot be written; files in memory are measured there")
    return tempfile.TemporaryDirectory(prefix="dcs-", dir=SHARED_MEMORY, ignore_cleanup_errors=True)


def _environment() -> dict[str, str]:
    # One computing thread a process, and no interface but loopback, for whatever a side imports.
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
