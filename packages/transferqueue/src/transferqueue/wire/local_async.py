"""The client's end of a Unix socket, for one event loop, which reads the socket itself."""

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from ..errors import QueueError, Timeout
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


class AsyncLocalChannel:
    """For one event loop, which reads the socket itself. To be made and used in that loop."""

    local = True

    def __init__(self, name: str, session: LocalSession, pins: Pins, patience: float) -> None:
        self._name = name
        self._session = session
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._unsent = bytearray()
        self._writing = False
        self._closed = False
        self._welcomed = self._loop.create_future()
        self._reconnecting: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = connected_to(name)
        self._pins = pins
        pins.notify = self._released_somewhere
        self._attach()
        self._write(session.hello())

    async def wait_welcome(self, timeout: float) -> Welcome:
        """Awaits the controller's welcome; raises its refusal."""
        try:
            async with asyncio.timeout(timeout):
                await self._welcomed
        except TimeoutError:
            raise Timeout(f"no welcome from {self._session.address} within {timeout:g} s") from None
        assert self._session.welcome is not None
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
        if self._closed:
            raise QueueError("this client is closed; connect again")
        pending, data = self._session.request(body, timeout)
        if self._socket is not None:
            self._write(data)
        elif self._reconnecting is None and pending.outcome is None:
            self._lose()
        return pending

    async def answer(self, pending: LocalPending) -> Answer:
        if pending.outcome is None:
            if asyncio.get_running_loop() is not self._loop:
                raise QueueError("this client belongs to another event loop; connect in the one that uses it")
            pending.waiter = self._loop.create_future()
            timer = self._loop.call_at(
                self._loop.time() + pending.deadline + SLACK - time.monotonic(), self._overdue, pending
            )
            try:
                await pending.waiter
            finally:
                timer.cancel()
        return pending.result()

    async def settle_async(self, pending: Sequence[Any]) -> None:
        raise AssertionError("a local request needs no other: payload lies in shared memory")

    def _overdue(self, pending: LocalPending) -> None:
        self._write(self._session.overdue(pending))
        self._wake([pending])

    @staticmethod
    def _wake(ended: list[LocalPending]) -> None:
        for pending in ended:
            if pending.waiter is not None and not pending.waiter.done():
                pending.waiter.set_result(None)

    def _attach(self) -> None:
        assert self._socket is not None
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def _write(self, data: bytes) -> None:
        if not data or self._socket is None:
            return
        if not self._unsent:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self._lose()
                return
        if data:
            self._unsent += data
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        assert self._socket is not None
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._lose()
            return
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data, descriptors = receive(self._socket)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._lose()
            return
        self._wake(self._session.received(data, descriptors))
        if not self._welcomed.done():
            if self._session.failed is not None:
                self._welcomed.set_exception(self._session.failed)
            elif self._session.welcome is not None:
                self._welcomed.set_result(None)

    def _detach(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
        self._unsent.clear()
        self._session.broken()

    def _lose(self) -> None:
        self._detach()
        if not self._welcomed.done():
            self._welcomed.set_exception(unreachable(self._session.address, self._patience))
        elif self._reconnecting is None and not self._closed:
            self._reconnecting = self._loop.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        began, pause = time.monotonic(), RETRY_FIRST
        try:
            while not self._closed:
                try:
                    self._socket = connected_to(self._name)
                except OSError:
                    if time.monotonic() - began >= self._patience:
                        self._wake(
                            self._session.fail(
                                unreachable(self._session.address, self._patience), final=False
                            )
                        )
                        return
                    await asyncio.sleep(pause)  # nothing tells when a controller is back
                    pause = min(2 * pause, RETRY_LAST)
                    continue
                self._attach()
                self._write(self._session.hello() + self._session.repeated())
                return
        finally:
            self._reconnecting = None

    def give_up(self, pending: LocalPending) -> None:
        body = self._session.withdraw(pending)
        if body is not None and self._socket is not None and not self._closed:
            self._write(self._session.request(body, 30)[1])

    def _released_somewhere(self) -> None:
        """Called by finalizers, in any thread: the loop tells the controller when it comes to it."""
        if self._pid == os.getpid() and not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell_released)

    def _tell_released(self) -> None:
        if not self._closed and self._socket is not None and self._session.failed is None:
            self._write(self._session.released())

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        connected, self._socket = self._socket, None
        if connected is not None and not self._loop.is_closed():
            self._loop.remove_reader(connected.fileno())
            self._loop.remove_writer(connected.fileno())
        self._detach()
        self._wake(self._session.fail(QueueError("this client was closed while the request was under way")))
        part(connected, self._session, self._pins)
