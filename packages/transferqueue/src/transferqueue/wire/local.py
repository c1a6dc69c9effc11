"""The client's end of a Unix socket, for threads that block. It has no thread of its own: one of those that
wait reads for all of them.
"""

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from ..errors import ControllerLost, QueueError, Timeout
from ..transport.pins import Pins
from .channel import SLACK, Answer
from .lingering import part
from .local_session import (
    RETRY_FIRST,
    RETRY_LAST,
    LocalPending,
    LocalSession,
    connected_to,
    receive,
    unreachable,
)
from .messages import RequestBody, Welcome

_SPIN_SECONDS = 100e-6
# A spin that found an answer earns 1, one in vain costs more; who has nothing left sleeps so often first.
_SPIN_CREDIT, _SPIN_COST, _SPIN_PAUSE = 32, 8, 256


class LocalChannel:
    """For threads that block. One of those that wait reads for all of them.

    Args:
        name: of the controller's local listener.
        patience: seconds a controller may be unreachable before requests fail.

    Raises:
        OSError: nothing listens there.
    """

    local = True

    def __init__(self, name: str, session: LocalSession, pins: Pins, patience: float) -> None:
        self._name = name
        self._session = session
        self._patience = patience
        self._pid = os.getpid()
        self._socket: socket.socket | None = None
        self._unsent = b""
        self._lost_once = False
        self._spins = 0
        self._closed = False
        self._changed = threading.Condition(threading.Lock())  # guards what follows and the session
        self._reading = False
        self._pins = pins
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # tells who reads that this is closed
        weakref.finalize(self, os.close, self._wake).atexit = False
        pins.notify = self._tell_released
        self._open()
        self._send(session.hello())

    def _open(self) -> None:
        connected = connected_to(self._name)
        connected.setblocking(False)
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._readable.register(self._wake, select.POLLIN)
        self._socket = connected

    def wait_welcome(self, timeout: float) -> Welcome:
        """Blocks for the controller's welcome; raises its refusal."""
        deadline = time.monotonic() + timeout
        while self._session.welcome is None:
            if self._session.failed is not None:
                raise self._session.failed
            if not self._read_some(deadline):
                raise Timeout(f"no welcome from {self._session.address} within {timeout:g} s")
            if self._socket is None:
                raise ControllerLost(
                    f"the controller at {self._session.address} hung up", address=self._session.address
                )
        return self._session.welcome

    def check_open(self) -> None:
        if self._pid != os.getpid():
            raise QueueError("this client was connected in another process; connect again after a fork")
        if self._closed:
            raise QueueError("this client is closed; connect again")

    def reachable(self, peer: Any) -> bool:
        return self._socket is not None and not self._closed and self._session.failed is None

    def submit(
        self,
        peer: Any,
        body: RequestBody,
        payload: Any = None,
        *,
        timeout: float,
        quiet: float | None = None,
    ) -> LocalPending:
        if self._pid != os.getpid():
            raise QueueError("this client was connected in another process; connect again after a fork")
        with self._changed:
            if self._closed:
                raise QueueError("this client is closed; connect again")
            pending, data = self._session.request(body, timeout)
            self._send(data)
        if self._unsent:
            self._push(pending)
        return pending

    def _send(self, data: bytes) -> None:
        """Sends what fits into the socket, and keeps the rest in order: half a message would make all that
        follows unreadable.
        """
        if self._socket is None:
            return  # everything is repeated on the next connection
        if self._unsent:
            data = self._unsent + data
        try:
            while data:
                data = data[self._socket.send(data) :]
        except BlockingIOError:
            pass  # the controller reads nothing: it is stopped, or far behind
        except OSError:
            data = b""  # who reads finds the connection ended
        self._unsent = data

    def _push(self, pending: LocalPending) -> None:
        """Waits for room for what is unsent, up to the deadline of the request. Reads meanwhile if nobody
        does: a controller that gets rid of nothing hears nothing.
        """
        until = pending.deadline + SLACK
        while self._unsent and pending.outcome is None and time.monotonic() < until:
            with self._changed:
                connected, reads = self._socket, not self._reading
                if connected is None:
                    return
                self._reading = True
            try:
                both = select.poll()
                both.register(connected, select.POLLOUT | (select.POLLIN if reads else 0))
                ready = both.poll(_milliseconds(until))
                if reads and any(event & ~select.POLLOUT for _, event in ready):
                    self._read_some(until)
            finally:
                if reads:
                    with self._changed:
                        self._reading = False
                        self._changed.notify_all()
            with self._changed:
                self._send(b"")

    def _drop_socket(self) -> None:
        self._unsent = b""
        self._session.broken()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def result(self, pending: LocalPending) -> Answer:
        while pending.outcome is None:
            with self._changed:
                while pending.outcome is None and self._reading:
                    self._changed.wait(max(0.0, pending.deadline + SLACK - time.monotonic()) + 0.001)
                    if self._overdue(pending):
                        break
                if pending.outcome is not None:
                    break
                self._reading = True
            try:
                self._read_until(pending)
            finally:
                with self._changed:
                    self._reading = False
                    self._changed.notify_all()
        return pending.result()

    def settle(self, pending: Sequence[Any]) -> None:
        raise AssertionError("a local request needs no other: payload lies in shared memory")

    def _overdue(self, pending: LocalPending) -> bool:
        if pending.outcome is None and time.monotonic() >= pending.deadline + SLACK:
            data = self._session.overdue(pending)
            self._send(data)
        return pending.outcome is not None

    def _read_until(self, pending: LocalPending) -> None:
        while pending.outcome is None:
            if self._socket is None:
                self._reconnect(pending)
            elif not self._read_some(pending.deadline + SLACK):
                with self._changed:
                    self._overdue(pending)

    def _read_some(self, deadline: float) -> bool:
        """Reads once; returns whether anything came before the deadline."""
        connected = self._socket
        if connected is None:
            return True
        try:
            if not self._spin() and not self._readable.poll(_milliseconds(deadline)):
                return False
            data, descriptors = receive(connected)
        except BlockingIOError:
            return False
        except (OSError, ValueError):
            data, descriptors = b"", []
        with self._changed:
            if not data:
                self._drop_socket()
            elif self._session.received(data, descriptors):
                self._changed.notify_all()
        return True

    def _spin(self) -> bool:
        """Looks for an answer for some microseconds before the thread goes to sleep, as to be woken takes as
        long as the controller does. Only while that has mostly helped: a wait is not shortened by it, and on
        a busy host the controller would lack the core.
        """
        if self._spins < 0:
            self._spins += 1
            return False
        until = time.monotonic() + _SPIN_SECONDS
        while True:
            if self._readable.poll(0):
                self._spins = min(_SPIN_CREDIT, self._spins + 1)
                return True
            if time.monotonic() >= until:
                break
        self._spins -= _SPIN_COST
        if self._spins < 0:
            self._spins = -_SPIN_PAUSE
        return False

    def _reconnect(self, pending: LocalPending) -> None:
        """Reaches the controller again and repeats what is in flight, or fails it."""
        began = time.monotonic()
        patience = 0.0 if self._lost_once else self._patience
        pause = RETRY_FIRST
        while pending.outcome is None:
            with self._changed:
                if self._closed or self._try_connect():
                    return
                now = time.monotonic()
                if now - began >= patience:
                    self._lost_once = True
                    self._session.fail(unreachable(self._session.address, self._patience), final=False)
                    return
                # Nothing tells when a controller is back.
                self._changed.wait(min(pause, patience))
                pause = min(2 * pause, RETRY_LAST)
                self._overdue(pending)

    def _try_connect(self) -> bool:
        try:
            self._open()
        except OSError:
            return False
        self._send(self._session.hello() + self._session.repeated())
        self._lost_once = False
        return True

    def give_up(self, pending: LocalPending) -> None:
        with self._changed:
            body = self._session.withdraw(pending)
            if body is not None and not self._closed:
                self._send(self._session.request(body, 30)[1])

    def _tell_released(self) -> None:
        """Called by finalizers: sends at once if that needs no waiting, else the next request does."""
        if self._pid == os.getpid() and self._changed.acquire(blocking=False):
            try:
                if self._socket is not None and not self._closed and not self._session.failed:
                    self._send(self._session.released())
            finally:
                self._changed.release()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._session.fail(QueueError("this client was closed while the request was under way"))
            os.eventfd_write(self._wake, 1)
            part(self._socket, self._session, self._pins)
            self._socket = None
            self._drop_socket()
            self._changed.notify_all()


def _milliseconds(deadline: float) -> int:
    return max(1, min(1_000_000_000, int((deadline - time.monotonic()) * 1000) + 1))
