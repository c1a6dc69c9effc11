"""The client's half: payload to and from the arenas of one storage unit."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future

import numpy as np

from ..errors import Closed, Corrupt, Malformed, StorageLost, Timeout, named
from . import ucx_runtime
from .receive_buffers import ReceiveBuffers
from .ucx_connection import (
    Broken,
    Checksum,
    Connection,
    Done,
    Go,
    Message,
    ReadRequest,
    Refused,
    WriteRequest,
    digest,
    layout,
    pieces,
)

_ATTEMPTS = 3  # UCX now and then loses a handshake; a second one succeeds
_CONNECT = 10.0  # seconds for one attempt
_CONNECTIONS = 2  # to one unit at a time; a request has a connection to itself
_CLOSE_TIMEOUT = 20.0  # seconds


class UcxTransport:
    """Moves bytes between this process and a `UcxServer`. Thread-safe; nothing is sent before the first call.

    Futures end with a result or an error of this package, within the timeout and a little: `StorageLost` when
    the unit cannot be reached, `Unauthorized` when it refuses the token, `Timeout`, `TooLarge`, `Corrupt`, or
    what its memory says. A request whose connection breaks is repeated on another; both kinds bear that.

    Args:
        host: numeric address or name of the unit's host.
        unit: its number, for messages.
        buffers: where payload is received.

    Raises:
        UcxUnusable: UCX is not installed or does not start here.
    """

    def __init__(
        self, host: str, port: int, *, token: str, unit: int = -1, buffers: ReceiveBuffers | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._unit = unit
        self._buffers = buffers or ReceiveBuffers()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._turns = asyncio.Semaphore(_CONNECTIONS)
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._runtime = ucx_runtime.acquire()

    def write(
        self, grant: int, arena: int, start: int, stop: int, block: np.ndarray, *, timeout: float
    ) -> "Future[None]":
        """Writes `block` (uint8, ``[stop - start]``) to its range. Leave it be until the future ends."""
        if block.nbytes != stop - start or block.dtype != np.uint8 or not block.flags.c_contiguous:
            raise Malformed(f"a block of {block.nbytes} bytes ({block.dtype}) for a range of {stop - start}")

        async def write(connection: Connection, until: float) -> None:
            request = WriteRequest(grant, arena, start, stop, self._left(until))
            await connection.tell(request, until)
            await _expect(connection, Go, until)
            sum_ = asyncio.ensure_future(digest([block]))  # meanwhile
            try:
                await connection.send(block, until)
            finally:
                await asyncio.wait({sum_})
            await connection.tell(Checksum(sum_.result()), until)
            await _expect(connection, Done, until)

        return self._start(write, timeout)

    def read(self, ranges: Sequence[tuple[int, int, int]], *, timeout: float) -> "Future[list[np.ndarray]]":
        """The bytes of each ``(arena, start, stop)``: uint8, 64-byte aligned, in memory that is reused when
        the last view of them is gone.
        """
        wanted = list(ranges)
        starts, total = layout(wanted)
        sizes = [stop - start for _, start, stop in wanted]

        async def read(connection: Connection, until: float) -> list[np.ndarray]:
            await connection.tell(ReadRequest(wanted, self._left(until)), until)
            await _expect(connection, Go, until)
            buffer = self._buffers.take(total)
            came: list[np.ndarray] = []
            for first, last in pieces(sizes):
                end = starts[first] + sizes[first] if last - first == 1 else (*starts, total)[last]
                if end > starts[first]:
                    came.append(buffer[starts[first] : end])
                    await connection.receive(came[-1], until)
            if (await _expect(connection, Checksum, until)).xxh3 != await digest(came):
                raise Corrupt(f"{total} bytes from {self._where} do not match their checksum")
            return [buffer[at : at + size] for at, size in zip(starts, sizes, strict=True)]

        return self._start(read, timeout)

    def ping(self, *, timeout: float) -> "Future[None]":
        """Ends without an error when the unit answers and accepts the token."""

        async def ping(connection: Connection, until: float) -> None:
            await connection.tell(ReadRequest([], self._left(until)), until)
            await _expect(connection, Go, until)
            await _expect(connection, Checksum, until)

        return self._start(ping, timeout)

    def close(self) -> None:
        """Ends what is under way and returns when nothing uses its buffers any more. Idempotent."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
        try:
            self._runtime.submit(self._close()).result(_CLOSE_TIMEOUT)
        finally:
            self._buffers.close()
            ucx_runtime.release(self._runtime)

    # -- the runtime's loop ----------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        unit = f"storage unit {self._unit}" if self._unit >= 0 else "the storage unit"
        return f"{unit} at {self._host}:{self._port}, over UCX,"

    def _left(self, until: float) -> float:
        return max(0.0, until - self._runtime.loop.time())

    def _start[T](self, work: Callable[[Connection, float], Awaitable[T]], timeout: float) -> "Future[T]":
        with self._lock:
            if self._closed or self._pid != os.getpid():
                raise Closed("this transport is closed, or was made before this process was forked")
            return self._runtime.submit(self._tracked(work, self._runtime.loop.time() + timeout))

    async def _tracked[T](self, work: Callable[[Connection, float], Awaitable[T]], until: float) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await self._attempt(work, until)
        finally:
            self._tasks.discard(task)

    async def _attempt[T](self, work: Callable[[Connection, float], Awaitable[T]], until: float) -> T:
        try:
            async with asyncio.timeout_at(until):
                await self._turns.acquire()
        except TimeoutError as error:
            raise Timeout(f"{self._where} was busy with earlier requests until the deadline") from error
        try:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return await self._once(work, until)
                except Broken as error:
                    if attempt == _ATTEMPTS or not self._left(until):
                        raise StorageLost(
                            f"{self._where} cannot be reached ({error})",
                            unit=self._unit,
                            address=f"{self._host}:{self._port}",
                        ) from error
            raise AssertionError("the last attempt returns or raises")
        finally:
            self._turns.release()

    async def _once[T](self, work: Callable[[Connection, float], Awaitable[T]], until: float) -> T:
        connection = await self._connection(until)
        try:
            result = await work(connection, until)
        except Timeout as error:
            raise Timeout(f"{self._where} did not answer in time") from error
        except _Refusal as refusal:
            self._idle.append(connection)
            raise refusal.error from None
        except BaseException:
            self._drop(connection)
            raise
        self._idle.append(connection)
        return result

    async def _connection(self, until: float) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
            self._drop(connection)
        api = self._runtime.api
        try:
            endpoint = api.UCXEndpoint.create(self._runtime.worker, self._host, self._port, True)
        except (api.UCXError, RuntimeError, ValueError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        connection = Connection(self._runtime, endpoint)
        self._all.add(connection)
        soon = min(until, self._runtime.loop.time() + _CONNECT)
        try:
            await connection.introduce(self._token, soon)
        except Timeout as error:
            self._drop(connection)
            raise Broken(f"no UCX handshake within {_CONNECT:g} s") from error
        except BaseException:
            self._drop(connection)
            raise
        return connection

    def _drop(self, connection: Connection) -> None:
        self._all.discard(connection)
        connection.abort()

    async def _close(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in list(self._all):
            self._drop(connection)


class _Refusal(Exception):
    """The server's own error; the connection is as good as before."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message)
        self.error = named(refused.kind, refused.message, refused.details)


async def _expect[M: Message](connection: Connection, kind: type[M], until: float) -> M:
    message = await connection.hear(until)
    if isinstance(message, Refused):
        raise _Refusal(message)
    if not isinstance(message, kind):
        raise Malformed(f"the unit answered {type(message).__name__} where {kind.__name__} was expected")
    return message
