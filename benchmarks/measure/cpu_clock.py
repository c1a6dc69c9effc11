"""CPU-seconds of running processes to the nanosecond: the kernel's ticks of 10 ms are too long for a call."""

import contextlib
import os
import resource
import time
from collections.abc import Iterable

import psutil

from .process_tree import system_busy


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system seconds of these processes since each began, all their threads, ended ones included.

    Raises:
        ProcessLookupError: one of them has ended.
    """
    return sum(_seconds(pid) for pid in pids)


def tree(root: int) -> list[int]:
    """A process and all its descendants that live."""
    process = psutil.Process(root)
    return [root, *(child.pid for child in process.children(recursive=True))]


class Meanwhile:
    """How many cores processes other than this one and its descendants kept busy since it was made."""

    def __init__(self) -> None:
        self._begun = (time.monotonic(), system_busy(), _own_seconds())

    def others(self) -> float:
        """Cores; an estimate, as the system counts in ticks of 10 ms."""
        wall, busy, own = (
            now - then
            for now, then in zip((time.monotonic(), system_busy(), _own_seconds()), self._begun, strict=True)
        )
        return max(busy - own, 0.0) / wall if wall > 0 else 0.0


def _seconds(pid: int) -> float:
    # The clock of another process, as clock_getcpuclockid(3) names it: all its threads, in nanoseconds.
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError as error:
        raise ProcessLookupError(f"process {pid} has ended, so its CPU-seconds cannot be read") from error


def _own_seconds() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = ended.ru_utime + ended.ru_stime
    for pid in tree(os.getpid()):
        with contextlib.suppress(ProcessLookupError):  # ended since the tree was read
            own += _seconds(pid)
    return own
