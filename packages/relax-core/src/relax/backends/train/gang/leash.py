"""The leader's end of the tethers: who has come, who has failed, who is gone, whom nothing was heard of.

A tether is a TCP connection that outlives every collective: its end says at once that a process is gone, and
a traceback goes over it while process groups hang. One thread serves all of them.
"""

import contextlib
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from relax.backends.train.errors import RankFailed
from relax.backends.train.gang.frames import BadFrame, Inbox, send
from relax.backends.train.gang.messages import Alive, Call, End, Hello, Here, Job, Raised, Ready, ToLeader

PING_SECONDS = 2.0
LOOK_SECONDS = 0.25
SEND_SECONDS = 10.0
_SETTLE_SECONDS = 3.0
"""After the first sign of a fault, for that of its cause to arrive."""


@dataclass(frozen=True)
class Fault:
    """Why the gang broke: a rank, what happened to it, and whether that only follows from another's end."""

    rank: int
    cause: str
    consequence: bool = False


@dataclass
class _Member:
    connection: socket.socket
    inbox: Inbox = field(default_factory=lambda: Inbox(ToLeader))
    rank: int = -1
    pid: int = 0
    host: str = ""
    heard: float = field(default_factory=time.monotonic)
    here: bool = False
    ready: Ready | None = None
    sending: threading.Lock = field(default_factory=threading.Lock)

    def say(self, message: Job | Call | Alive | End) -> None:
        with self.sending:
            send(self.connection, message)


