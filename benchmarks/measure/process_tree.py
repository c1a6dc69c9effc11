"""CPU-seconds of a command and of everything it ever started, daemons that left its process tree included.

A process belongs to the command when one of these holds: it is the command or a descendant; it is in the
session of one that belongs (daemons keep theirs when their parent ends); its environment carries the mark
that the command was started with (whatever else was re-parented). One that belonged once belongs for good, so
that its last reading still counts when it has ended.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "RELAX_BENCHMARK_MARK"
_GONE = (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied, ProcessLookupError)


@dataclass(frozen=True)
class Reading:
    """CPU-seconds, user and system, since each process began.

    Attributes:
        by_process: the name each process shows (it may change) and its seconds, by process id and start.
        root: seconds of the command's own process.
        processes: how many are alive.
    """

    by_process: Mapping[tuple[int, float], tuple[str, float]]
    root: float
    processes: int

    @property
    def seconds(self) -> float:
        """Of all that belong."""
        return sum(seconds for _, seconds in self.by_process.values())

    def by_name_since(self, before: "Reading") -> dict[str, float]:
        """Seconds since an earlier reading by the name a process shows now, the largest first."""
        spent: dict[str, float] = {}
        for process, (name, seconds) in self.by_process.items():
            _, until_then = before.by_process.get(process, ("", 0.0))
            spent[name] = spent.get(name, 0.0) + seconds - until_then
        return dict(sorted(spent.items(), key=lambda item: -item[1]))


class ProcessTree:
    """The processes of one command. Start the command with `environment()`, in a session of its own."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(12)
        self._root: psutil.Process | None = None
        self._own_session = os.getsid(0)
        self._known: dict[tuple[int, float], psutil.Process] = {}
        self._seconds: dict[tuple[int, float], tuple[str, float]] = {}

    def environment(self) -> dict[str, str]:
        """This process's environment, with the mark."""
        return {**os.environ, MARK: self._mark}

    def follow(self, pid: int) -> None:
        """Take the command that was just started as the root."""
        self._root = psutil.Process(pid)
        self._take(self._root)

    def read(self, *, search: bool = True) -> Reading:
        """Add up. `search` also looks for what was started since the last search, which costs more."""
        if self._root is None:
            raise RuntimeError("no command is followed yet: call follow(pid) first")
        if search:
            self._search()
        living = 0
        for key, process in self._known.items():
            try:
                times = process.cpu_times()
                self._seconds[key] = (_name(process), times.user + times.system)
                living += 1
            except _GONE:
                continue
        _, root = self._seconds.get(_key(self._root), ("", 0.0))
        return Reading(dict(self._seconds), root, living)

    def living(self) -> list[psutil.Process]:
        """Those that belong and still run."""
        self._search()
        return [process for process in self._known.values() if process.is_running()]

    def _search(self) -> None:
        everyone = list(psutil.process_iter())
        parents: dict[int, int] = {}
        sessions: dict[int, int] = {}
        for process in everyone:
            with contextlib.suppress(*_GONE):
                parents[process.pid] = process.ppid()
                sessions[process.pid] = os.getsid(process.pid)
        for process in everyone:
            if _marked(process.pid, self._mark):
                self._take(process)
        ours = {process.pid for process in self._known.values() if process.is_running()}
        ours_sessions = {sessions[pid] for pid in ours if pid in sessions} - {self._own_session}
        ours |= {pid for pid, session in sessions.items() if session in ours_sessions}
        grown = True
        while grown:
            found = {pid for pid, parent in parents.items() if parent in ours} - ours
            ours |= found
            grown = bool(found)
        self._take_all(process for process in everyone if process.pid in ours)

    def _take_all(self, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            self._take(process)

    def _take(self, process: psutil.Process) -> None:
        with contextlib.suppress(*_GONE):
            self._known.setdefault(_key(process), process)


def system_busy() -> float:
    """CPU-seconds that the whole machine has been busy since it booted: tells what others used meanwhile."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def _key(process: psutil.Process) -> tuple[int, float]:
    return process.pid, process.create_time()


def _name(process: psutil.Process) -> str:
    """What a person would call it: Ray's title of a worker, the module that Python runs, or the program."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].split()[0]
    return words[words.index("-m") + 1] if "-m" in words[:-1] else process.name()


def _marked(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False
