"""The sides beside ours: each a child process, started when a goal first asks for it and kept to the end."""

import json
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from measure.child import Child, ChildError

BENCHMARKS = Path(__file__).parent.parent
SCRIPTS = BENCHMARKS / "queue_sides"
PEERS_PYTHON = BENCHMARKS.parent / ".bench" / "queue" / "bin" / "python"
TRANSFER_QUEUE = "transferqueue 0.1.11"
"""The peer, as the claims call it."""
SAMPLES, QUICK_SAMPLES = 256, 64
"""Of the large batch."""
START_SECONDS, QUICK_START_SECONDS = 120.0, 30.0
"""Longest start of a side; in a quick run, one that takes longer is skipped."""


class Sides:
    """What one run of the benchmark compares with. A context manager that ends every child.

    Attributes:
        quick: small sizes and few rounds.
        samples: of the large batch.
        folder: a short path for sockets and for what children leave.
    """

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.samples = QUICK_SAMPLES if quick else SAMPLES
        self._exits = ExitStack()
        self._started: dict[str, Child | None] = {}

    def __enter__(self) -> Self:
        # Ray's sockets need a short path, so it is not below a folder of the project.
        self.folder = Path(self._exits.enter_context(_folder()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def child(
        self, script: str, *, python: Path | None = None, seconds: float = 60.0, **work: object
    ) -> Child:
        """A child to be entered, which must be ready in so many seconds."""
        return Child(
            SCRIPTS / script, json.dumps(work), python=python or sys.executable, ready_seconds=seconds
        )

    def transfer_queue(self) -> Child | None:
        """The peer of the same name, or None if it cannot be measured here, which is then said once."""
        if "transfer_queue" not in self._started:
            self._started["transfer_queue"] = self._peer(
                TRANSFER_QUEUE, "transfer_queue_peer.py", folder=str(self.folder / "t"), samples=self.samples
            )
        return self._started["transfer_queue"]

    def transfer_queue_guest(self) -> Child | None:
        """A second process of that peer."""
        if "guest" not in self._started:
            owner = self.transfer_queue()
            self._started["guest"] = owner and self._peer(
                f"{TRANSFER_QUEUE}, second process", "transfer_queue_peer.py", address=owner.ready["address"]
            )
        return self._started["guest"]

    def redis(self) -> Child | None:
        """Redis, or None."""
        if "redis" not in self._started:
            self._started["redis"] = self._redis()
        return self._started["redis"]

    def ray(self) -> Child | None:
        """Ray's object store, or None."""
        if "ray" not in self._started and self.quick:
            skip("ray.put/get", "its start would take too long for a quick run")
            self._started["ray"] = None
        if "ray" not in self._started:
            self._started["ray"] = self._try(
                "ray.put/get", "ray_peer.py", None, folder=str(self.folder / "r"), samples=self.samples
            )
        return self._started["ray"]

    def end_ray(self) -> None:
        """End Ray's object store early: a Ray keeps a fifth of a core busy when nobody asks it anything."""
        child = self._started.get("ray")
        if child is not None:
            child.close()

    def _redis(self) -> Child | None:
        server = shutil.which("redis-server")
        if server is None:
            skip("Redis", "redis-server is not installed; the system's package manager has it")
            return None
        return self._peer(
            "Redis", "redis_peer.py", server=server, folder=str(self.folder), samples=self.samples
        )

    def _peer(self, name: str, script: str, **work: object) -> Child | None:
        if not PEERS_PYTHON.exists():
            skip(name, "there is no .bench/queue; `make bench-peers` makes it")
            return None
        return self._try(name, script, PEERS_PYTHON, **work)

    def _try(self, name: str, script: str, python: Path | None, **work: object) -> Child | None:
        seconds = QUICK_START_SECONDS if self.quick else START_SECONDS
        try:
            return self._exits.enter_context(self.child(script, python=python, seconds=seconds, **work))
        except ChildError as error:
            if not self.quick or "did not answer" not in str(error):
                raise
            skip(name, f"it was not ready in {QUICK_START_SECONDS:g} s, and this is a quick run")
            return None


def skip(name: str, why: str) -> None:
    """Print that a side is not measured."""
    print(json.dumps({"skipped": name, "why": why}), flush=True)


def _folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="tq-", ignore_cleanup_errors=True)