class Leash:
    """Tethers of the ranks 1 to `size` - 1.

    Args:
        host: address to listen at.
        token: that a rank has to show.
        size: ranks, the leader's own included.
        job: what a rank is told when it comes.
    """

    def __init__(self, host: str, token: str, size: int, job: Callable[[int], Job]) -> None:
        self._token, self._size, self._job = token, size, job
        self._listener = socket.create_server((host, 0), family=_family(host))
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._faults: list[Fault] = []
        self._begun = False
        self._ending = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="gang-leash", daemon=True)
        self._thread.start()

    # What the leader asks

    def begin(self) -> None:
        """Give the ranks their jobs, those that have come and those that will."""
        with self._changed:
            self._begun = True
            for member in self._members.values():
                with contextlib.suppress(OSError):  # its end is read as such
                    member.say(self._job(member.rank))

    def wait_here(self, seconds: float, exited: Callable[[], str | None]) -> None:
        """Until all ranks have come and loaded what they need.

        Args:
            seconds: at most.
            exited: says which process of a rank has ended, if any; asked now and then.

        Raises:
            RankFailed: a rank failed, or did not come in time.
        """
        self._wait(lambda member: member.here, "here", seconds, exited)

    def wait_ready(self, seconds: float, exited: Callable[[], str | None]) -> list[Ready]:
        """Until all ranks are built; where each stands, from rank 1 on. As `wait_here` otherwise."""
        self._wait(lambda member: member.ready is not None, "ready", seconds, exited)
        with self._changed:
            return [m.ready for _, m in sorted(self._members.items()) if m.ready is not None]

    def _wait(
        self, holds: Callable[[_Member], bool], what: str, seconds: float, exited: Callable[[], str | None]
    ) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            while not self._faults:
                missing = [
                    rank
                    for rank in range(1, self._size)
                    if rank not in self._members or not holds(self._members[rank])
                ]
                if not missing:
                    return
                if (gone := exited()) is not None:
                    raise RankFailed(gone)
                if (left := until - time.monotonic()) <= 0:
                    raise RankFailed(
                        f"rank {', '.join(map(str, missing))} of {self._size} was not {what} after "
                        f"{seconds:g} s; see its log in the run folder",
                        missing[0],
                    )
                self._changed.wait(min(left, LOOK_SECONDS))
        raise self.failure()

    def call(self, number: int) -> None:
        """Tell every rank that collectives follow.

        Raises:
            RankFailed: the gang is broken.
        """
        with self._changed:
            if self._faults:
                raise self.failure()
            members = list(self._members.values())
        for member in members:
            try:
                member.say(Call(number))
            except OSError as error:
                self._note(Fault(member.rank, f"its tether broke: {error}"))
                raise self.failure() from error

    def failure(self, wait: float = 0.0) -> RankFailed:
        """The error that names the rank and the cause; waits a moment where only consequences are known."""
        fault = self.fault(wait)
        if fault is None:
            silent = ", ".join(f"rank {rank} {seconds:.0f} s ago" for rank, seconds in self.silence().items())
            return RankFailed(f"the ranks did not answer; last heard from {silent or 'none'}")
        return RankFailed(f"rank {fault.rank} of {self._size} {fault.cause}", fault.rank)

    def fault(self, wait: float = 0.0) -> Fault | None:
        """What broke the gang: a cause rather than a consequence, the first that was seen."""
        until = time.monotonic() + wait
        with self._changed:
            while not self._faults and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            if not self._faults:
                return None
            until = time.monotonic() + _SETTLE_SECONDS
            while self._cause() is None and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._cause() or self._faults[0]

    def _cause(self) -> Fault | None:
        return next((fault for fault in self._faults if not fault.consequence), None)

    def silence(self) -> dict[int, float]:
        """Seconds since each rank was last heard of."""
        now = time.monotonic()
        with self._changed:
            return {rank: now - member.heard for rank, member in sorted(self._members.items())}

    def end(self, fault: str = "") -> None:
        """Let every rank end; those that are in the middle of something only if there is a fault."""
        with self._changed:
            self._ending = True
            members = list(self._members.values())
        for member in members:
            with contextlib.suppress(OSError):  # gone already, which is what is wanted
                member.say(End(fault))

    def close(self) -> None:
        """Hang up. Idempotent."""
        with self._changed:
            self._ending = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(10)
        for each in (
            self._listener,
            self._wake,
            self._woken,
            *(m.connection for m in self._members.values()),
        ):
            each.close()
        self._selector.close()

    # In the thread

    def _serve(self) -> None:
        pinged = time.monotonic()
        while True:
            for key, _ in self._selector.select(PING_SECONDS):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            if time.monotonic() - pinged >= PING_SECONDS:
                pinged = time.monotonic()
                with self._changed:
                    members = list(self._members.values())
                for member in members:
                    with contextlib.suppress(OSError):  # its end is read as such
                        member.say(Alive())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it went away before it was greeted
            return
        connection.settimeout(SEND_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ, _Member(connection))

    def _read(self, member: _Member) -> None:
        try:
            received = member.connection.recv(1 << 16)
            if not received:
                self._lost(member, "is gone: its process ended without a word (killed, or out of memory)")
                return
            for message in member.inbox.feed(received):
                self._take(member, message)
        except (OSError, BadFrame) as error:
            self._lost(member, f"is gone: {error}")

    def _take(self, member: _Member, message: object) -> None:
        member.heard = time.monotonic()
        if member.rank < 0:
            self._greet(member, message)
            return
        with self._changed:
            match message:
                case Here():
                    member.here = True
                case Ready():
                    member.ready = message
                case Raised(verb, error, trace, consequence):
                    cause = f"failed in {verb}: {error}\n{trace}".rstrip()
                    self._note(Fault(member.rank, cause, consequence))
                case _:
                    pass
            self._changed.notify_all()

    def _greet(self, member: _Member, message: object) -> None:
        if not isinstance(message, Hello) or not hmac.compare_digest(message.token, self._token):
            raise BadFrame("it does not know the token")
        with self._changed:
            if not 0 < message.rank < self._size or message.rank in self._members:
                raise BadFrame(f"rank {message.rank} of {self._size} is not awaited")
            member.rank, member.pid, member.host = message.rank, message.pid, message.host
            self._members[member.rank] = member
            if self._begun:
                member.say(self._job(member.rank))

    def _lost(self, member: _Member, cause: str) -> None:
        self._selector.unregister(member.connection)
        if member.rank < 0:
            member.connection.close()  # a stranger
            return
        with self._changed:
            if not self._ending and not any(fault.rank == member.rank for fault in self._faults):
                self._note(Fault(member.rank, f"(pid {member.pid}) {cause}"))

    def _note(self, fault: Fault) -> None:
        with self._changed:
            first = not self._faults
            self._faults.append(fault)
            others = [m for rank, m in self._members.items() if rank != fault.rank] if first else []
            self._changed.notify_all()
        for member in others:
            with contextlib.suppress(OSError):
                member.say(End(f"rank {fault.rank} of {self._size} {fault.cause}"))


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
