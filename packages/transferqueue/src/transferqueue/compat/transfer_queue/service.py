"""The catalog's listening side: a thread with an event loop in the process that called `init` first.

A frame is four bytes of length and a msgpack message; an answer begins with a byte that says whether it is
an error. One thread owns the catalog. A `Take` or `News` that has to wait is parked here and woken by the
write that it waits for; it ends with the connection that asked.
"""

import asyncio
import contextlib
import hmac
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from ...errors import InvalidArgument, QueueError
from . import messages as m
from .catalog import Catalog, Session
from .packing import pack, unpack

_decode = msgspec.msgpack.Decoder(m.AnyRequest).decode
_encode = msgspec.msgpack.Encoder().encode


class CatalogServer:
    """A running catalog. `close` ends it; idempotent.

    Args:
        catalog: its state.
        welcome: what every client is told when it connects.
        token: that clients have to present, or None.

    Attributes:
        address: ``tcp://host:port``.
    """

    def __init__(self, catalog: Catalog, welcome: m.Welcome, token: str | None, host: str, port: int) -> None:
        self._catalog = catalog
        self._welcome = welcome
        self._token = token
        self._sessions: dict[str, Session] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        started: Future[int] = Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(host, port, started)),
            name="transfer_queue-catalog",
            daemon=True,
        )
        self._thread.start()
        try:
            bound = started.result(30)
        except OSError as error:
            raise InvalidArgument(f"the catalog cannot listen on {host}:{port}: {error}") from error
        self.address = f"tcp://{f'[{host}]' if ':' in host else host}:{bound}"

    def update_welcome(self, welcome: m.Welcome) -> None:
        """Tells clients that connect from now on something else."""
        self._welcome = welcome

    def close(self) -> None:
        """Ends all connections and the thread."""
        if self._thread.is_alive() and self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _run(self, host: str, port: int, started: "Future[int]") -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        try:
            server = await asyncio.start_server(self._accept, host, port, limit=1 << 20)
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        server.close()
        for writer in self._serving.values():
            writer.transport.abort()  # its task sees the connection end
        if self._serving:
            await asyncio.wait(list(self._serving), timeout=5)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        try:
            await self._serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client is gone; its session has ended with its last connection
        finally:
            del self._serving[task]
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = await self._greet(reader, writer)
        if session is None:
            return
        session.connections += 1
        try:
            while True:
                answer = await self._answered(session, await _read(reader), reader)
                if answer is None:
                    return
                try:
                    await _write(writer, answer.data)
                except ConnectionError:
                    self._undelivered(session, answer)
                    raise
        finally:
            session.connections -= 1
            if not session.connections:
                self._sessions = {name: one for name, one in self._sessions.items() if one is not session}
                for partition in [] if session.left else self._catalog.leave(session):
                    self._wake(partition)

    async def _answered(
        self, session: Session, request: m.AnyRequest, reader: asyncio.StreamReader
    ) -> "_Answer | None":
        """The answer; None if the client left while it was waiting for it."""
        if not (isinstance(request, m.Take | m.News) and request.patience > 0):
            return await self._answer(session, request)
        answer = asyncio.ensure_future(self._answer(session, request))
        # A client says nothing while it waits, so that whatever can be read means that it is gone.
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                return answer.result()
            if answer.done():
                self._undelivered(session, answer.result())
            return None
        finally:
            for task in (answer, gone):
                task.cancel()
            await asyncio.wait([answer, gone])

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Session | None:
        hello = await _read(reader)
        presented = hello.token or "" if isinstance(hello, m.Hello) else ""
        if not isinstance(hello, m.Hello) or not hmac.compare_digest(
            presented.encode(), (self._token or "").encode()
        ):
            await _write(writer, _failed("Unauthorized", "the token is missing or wrong"))
            return None
        await _write(writer, b"\0" + _encode(self._welcome))
        return self._sessions.setdefault(hello.session, Session())

    def _undelivered(self, session: Session, answer: "_Answer") -> None:
        """Nobody knows of what was taken; it need not wait for the end of the session."""
        if answer.partition is not None:
            self._catalog.give_up(session, answer.ticket)
            self._wake(answer.partition)

    async def _answer(self, session: Session, request: Any) -> "_Answer":
        try:
            found = await self._handle(session, request)
        except QueueError as error:
            return _Answer(_failed(type(error).__name__, str(error)))
        taken = found if isinstance(request, m.Take) else None
        return _Answer(b"\0" + _encode(found), *((taken.partition, taken.ticket) if taken else ()))

    async def _handle(self, session: Session, request: Any) -> Any:
        catalog = self._catalog
        match request:
            case m.Take(partition, fields, task, count, config, patience, done):
                wanted = unpack(config)
                taken = await self._until(
                    partition,
                    patience,
                    lambda: catalog.take(session, partition, fields, task, count, wanted, done),
                )
                if taken is None:
                    return m.Places(partition, [], [], [], b"", pack([]))
                return self._woken(taken, partition)
            case m.News(partition, seen, patience):
                news = await self._until(partition, patience, lambda: self._changes(partition, seen))
                return seen if news is None else news
            case m.Retrieve(partition, keys, create, strict, fields):
                return catalog.retrieve(partition, keys, create, strict, fields)
            case m.Allocate(partition, count, fields):
                return catalog.allocate(partition, count, fields)
            case m.Insert(partition, rows, fields):
                return self._woken(catalog.insert(partition, rows, fields), partition)
            case m.Commit(indexes, partitions, rows, fields, metas):
                return self._woken(catalog.commit(indexes, partitions, rows, fields, metas), partitions)
            case m.RowsOf(partition, keys):
                return catalog.rows_of(partition, keys)
            case m.CommitKeys(partition, keys, known, rows, fields, metas):
                return self._woken(
                    catalog.commit_keys(partition, keys, known, rows, fields, metas), partition
                )
            case m.Locate(indexes, partitions, fields):
                return catalog.locate(indexes, partitions, fields)
            case m.Scan(partition, fields):
                return catalog.scan(partition, fields)
            case m.Ack(partition, task, indexes):
                return catalog.ack(session, partition, task, indexes)
            case m.SetMeta(indexes, partitions, metas):
                return catalog.set_meta(indexes, partitions, metas)
            case m.Clear(indexes, partitions):
                return self._woken(catalog.clear(indexes, partitions), partitions)
            case m.ClearPartition(partition):
                return self._woken(catalog.clear_partition(partition), partition)
            case m.Consumption(partition, task):
                return catalog.consumption(partition, task)
            case m.Production(partition, fields):
                return catalog.production(partition, fields)
            case m.Reset(partition, task):
                if partition in catalog.partitions:
                    catalog.partitions[partition].reset(task)
                return self._woken(partition in catalog.partitions, partition)
            case m.Names():
                return list(catalog.partitions)
            case m.KeysOf(partition, indexes):
                return catalog.keys_of(partition, indexes)
            case m.ListKeys(partition):
                return pack(catalog.list_keys(partition))
            case m.Drained(partition, task, config):
                return catalog.drained(partition, task, unpack(config))
            case m.InTurn(partition, task, config):
                return catalog.in_turn(partition, task, unpack(config))
            case m.Dump():
                return catalog.dump()
            case m.Load(state, rows):
                return self._woken(catalog.load(state, rows), list(self._waiting))
            case m.Goodbye():
                session.left = True
                return None
            case _:
                raise InvalidArgument("the connection has said hello already")

    def _changes(self, partition: str, seen: int) -> int | None:
        now = self._catalog.partitions[partition].changes if partition in self._catalog.partitions else 0
        return None if now == seen else now

    async def _until[T](self, partition: str, patience: float, attempt: Callable[[], T | None]) -> T | None:
        """The first answer of `attempt` that is not None, asked again whenever the partition changes; None
        after `patience` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while (found := attempt()) is None and loop.time() < deadline:
            news: asyncio.Future[None] = loop.create_future()
            waiting = self._waiting.setdefault(partition, set())
            waiting.add(news)
            try:
                await asyncio.wait([news], timeout=deadline - loop.time())
            finally:
                waiting.discard(news)
                if not waiting and self._waiting.get(partition) is waiting:
                    del self._waiting[partition]
        return found

    def _woken[T](self, answer: T, partitions: str | list[str]) -> T:
        for name in [partitions] if isinstance(partitions, str) else set(partitions):
            self._wake(name)
        return answer

    def _wake(self, partition: str) -> None:
        for news in self._waiting.get(partition, ()):
            if not news.done():
                news.set_result(None)


class _Answer(NamedTuple):
    """What to send, and what was taken by it."""

    data: bytes
    partition: str | None = None
    ticket: int = 0


def _failed(kind: str, message: str) -> bytes:
    return b"\1" + _encode(m.Failed(kind, message))


async def _read(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > m.MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {size} bytes is none of this protocol")
    try:
        return _decode(await reader.readexactly(size))
    except msgspec.DecodeError as error:
        raise ConnectionError(f"not a message of this protocol: {error}") from error


def _write(writer: asyncio.StreamWriter, answer: bytes) -> Awaitable[None]:
    writer.write(len(answer).to_bytes(4, "little") + answer)
    return writer.drain()
