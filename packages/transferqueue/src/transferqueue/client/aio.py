"""The awaitable client: the same calls as `client`, over the same operations. Arguments and errors are
described there.
"""

import asyncio
import os
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Unpack

import numpy as np

from ..errors import Closed, QueueError, StaleLease, Timeout
from ..introspection.statistics import StoreStats
from ..samplers import Sampler
from ..server.launch import Server
from ..sizes import parse_bytes
from ..values.columns import Column
from ..values.encode import Fields, Shared
from ..wire.channel import AwaitedChannel
from ..wire.local_async import AsyncLocalChannel
from ..wire.steps import Begun, begin, run_async
from .blocking import _CONTROL_TIMEOUT, Samples, _leave
from .calls import Choose, Ledger, Loan, PartitionCalls, Ranks, wanted_of
from .servers import Contact, Servers, goodbye


async def connect_async(
    address: "str | Server",
    token: str | None = None,
    *,
    transport: str = "auto",
    server_key: str | None = None,
    timeout: float = 10.0,
    reconnect_seconds: float = 5.0,
) -> "AsyncClient":
    """As `connect`, for use in the event loop it is called in."""
    contact = Contact(address, token, reconnect_seconds, transport, server_key)
    if contact.local is not None and transport in ("auto", "shm"):
        servers = await _over_memory(contact, contact.local, timeout)
        if servers is not None:
            return AsyncClient(servers)
    remote = contact.remote()
    try:
        try:
            async with asyncio.timeout(timeout):
                welcome = await asyncio.wrap_future(remote.controller.welcome)
        except TimeoutError:
            raise Timeout(
                f"no welcome from {contact.address} within {timeout:g} s; is a transferqueue listening there?"
            ) from None
        if transport in ("auto", "shm"):
            servers = await _over_memory(contact, welcome.local, timeout)
            if servers is not None:
                await asyncio.to_thread(_leave, remote.link, remote.controller)
                return AsyncClient(servers)
        return AsyncClient(await asyncio.to_thread(contact.over_network, remote, welcome))
    except BaseException:
        await asyncio.to_thread(remote.link.close)
        raise


async def _over_memory(contact: Contact, name: str, timeout: float) -> Servers | None:
    """The servers over shared memory; None if they are not on this host."""
    session, pins, arenas = contact.session()
    try:
        channel = AsyncLocalChannel(name, session, pins, contact.patience)
    except OSError as error:
        contact.refused(error)
        return None
    try:
        return contact.over_memory(channel, await channel.wait_welcome(timeout), pins, arenas)
    except BaseException:
        channel.close()
        raise


class AsyncClient:
    """A connection to a store; made by `connect_async`. An async context manager that closes it."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._channel: AwaitedChannel = servers.channel  # type: ignore[assignment]  # made to be awaited
        self._closed = False
        self._finish = weakref.finalize(servers, servers.channel.close)  # if nobody closes it
        weakref.finalize(servers, servers.transport.close)

    @property
    def address(self) -> str:
        return self._servers.address

    async def partition(
        self,
        name: str,
        tasks: Mapping[str, Sequence[str]] | None = None,
        *,
        max_samples: int | None = None,
        max_bytes: int | str | None = None,
        length_field: str | None = None,
        max_staleness: int | None = None,
    ) -> "AsyncPartition":
        """See `Client.partition`."""
        limit = None if max_bytes is None else parse_bytes(max_bytes)
        steps = self._servers.open(
            name, tasks, max_samples, limit, length_field, max_staleness, _CONTROL_TIMEOUT
        )
        return AsyncPartition(await run_async(self._channel, steps))

    async def snapshot(self, folder: "str | os.PathLike[str]", *, timeout: float = 600.0) -> None:
        """See `Client.snapshot`."""
        await run_async(self._channel, self._servers.snapshot(folder, timeout))

    async def restore(self, folder: "str | os.PathLike[str]", *, timeout: float = 600.0) -> None:
        """See `Client.restore`."""
        await run_async(self._channel, self._servers.restore(folder, timeout))

    @property
    def transport(self) -> str:
        """See `Client.transport`."""
        return self._servers.transport.name

    @property
    def transport_notes(self) -> tuple[str, ...]:
        """See `Client.transport_notes`."""
        return self._servers.notes

    async def stats(self, timeout: float = _CONTROL_TIMEOUT) -> StoreStats:
        """See `Client.stats`."""
        return await run_async(self._channel, self._servers.stats(timeout))

    async def close(self) -> None:
        """Returns what this client has leased, and disconnects. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._channel.reachable(self._servers.controller):
                await run_async(self._channel, goodbye(self._servers.controller))
        except QueueError:
            return  # a store that is gone needs no goodbye
        finally:
            if self._channel.local:
                self._channel.close()
            else:
                await asyncio.to_thread(self._channel.close)
            await asyncio.to_thread(self._servers.transport.close)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncBatch(Samples):
    """See `Batch`."""

    async def ack(self, timeout: float = _CONTROL_TIMEOUT) -> None:
        """See `Batch.ack`."""
        self._check_not_returned()
        if not self.settled:
            await run_async(self._channel, self._calls.ack(self._lease, timeout))
            self.settled = True

    async def nack(self, timeout: float = _CONTROL_TIMEOUT) -> None:
        """See `Batch.nack`."""
        if not self.settled:
            await run_async(self._channel, self._calls.nack(self._lease, timeout))
            self.settled = self._returned = True

    async def extend_lease(self, seconds: float, timeout: float = _CONTROL_TIMEOUT) -> None:
        """See `Batch.extend_lease`."""
        await run_async(self._channel, self._calls.extend(self._lease, seconds, timeout))


