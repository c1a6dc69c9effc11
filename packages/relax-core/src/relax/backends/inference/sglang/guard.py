"""Runs a server and ends it, with all that it has started, when its owner is gone: `python guard.py COMMAND`.

Its standard input is a pipe that the owner holds open. The end of that pipe, or of the process that started
this one, ends the server: however the owner dies, SIGKILL included. Orphans of the server become children of
the guard, so none is left behind. There are two guards, as one may be killed itself: Ray kills the children
of a worker that it ends. The first, which the owner has started, waits for the second, which guards; the end
of either is the end of the server, and what is left is ended by the other. It exits with the server's own
code (128 and the signal for one that was killed). Standard library only: it starts in some 30 ms, and is as
small.

What a killed process had in shared memory stays there for ever, some 16 KB a server and its semaphores. So
the guard unlinks what is its server's: files of /dev/shm of the kinds that servers make, made since the guard
began, which a process below it had mapped and no other process has. A process that somebody else has killed
cannot be asked any more what it had: of its semaphores the guard has taken note when they were made.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

SHARED = Path("/dev/shm")
SEMAPHORE = "sem.mp-"
OWN = ("sglang_loads_", "sgl_shm_", SEMAPHORE, "psm_", "torch_", "nccl-")
"""How files begin that servers make there. A model's folder may lie there too, and is mapped as well."""
BEGAN = time.time()

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl(2)
_CREATE = 0x100  # inotify(7)


class Made:
    """Semaphores that the processes below this one make, noted while they live.

    A process has mapped its semaphore before that gets its name, so one look when the name is there is
    enough.

    Attributes:
        inodes: of what they have made.
        descriptor: readable when something was made; -1 where the system has no inotify left to give.
    """

    SECONDS = 1.0
    """Between two looks without inotify."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor >= 0 and libc.inotify_add_watch(self.descriptor, bytes(SHARED), _CREATE) < 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.inodes: set[int] = set()
        self._there = _semaphores()

    def look(self) -> None:
        """Note which of those that are new belong to a process below."""
        with contextlib.suppress(BlockingIOError):
            while self.descriptor >= 0 and os.read(self.descriptor, 65536):
                pass
        before, self._there = self._there, _semaphores()
        if new := self._there - before:
            self.inodes |= new & set[int]().union(*map(mapped, descendants(os.getpid())))


def _semaphores() -> set[int]:
    with os.scandir(SHARED) as files:
        return {file.inode() for file in files if file.name.startswith(SEMAPHORE)}


def main(command: list[str]) -> int:
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    if not _adopts_orphans():
        return 70
    owners = [os.pidfd_open(pid) for pid in (os.getppid(), os.getpid())]
    second = os.fork()
    if second:
        code = os.waitstatus_to_exitcode(os.waitpid(second, 0)[1])
        _end_all()
        return code if code >= 0 else 128 - code
    return guard(command, owners)


def _adopts_orphans() -> bool:
    """Make this process the parent of all orphans below it."""
    done = ctypes.CDLL(None, use_errno=True).prctl(_SET_SUBREAPER, 1, 0, 0, 0) == 0
    if not done:
        print(f"the guard cannot adopt orphans: errno {ctypes.get_errno()}", file=sys.stderr)
    return done


def guard(command: list[str], owners: list[int]) -> int:
    """Run the server until it ends, or the pipe or any of the owners (pidfds) does."""
    if not _adopts_orphans():
        return 70
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for reset in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(reset, signal.SIG_DFL)

    made = Made()
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=prepare)
    except OSError as error:
        print(f"{command[0]!r} cannot be run: {error}", file=sys.stderr)
        return 127
    _wait([*owners, os.pidfd_open(server.pid)], made)
    code = server.poll()
    _end_all(made.inodes)
    if code is None:
        return 0  # ended on purpose
    return code if code >= 0 else 128 - code


def _wait(ends: list[int], made: Made) -> None:
    """Until the other end of the pipe, or one of the processes behind these pidfds, is gone."""
    poll = select.poll()
    for descriptor in ends:
        poll.register(descriptor, select.POLLIN)
    poll.register(0, 0)  # a hang-up is always told
    if made.descriptor >= 0:
        poll.register(made.descriptor, select.POLLIN)
    ended = False
    while not ended:
        told = poll.poll(None if made.descriptor >= 0 else 1000 * made.SECONDS)
        ended = any(descriptor != made.descriptor for descriptor, _ in told)
        made.look()


def _end_all(made: Iterable[int] = ()) -> None:
    """Kill and reap until there is no descendant left; what is orphaned meanwhile becomes a child. Then
    unlink what they had in shared memory, and what was `made` there.
    """
    shared = set(made)
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in descendants(os.getpid()):
                shared |= mapped(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
    _unlink(shared)


def _unlink(inodes: set[int]) -> None:
    """Remove these files of shared memory, but for what others use, and what was there before."""
    if not inodes:
        return
    for process in Path("/proc").glob("[0-9]*"):
        inodes = inodes - mapped(int(process.name))
    for file in SHARED.iterdir():
        with contextlib.suppress(OSError):  # it is gone, or is somebody else's
            state = file.lstat()
            if file.name.startswith(OWN) and state.st_ino in inodes and state.st_ctime >= BEGAN:
                file.unlink()


def mapped(pid: int) -> set[int]:
    """Inodes of what a process has mapped of shared memory: a semaphore gets its name afterwards."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:  # it has ended, or is somebody else's
        return set()
    start = os.fsencode(SHARED) + b"/"
    fields = [line.split(None, 5) for line in lines if start in line]
    return {int(inode) for *_, inode, path in fields if path.startswith(start)}


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in children.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
