"""The processes of a store, watched by a thread of its parent: one that dies is started again where nothing
is lost by that.
"""

import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from ..errors import StartFailed
from .assignment import Assignment, Listening

log = logging.getLogger("transferqueue")

_DEATHS, _WITHIN = 5, 10.0  # so many deaths of one process in so many seconds are no accident
_START_SECONDS = 60.0  # for a process that is started again
_LAST_WORDS = 4096  # bytes of stderr that are remembered

Process = subprocess.Popen[bytes]


class _Child:
    """One process of a store, whichever life it is in.

    Attributes:
        listens: it has said its port.
        deadline: until when it has to.
        deaths: when earlier lives ended.
        said: the end of what it wrote to stderr.
        given_up: it is not started any more.
    """

    def __init__(self, name: str, assignment: Assignment) -> None:
        self.name = name
        self.assignment = assignment
        self.process: Process
        self.pidfd = -1
        self.listens = False
        self.deadline = 0.0
        self.deaths: deque[float] = deque(maxlen=_DEATHS)
        self.said = b""
        self.line = b""
        self.given_up = False

    def start(self, deadline: float) -> None:
        self.listens, self.line, self.deadline = False, b"", deadline
        self.process = subprocess.Popen(
            [sys.executable, "-m", "transferqueue.server.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # signals to the group of the caller are not for them
        )
        self.pidfd = os.pidfd_open(self.process.pid)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it ended already, which its pidfd tells
            self.process.stdin.write(msgspec.json.encode(self.assignment) + b"\n")
            self.process.stdin.flush()

    @property
    def restarts(self) -> bool:
        """Whether its next life knows what this one knew. A storage unit has nothing to know."""
        return self.assignment.unit is not None or self.assignment.journal is not None

    @property
    def last_words(self) -> str:
        said = self.said.decode(errors="replace").strip()
        return f"; its last words: {said[-1000:]}" if said else "; it said nothing"


class Supervisor:
    """Starts the processes of a store, starts them again, ends them.

    Args:
        children: name and assignment of the controller, then of each storage unit.

    Attributes:
        failure: why a process is not started again, or None.
        on_failure: called in the supervisor's thread when `failure` is set.
    """

    def __init__(self, children: Sequence[tuple[str, Assignment]]) -> None:
        self._children = [_Child(name, assignment) for name, assignment in children]
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
        self._up = threading.Event()
        self._start_error: StartFailed | None = None
        self._end_within: float | None = None
        self._owner = os.getpid()
        self._closing = threading.Lock()
        self.failure: StartFailed | None = None
        self.on_failure: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="transferqueue-supervisor", daemon=True)

    @property
    def processes(self) -> tuple[Process, ...]:
        """Those that are there now, or were last: the controller, then the storage units."""
        return tuple(child.process for child in self._children)

    def start(self, seconds: float) -> int:
        """Starts all and returns the controller's port once every one listens.

        Raises:
            StartFailed: one ended, could not listen, or took too long; all are ended then.
        """
        deadline = time.monotonic() + seconds
        try:
            for child in self._children:
                child.start(deadline)
                self._watch(child)
        except BaseException:
            self._end([child for child in self._children if child.pidfd >= 0], 0.5)
            self._close()
            raise
        self._thread.start()
        try:
            # The thread ends what takes too long.
            if not self._up.wait(seconds + 10.0):
                raise StartFailed(f"the store did not start within {seconds:g} s")
            if self._start_error is not None:
                raise self._start_error
        except BaseException:
            self.stop(0.5)
            raise
        return self._children[0].assignment.port

    def stop(self, seconds: float) -> None:
        """Starts nothing any more, then ends the controller, then the units; those that do not end in
        `seconds` are killed. Idempotent; does nothing in a fork of the process that started them.
        """
        if os.getpid() != self._owner:
            return
        with self._closing:
            if self._end_within is None:
                self._end_within = seconds
                os.eventfd_write(self._wake, 1)
            self._thread.join(seconds + 30.0)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._end_within is None:
            self._turn(self._next_deadline())
            now = time.monotonic()
            for child in self._children:
                if not child.listens and not child.given_up and now >= child.deadline:
                    self._too_late(child)
        self._end(self._children, self._end_within)
        self._close()

    def _turn(self, deadline: float | None) -> None:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(wait):
            # A handler may have closed what another key of this turn is about.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def _next_deadline(self) -> float | None:
        waiting = [child.deadline for child in self._children if not child.listens and not child.given_up]
        return min(waiting, default=None)

    def _watch(self, child: _Child) -> None:
        process = child.process
        assert process.stdout is not None
        assert process.stderr is not None
        for stream in (process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._hear(child))
        self._selector.register(process.stderr, selectors.EVENT_READ, lambda: self._forward(child))
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._died(child))

    def _hear(self, child: _Child) -> None:
        """The line in which a process says its port. Nothing is said after it."""
        assert child.process.stdout is not None
        chunk = _read(child.process.stdout.fileno())
        if chunk is None:
            return
        child.line += chunk
        if chunk and not child.line.endswith(b"\n"):
            return
        self._selector.unregister(child.process.stdout)
        if not chunk:
            return  # it ends, which its pidfd tells
        said = msgspec.json.decode(child.line, type=Listening)
        if said.error:
            child.said += f"\n{child.name} {said.error}".encode()
            if not self._up.is_set():
                self._fail_start(StartFailed(f"{child.name} {said.error}"))
            return
        child.listens = True
        child.assignment = replace(child.assignment, port=said.port)
        if all(one.listens for one in self._children):
            self._up.set()

    def _forward(self, child: _Child) -> None:
        """What a process writes to stderr goes on to ours, and is remembered."""
        assert child.process.stderr is not None
        chunk = _read(child.process.stderr.fileno())
        if chunk is None:
            return
        if not chunk:
            self._selector.unregister(child.process.stderr)
            return
        child.said = (child.said + chunk)[-_LAST_WORDS:]
        with suppress(OSError):  # ours may be closed
            os.write(2, chunk)

    def _died(self, child: _Child) -> None:
        self._bury(child)
        status = child.process.returncode
        if not self._up.is_set():
            self._fail_start(
                StartFailed(f"{child.name} ended with status {status} before it listened{child.last_words}")
            )
            child.given_up = True
            return
        now = time.monotonic()
        child.deaths.append(now)
        if not child.restarts:
            self._give_up(
                child,
                f"{child.name} ended with status {status}{child.last_words}. What it knew is lost; a store "
                "with a journal starts it again (serve(journal=...))",
            )
        elif len(child.deaths) == _DEATHS and now - child.deaths[0] <= _WITHIN:
            self._give_up(
                child,
                f"{child.name} ended {_DEATHS} times in {now - child.deaths[0]:.1f} s and is not started "
                f"again, the last time with status {status}{child.last_words}",
            )
        else:
            log.warning("%s ended with status %s; it is started again", child.name, status)
            child.said = b""
            try:
                child.start(now + _START_SECONDS)
            except OSError as error:
                self._give_up(child, f"{child.name} died and cannot be started again: {error}")
                return
            self._watch(child)

    def _too_late(self, child: _Child) -> None:
        if not self._up.is_set():
            self._fail_start(
                StartFailed(f"{child.name} did not start in time; give serve(...) a longer timeout")
            )
            child.given_up = True
        else:
            child.deadline = time.monotonic() + _START_SECONDS
            child.process.kill()  # and a next try

    def _fail_start(self, error: StartFailed) -> None:
        self._start_error = self._start_error or error
        self._up.set()

    def _give_up(self, child: _Child, why: str) -> None:
        child.given_up = True
        if self.failure is None:
            self.failure = StartFailed(why)
        log.error("%s", why)
        if self.on_failure is not None:
            self.on_failure()

    def _bury(self, child: _Child) -> None:
        """Takes in the end of a process that has ended."""
        child.process.wait(10)
        assert child.process.stderr is not None
        assert child.process.stdout is not None
        if self._is_watched(child.process.stderr.fileno()):
            self._forward(child)
        for stream in (child.process.stdout, child.process.stderr):
            if self._is_watched(stream.fileno()):
                self._selector.unregister(stream)
            stream.close()
        if child.process.stdin is not None:
            with suppress(BrokenPipeError):  # unwritten bytes for a process that is gone
                child.process.stdin.close()
        if self._is_watched(child.pidfd):
            self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        child.pidfd = -1

    def _is_watched(self, descriptor: int) -> bool:
        return descriptor in self._selector.get_map()

    def _end(self, children: Sequence[_Child], seconds: float) -> None:
        """Ends the controller, then the units, so that it does not miss them."""
        deadline = time.monotonic() + seconds
        for some in (children[:1], children[1:]):
            living = [child for child in some if child.pidfd >= 0]
            for child in living:
                assert child.process.stdin is not None
                with suppress(BrokenPipeError):
                    child.process.stdin.close()  # its signal to end
                if self._is_watched(child.pidfd):
                    self._selector.modify(child.pidfd, selectors.EVENT_READ, lambda c=child: self._bury(c))
            while any(child.pidfd >= 0 for child in living) and time.monotonic() < deadline:
                self._turn(deadline)
            for child in living:
                if child.pidfd >= 0:
                    child.process.kill()
                    self._bury(child)

    def _close(self) -> None:
        self._selector.close()
        os.close(self._wake)


def _read(descriptor: int) -> bytes | None:
    """What is there to read; None if nothing yet, no bytes at the end."""
    try:
        return os.read(descriptor, 65_536)
    except BlockingIOError:
        return None
