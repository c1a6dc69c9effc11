"""The storage unit's half: writes payload of other hosts into arenas, and sends it from there."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import Corrupt, InvalidArgument, Malformed, QueueError, Timeout, TooLarge
from . import ucx_runtime
from .receive_buffers import ReceiveBuffers
from .ucx_connection import (
    Broken,
    Checksum,
    Connection,
    Done,
    Go,
    ReadRequest,
    WriteRequest,
    as_refusal,
    digest,
    layout,
    pieces,
)

log = logging.getLogger("transferqueue")

_HANDSHAKE = 10.0  # seconds
_LONGEST = 600.0  # seconds a request may take, whatever its sender says
_MAX_CONNECTIONS = 256
_MAX_STRANGERS = 32  # connections whose handshake is not over
_CLOSE_TIMEOUT = 20.0  # seconds


class Memory(Protocol):
    """What the server is given access to. Called on the runtime's thread: nothing here may block for long.

    A QueueError that a method raises is what the client gets.
    """

    def room(self, grant: int, arena: int, start: int, stop: int) -> np.ndarray:
        """Where to write bytes `start` to `stop` of an arena: uint8, writable, of that many bytes. Raises
        when the grant does not cover them.
        """
        ...

    def written(self, grant: int, arena: int, start: int, stop: int) -> None:
        """They are there and match their checksum. Raises when the grant is over by now."""
        ...

    def bytes_of(self, arena: int, start: int, stop: int) -> np.ndarray:
        """Bytes `start` to `stop` of an arena: uint8. Raises when there are none."""
        ...


class UcxServer:
    """Listens until closed. UCX binds every address of the host and cannot be told otherwise, so a token is
    required: a peer that does not prove it within 10 s is disconnected, without having seen anything.

    Args:
        memory: answers for the arenas.
        token: what clients have to know. It never travels.
        port: 0: any.
        max_bytes: the most one request may move.

    Raises:
        InvalidArgument: no token.
        UcxUnusable: UCX is not installed or does not start, or the port is taken.
    """

    def __init__(self, memory: Memory, *, token: str, port: int = 0, max_bytes: int = 1 << 30) -> None:
        if not token:
            raise InvalidArgument(
                "UCX listens on every address of the host, so it wants a token; start the store with one"
            )
        self._memory = memory
        self._token = token
        self._max_bytes = max_bytes
        self._buffers = ReceiveBuffers(64 << 20)
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._writing: dict[Connection, int] = {}
        self._idle = asyncio.Event()
        self._refusals: Counter[str] = Counter()
        self._closing = False
        self._lock = threading.Lock()
        self._closed = False
        self._runtime = ucx_runtime.acquire()
        try:
            self._listener: Any = self._runtime.submit(self._listen(port)).result(_CLOSE_TIMEOUT)
        except (self._runtime.api.UCXError, RuntimeError) as error:
            ucx_runtime.release(self._runtime)
            raise ucx_runtime.UcxUnusable(f"UCX cannot listen on port {port or 'any'}: {error}") from error
        self.port: int = self._listener.port

    def revoke(self, grant: int, timeout: float = 5.0) -> None:
        """Returns when nothing is being written under a grant any more, by disconnecting who does. Call it
        after `Memory.room` has begun to refuse the grant, and before its memory goes to another.

        Raises:
            Timeout: UCX did not let go; the memory must not be used.
        """
        try:
            self._runtime.submit(self._revoke(grant)).result(timeout)
        except TimeoutError as error:
            raise Timeout(f"UCX did not stop writing under grant {grant} within {timeout:g} s") from error

    def close(self) -> None:
        """Disconnects everyone and returns when nothing uses the memory any more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._runtime.submit(self._close()).result(_CLOSE_TIMEOUT)
        finally:
            self._buffers.close()
            ucx_runtime.release(self._runtime)

    # -- the runtime's loop ----------------------------------------------------------------------------------

    async def _listen(self, port: int) -> Any:
        api = self._runtime.api
        return api.UCXListener.create(
            worker=self._runtime.worker,
            port=port,
            cb_func=_arrived,
            cb_args=(self._runtime.loop, self._accept),
            deliver_endpoint=True,
        )

    def _accept(self, endpoint: Any) -> None:
        connection = Connection(self._runtime, endpoint)
        strangers = sum(not known.peer_proved for known in self._connections)
        if self._closing or len(self._connections) >= _MAX_CONNECTIONS or strangers >= _MAX_STRANGERS:
            self._complain("too many connections", f"{len(self._connections)} connections are open")
            connection.abort()
            return
        self._connections[connection] = asyncio.ensure_future(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.welcome(self._token, self._until(_HANDSHAKE))
            while not self._closing:
                await self._answer(connection)
        except Broken:
            pass  # it left
        except QueueError as error:
            self._complain(type(error).__name__, str(error))
        finally:
            connection.abort()
            self._connections.pop(connection, None)

    async def _answer(self, connection: Connection) -> None:
        request = await connection.hear(None)
        if not isinstance(request, WriteRequest | ReadRequest):
            raise Malformed(f"{type(request).__name__} is no request")
        until = self._until(min(max(request.timeout, 0.0), _LONGEST))
        try:
            if isinstance(request, WriteRequest):
                await self._write(connection, request, until)
            else:
                await self._read(connection, request, until)
        except QueueError as error:
            if not connection.alive:
                raise
            await connection.tell(as_refusal(error), until)

    async def _write(self, connection: Connection, request: WriteRequest, until: float) -> None:
        where = (request.grant, request.arena, request.start, request.stop)
        self._check_size(request.stop - request.start)
        room = self._memory.room(*where)
        if room.nbytes != request.stop - request.start:
            raise Malformed(f"there is room for {room.nbytes} of {request.stop - request.start} bytes")
        self._writing[connection] = request.grant
        try:
            await connection.tell(Go(), until)
            await connection.receive(room, until)
            came = await connection.hear(until)
            if not isinstance(came, Checksum) or came.xxh3 != await digest([room]):
                raise Corrupt(f"{room.nbytes} bytes for arena {request.arena} do not match their checksum")
        finally:
            del self._writing[connection]
            if not self._writing:
                self._idle.set()
        self._memory.written(*where)
        await connection.tell(Done(), until)

    async def _read(self, connection: Connection, request: ReadRequest, until: float) -> None:
        if any(stop < start for _, start, stop in request.ranges):
            raise Malformed("a range ends before it begins")
        self._check_size(sum(stop - start for _, start, stop in request.ranges))
        found = [self._memory.bytes_of(*place) for place in request.ranges]
        if [part.nbytes for part in found] != [stop - start for _, start, stop in request.ranges]:
            raise Malformed("the ranges are not all there")
        await connection.tell(Go(), until)
        sent: list[np.ndarray] = []
        for first, last in pieces([part.nbytes for part in found]):
            piece = found[first] if last - first == 1 else self._packed(request.ranges, found, first, last)
            if piece.nbytes:
                await connection.send(piece, until)
                sent.append(piece)
        await connection.tell(Checksum(await digest(sent)), until)

    def _packed(
        self, ranges: Sequence[tuple[int, int, int]], found: Sequence[np.ndarray], first: int, last: int
    ) -> np.ndarray:
        """Neighbours in one message, each where the reader's layout has it."""
        starts, total = layout(ranges[first:last])
        piece = self._buffers.take(total)
        for at, part in zip(starts, found[first:last], strict=True):
            piece[at : at + part.nbytes] = part
            piece[at + part.nbytes : at - (-part.nbytes // 64) * 64] = 0  # no stale memory leaves the process
        return piece

    def _check_size(self, nbytes: int) -> None:
        if not 0 <= nbytes <= self._max_bytes:
            raise TooLarge(
                f"a request for {nbytes} bytes; 0 to {self._max_bytes} are moved at once",
                nbytes=nbytes,
                limit=self._max_bytes,
            )

    async def _revoke(self, grant: int) -> None:
        while writers := [one for one, under in self._writing.items() if under == grant]:
            self._idle.clear()
            for connection in writers:
                connection.abort()
            tasks = {self._connections[one] for one in writers if one in self._connections}
            if tasks:
                await asyncio.wait(tasks)

    async def _close(self) -> None:
        self._closing = True
        self._listener = None
        for connection, task in list(self._connections.items()):
            connection.abort()
            task.cancel()
        if self._connections:
            await asyncio.wait(set(self._connections.values()))

    def _until(self, timeout: float) -> float:
        return self._runtime.loop.time() + timeout

    def _complain(self, kind: str, message: str) -> None:
        """Says the first time that peers were refused for this reason, and then every hundredth."""
        self._refusals[kind] += 1
        if self._refusals[kind] % 100 == 1:
            log.warning("refused a UCX peer (%d so far): %s: %s", self._refusals[kind], kind, message)


def _arrived(endpoint: Any, loop: asyncio.AbstractEventLoop, accept: Callable[[Any], None]) -> None:
    """Called by UCX, on its own thread."""
    loop.call_soon_threadsafe(accept, endpoint)