class AsyncPartition:
    """See `Partition`."""

    def __init__(self, calls: PartitionCalls) -> None:
        self._calls = calls
        self._link: AwaitedChannel = calls.servers.channel  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return self._calls.name

    @property
    def tasks(self) -> dict[str, tuple[str, ...]]:
        """Name of each task -> the fields it needs."""
        return dict(self._calls.tasks)

    async def closed(self) -> bool:
        """Whether the stream has been ended."""
        return await run_async(self._link, self._calls.closed(_CONTROL_TIMEOUT))

    async def put(
        self,
        fields: Fields,
        *,
        groups: Sequence[str | None] | None = None,
        version: int | Sequence[int] = 0,
        priority: int | Sequence[int] = 0,
        shared: Shared | None = None,
        group_sizes: Mapping[str, int] | None = None,
        ticket: int | None = None,
        timeout: float = 60.0,
    ) -> np.ndarray:
        """See `Partition.put`."""
        return await run_async(
            self._link,
            self._calls.put(fields, groups, version, priority, shared, group_sizes, ticket, timeout),
        )

    async def update(self, ids: Sequence[int] | np.ndarray, fields: Fields, *, timeout: float = 60.0) -> None:
        """See `Partition.update`."""
        await run_async(self._link, self._calls.update(ids, fields, timeout))  # type: ignore[arg-type]

    async def close_group(
        self, key: str, count: int, tombstones: int = 0, *, timeout: float = _CONTROL_TIMEOUT
    ) -> None:
        """See `Partition.close_group`."""
        await run_async(self._link, self._calls.close_group(key, count, tombstones, timeout))

    async def fetch(
        self,
        task: str,
        batch_size: int,
        *,
        sampler: "Sampler | Choose | None" = None,
        max_priority: int | None = None,
        min_version: int | None = None,
        max_staleness: int | None = None,
        fields: Sequence[str] | None = None,
        lease_seconds: float = 600.0,
        timeout: float = 30.0,
        partial: bool = False,
        at_least: int | None = None,
        **ranks: Unpack[Ranks],
    ) -> AsyncBatch:
        """See `Partition.fetch`. Cancelling the task gives the request up: nothing stays leased."""
        wanted, choose = wanted_of(
            task, batch_size, sampler, at_least, max_priority, min_version, max_staleness, ranks
        )
        steps = self._calls.fetch(wanted, fields, lease_seconds, timeout, partial, choose)
        return AsyncBatch(self._calls, await run_async(self._link, steps))

    async def stream(
        self,
        task: str,
        batch_size: int,
        *,
        sampler: "Sampler | Choose | None" = None,
        max_priority: int | None = None,
        min_version: int | None = None,
        max_staleness: int | None = None,
        fields: Sequence[str] | None = None,
        lease_seconds: float = 600.0,
        timeout: float = 86_400.0,
        prefetch: int = 0,
        **ranks: Unpack[Ranks],
    ) -> AsyncGenerator[AsyncBatch, None]:
        """See `Partition.stream`. Use ``contextlib.aclosing`` to have the batch at hand returned at once."""
        wanted, choose = wanted_of(
            task, batch_size, sampler, None, max_priority, min_version, max_staleness, ranks
        )

        def ask() -> Begun[Loan]:
            steps = self._calls.fetch(wanted, fields, lease_seconds, timeout, False, choose)
            return begin(self._link, steps)

        ahead: deque[Begun[Loan]] = deque()
        try:
            while True:
                try:
                    loan = await run_async(self._link, ahead.popleft() if ahead else ask())
                except Closed:
                    return
                while len(ahead) < prefetch:
                    ahead.append(ask())
                batch = AsyncBatch(self._calls, loan)
                try:
                    yield batch
                except BaseException:  # GeneratorExit or a cancellation
                    await _return(batch)
                    raise
        finally:
            for begun in ahead:
                begun.withdraw()

    async def admit(
        self, version: int, samples: int, *, seconds: float = 600.0, timeout: float = _CONTROL_TIMEOUT
    ) -> int:
        """See `Partition.admit`."""
        return await run_async(self._link, self._calls.admit(version, samples, seconds, timeout))

    async def advance(self, version: int, *, timeout: float = _CONTROL_TIMEOUT) -> None:
        """See `Partition.advance`."""
        await run_async(self._link, self._calls.advance(version, timeout))

    async def get(
        self,
        ids: Sequence[int] | np.ndarray,
        fields: Sequence[str] | None = None,
        *,
        timeout: float = _CONTROL_TIMEOUT,
    ) -> dict[str, Column]:
        """See `Partition.get`."""
        return await run_async(self._link, self._calls.get(ids, fields, timeout))  # type: ignore[arg-type]

    async def drop(
        self, ids: Sequence[int] | np.ndarray, reason: str, *, timeout: float = _CONTROL_TIMEOUT
    ) -> None:
        """See `Partition.drop`."""
        await run_async(self._link, self._calls.drop(ids, reason, timeout))  # type: ignore[arg-type]

    async def ledger(self, task: str, *, timeout: float = _CONTROL_TIMEOUT) -> Ledger:
        """See `Partition.ledger`."""
        return await run_async(self._link, self._calls.ledger(task, timeout))

    async def close(self, *, timeout: float = _CONTROL_TIMEOUT) -> None:
        """See `Partition.close`."""
        await run_async(self._link, self._calls.close(timeout))

    def __repr__(self) -> str:
        return f"AsyncPartition({self.name!r}, tasks {sorted(self._calls.tasks)})"


async def _return(batch: AsyncBatch) -> None:
    try:
        await batch.nack()
    except StaleLease:
        return  # it has lapsed, so the samples are back already
