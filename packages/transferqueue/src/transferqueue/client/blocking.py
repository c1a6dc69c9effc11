"""The blocking client. All of it may be used from any number of threads."""

import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from ..errors import Closed, QueueError, StaleLease
from ..introspection.statistics import StoreStats
from ..samplers import Sampler
from ..server.launch import Server
from ..sizes import parse_bytes
from ..transport.base import Transport
from ..values.columns import Column
from ..values.encode import Fields, Shared
from ..values.restoring import restore, to_tensordict
from ..wire.channel import BlockingChannel
from ..wire.link import Link
from ..wire.local import LocalChannel
from ..wire.steps import Begun, begin, run
from .calls import Choose, Ledger, Loan, PartitionCalls, Ranks, wanted_of
from .servers import Contact, Servers, first_welcome, goodbye

_CONTROL_TIMEOUT = 30.0


def connect(
    address: "str | Server",
    token: str | None = None,
    *,
    transport: str = "auto",
    server_key: str | None = None,
    timeout: float = 10.0,
    reconnect_seconds: float = 5.0,
) -> "Client":
    """Connects to a store and returns when its controller has answered.

    Args:
        address: ``tcp://host:port`` of the controller, or a `Server` (whose token and key are then used).
        token: what the store was started with.
        transport: "auto" takes shared memory on the store's own host and ZeroMQ elsewhere; "shm" or "zmq"
            insist; "ucx" moves large payload by UCX if the store offers it and it works here, and else takes
            "zmq" and says why in `Client.transport_notes`.
        server_key: the public CURVE key of a store that encrypts.
        timeout: seconds to wait for the controller.
        reconnect_seconds: how long a server may be unreachable before requests to it fail with `StorageLost`
            or `ControllerLost`; shorter interruptions only delay them.

    Raises:
        Unauthorized: the token or the key is missing or wrong.
        ProtocolMismatch: the store speaks another version of the protocol.
        ControllerLost: nothing answers there.
    """
    contact = Contact(address, token, reconnect_seconds, transport, server_key)
    if contact.local is not None and transport in ("auto", "shm"):
        servers = _over_memory(contact, contact.local, timeout)
        if servers is not None:
            return Client(servers)
    remote = contact.remote()
    try:
        welcome = first_welcome(remote.controller.welcome, timeout, contact.address)
        if transport in ("auto", "shm"):
            servers = _over_memory(contact, welcome.local, timeout)
            if servers is not None:
                _leave(remote.link, remote.controller)
                return Client(servers)
        return Client(contact.over_network(remote, welcome))
    except BaseException:
        remote.link.close()
        raise


def _over_memory(contact: Contact, name: str, timeout: float) -> Servers | None:
    """The servers over shared memory; None if they are not on this host."""
    session, pins, arenas = contact.session()
    try:
        channel = LocalChannel(name, session, pins, contact.patience)
    except OSError as error:
        contact.refused(error)
        return None
    try:
        return contact.over_memory(channel, channel.wait_welcome(timeout), pins, arenas)
    except BaseException:
        channel.close()
        raise


def _leave(channel: BlockingChannel, controller: Any, transport: Transport | None = None) -> None:
    try:
        # The garbage collector may run in the link's own thread, which cannot wait for an answer.
        waits = not (isinstance(channel, Link) and channel.is_own_thread())
        if waits and channel.reachable(controller):
            run(channel, goodbye(controller))
    except QueueError:
        return  # a store that is gone needs no goodbye
    finally:
        channel.close()
        if transport is not None:
            transport.close()


class Client:
    """A connection to a store; made by `connect`. A context manager that closes it.

    It also closes when nothing refers to it, its partitions and batches any more, or the program ends.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._channel: BlockingChannel = servers.channel  # type: ignore[assignment]  # it was made to block
        self._finish = weakref.finalize(servers, _leave, self._channel, servers.controller, servers.transport)

    @property
    def address(self) -> str:
        return self._servers.address

    def partition(
        self,
        name: str,
        tasks: Mapping[str, Sequence[str]] | None = None,
        *,
        max_samples: int | None = None,
        max_bytes: int | str | None = None,
        length_field: str | None = None,
        max_staleness: int | None = None,
    ) -> "Partition":
        """Creates a partition, or opens the one that is there.

        Args:
            name: of the partition.
            tasks: name of each consumer group -> the fields it needs. None opens an existing partition.
            max_samples: samples it may hold; puts wait beyond it.
            max_bytes: payload bytes it may hold, a number or text such as "2GiB".
            length_field: the field whose length is the length of a sample, for length samplers: its
                elements, or the number itself where it holds integers (0 to 2**40).
            max_staleness: versions that a sample may lag behind the policy when it is started; see `admit`.

        Raises:
            SchemaMismatch: it exists with other tasks or limits.
            UnknownName: it does not exist and no tasks are given.
        """
        limit = None if max_bytes is None else parse_bytes(max_bytes)
        steps = self._servers.open(
            name, tasks, max_samples, limit, length_field, max_staleness, _CONTROL_TIMEOUT
        )
        return Partition(run(self._channel, steps))

    @property
    def transport(self) -> str:
        """How payload travels: "shm", "zmq" or "ucx"."""
        return self._servers.transport.name

    @property
    def transport_notes(self) -> tuple[str, ...]:
        """Why a faster transport is not used, if one was tried."""
        return self._servers.notes

    def snapshot(self, folder: "str | os.PathLike[str]", *, timeout: float = 600.0) -> None:
        """Writes all unconsumed samples, leases, order, groups, schema and the progress of every task to a
        folder, as they are at one moment; the store goes on meanwhile. `restore`, or ``serve(restore=...)``,
        brings them back, on any number of storage units.

        Args:
            folder: on the store's host; made if it is not there. A snapshot that is there already is
                replaced when the new one is whole.

        Raises:
            InvalidArgument: the folder holds something else.
            Full: the disk has no room.
            StorageLost: a storage unit died meanwhile; try again.
        """
        run(self._channel, self._servers.snapshot(folder, timeout))

    def restore(self, folder: "str | os.PathLike[str]", *, timeout: float = 600.0) -> None:
        """Fills an empty store with a snapshot: samples keep their ids, and leases their tokens and the time
        they had left.

        Raises:
            InvalidArgument: the folder is no snapshot, or the store has partitions already.
            Corrupt: it was changed, is not all there, or is of another version.
            Full: there is no memory for it.
        """
        run(self._channel, self._servers.restore(folder, timeout))

    def stats(self, timeout: float = _CONTROL_TIMEOUT) -> StoreStats:
        """Depth, bytes, leases, totals and lag of every partition and task; memory and storage units."""
        return run(self._channel, self._servers.stats(timeout))

    def close(self) -> None:
        """Returns what this client has leased, and disconnects. Idempotent."""
        self._finish()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Samples:
    """The columns and metadata of a fetched batch; see `Batch`.

    Attributes:
        ids: int64 ``[rows]``.
        groups: the group key of each sample, or None.
        versions: int64 ``[rows]``, as the producer gave them.
        priorities: int64 ``[rows]``.
        fields: name -> column, also ``batch["name"]``.
        round: of its sequence of rounds, from 0; -1 outside rounds.
        is_last: it completes a global batch, or the stream ends with it.
        dummy: a copy of a sample that belongs to another, so that every rank has equally many micro-batches:
            run it with its loss masked. There is nothing to ack.
        settled: acked or nacked.
    """

    def __init__(self, calls: PartitionCalls, loan: Loan) -> None:
        self._calls = calls
        self._channel: Any = calls.servers.channel
        self._lease = loan.leased.lease
        self.ids: np.ndarray = loan.ids
        self.groups: list[str | None] = loan.leased.groups
        self.versions: np.ndarray = loan.versions
        self.priorities: np.ndarray = loan.priorities
        self.fields: dict[str, Column] = loan.columns
        self.round = loan.leased.round
        self.is_last = loan.leased.is_last
        self.dummy = loan.leased.dummy
        self.settled = self.dummy
        self._returned = False

    def _check_not_returned(self) -> None:
        if self._returned:
            raise StaleLease(
                "this batch was given back (by nack, or as its loop was left) and may be with another "
                "consumer; nothing was acked. To take one batch use fetch, not next(iter(stream))",
                lease=self._lease,
            )

    def __getitem__(self, field: str) -> Column:
        if field not in self.fields:
            raise KeyError(
                f"{field!r} was not fetched; the batch has {sorted(self.fields)} (pass fields=[...])"
            )
        return self.fields[field]

    def __contains__(self, field: object) -> bool:
        return field in self.fields

    def __len__(self) -> int:
        return len(self.ids)

    def restore(self, *, copy: bool | None = None) -> Any:
        """The fields as they were put: arrays, tensors, nested tensors, lists, dicts, tensordicts; see
        `transferqueue.restore`.
        """
        return restore(self.fields, copy=copy)

    def to_tensordict(self, *, copy: bool | None = None) -> Any:
        """The fields as one tensordict ``[rows]``; see `transferqueue.to_tensordict`."""
        return to_tensordict(self.fields, copy=copy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} samples, fields {sorted(self.fields)})"


class Batch(Samples):
    """Samples on loan. `ack` completes them, `nack` or the end of the lease returns them."""

    def ack(self, timeout: float = _CONTROL_TIMEOUT) -> None:
        """Completes the samples for the task. Once is enough; again does nothing.

        Raises:
            StaleLease: the lease has lapsed or the batch was given back, and the samples may have gone to
                another consumer.
        """
        self._check_not_returned()
        if not self.settled:
            run(self._channel, self._calls.ack(self._lease, timeout))
            self.settled = True

    def nack(self, timeout: float = _CONTROL_TIMEOUT) -> None:
        """Returns the samples: they are ready again in their old place. Does nothing after `ack` or
        `nack`.
        """
        if not self.settled:
            run(self._channel, self._calls.nack(self._lease, timeout))
            self.settled = self._returned = True

    def extend_lease(self, seconds: float, timeout: float = _CONTROL_TIMEOUT) -> None:
        """Lets the lease end `seconds` from now. Raises StaleLease if it has ended already."""
        run(self._channel, self._calls.extend(self._lease, seconds, timeout))


class Partition:
    """A named stream of samples; made by `Client.partition`."""

    def __init__(self, calls: PartitionCalls) -> None:
        self._calls = calls
        self._link: BlockingChannel = calls.servers.channel  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return self._calls.name

    @property
    def tasks(self) -> dict[str, tuple[str, ...]]:
        """Name of each task -> the fields it needs."""
        return dict(self._calls.tasks)

    @property
    def closed(self) -> bool:
        """Whether the stream has been ended (asks the controller)."""
        return run(self._link, self._calls.closed(_CONTROL_TIMEOUT))

    def put(
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
        """Adds samples, all or none of them.

        Args:
            fields: name -> rows: an array or tensor ``[rows, ...]``, or a sequence with one value a row
                (array ``[length, *trailing]``, number, str, bytes, plain data, None). A mapping flattens to
                ``name/key``.
            groups: the group key of each sample. Several puts may add to one group.
            version: policy version, of all or of each.
            priority: lower is served first, of all or of each.
            shared: name -> (stored rows, index): values that several samples have in common, sent once;
                ``index[i]`` is the stored row of sample i, None for no value.
            group_sizes: group key -> members in the end, where they differ from what the sampler is told.
            ticket: what `admit` gave for these samples: their room is kept.
            timeout: seconds; waits this long for room.

        Returns:
            int64 ``[rows]``: the ids.

        Raises:
            Full: the limits left no room until the deadline.
            TooLarge: it can never fit.
            SchemaMismatch: a field differs in dtype or trailing shape from its first write.
            GroupMismatch: a group would outgrow its size.
            Closed: the partition is closed.
            StorageLost, ControllerLost, Timeout: not acknowledged; nothing becomes visible later.
        """
        return run(
            self._link,
            self._calls.put(fields, groups, version, priority, shared, group_sizes, ticket, timeout),
        )

    def update(self, ids: Sequence[int] | np.ndarray, fields: Fields, *, timeout: float = 60.0) -> None:
        """Writes more fields of samples; what they complete becomes ready. A field written again takes the
        new value. One that raises has made nothing ready; repeat it, as some values may be written.

        Raises:
            UnknownSample: a sample is acked by every task, dropped, or was never put.
            SchemaMismatch: as for `put`.
        """
        run(self._link, self._calls.update(ids, fields, timeout))  # type: ignore[arg-type]

    def close_group(
        self, key: str, count: int, tombstones: int = 0, *, timeout: float = _CONTROL_TIMEOUT
    ) -> None:
        """Says that a group has `count` members of which `tombstones` will never be put, so that no one waits
        for them.
        """
        run(self._link, self._calls.close_group(key, count, tombstones, timeout))

    def fetch(
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
    ) -> Batch:
        """Leases `batch_size` samples; waits in the controller until there are as many (or `at_least`).

        Args:
            task: whose samples.
            batch_size: samples; with groups of n a multiple of n, served whole.
            sampler: one of `samplers` (default `InOrder()`), or a function from the ready samples, in order,
                and `batch_size` to the ids to lease.
            max_priority: only samples (groups: all members) of at most this priority.
            min_version: only samples (groups: all members) of at least this version.
            max_staleness: only samples (groups: all members) at most so many versions behind the newest that
                was put or that `advance` told of.
            fields: which to read; None: those the task needs.
            lease_seconds: after which unacked samples return.
            timeout: seconds to wait for samples.
            partial: at the deadline, take what there is if it is at least one sample (group).
            at_least: be served as soon as so many samples are ready, with up to `batch_size` of them.
            ranks: what makes it one of several fetches that belong together, see `Ranks`.

        Returns:
            A batch; fewer than `batch_size` samples only at the end of the stream, for groups with
            tombstones, by a token budget, or if `partial`.

        Raises:
            Timeout: not enough became ready.
            Closed: the partition is closed and drained for this task.
            FieldNotReady: a field in `fields` is not written for one of the samples; nothing is leased.
        """
        wanted, choose = wanted_of(
            task, batch_size, sampler, at_least, max_priority, min_version, max_staleness, ranks
        )
        steps = self._calls.fetch(wanted, fields, lease_seconds, timeout, partial, choose)
        return Batch(self._calls, run(self._link, steps))

    def stream(
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
    ) -> Iterator[Batch]:
        """Batches until the partition is closed and drained; see `fetch`.

        Leaving the loop early returns the batch at hand unless it is acked; earlier ones stay leased.

        Args:
            prefetch: batches to ask for in advance, while the loop works on one. Their leases begin when they
                are served.
        """
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
                    loan = run(self._link, ahead.popleft() if ahead else ask())
                except Closed:
                    return
                while len(ahead) < prefetch:
                    ahead.append(ask())
                batch = Batch(self._calls, loan)
                try:
                    yield batch
                except BaseException:  # GeneratorExit, when the loop is left
                    _return(batch)
                    raise
        finally:
            for begun in ahead:
                begun.withdraw()

    def admit(
        self, version: int, samples: int, *, seconds: float = 600.0, timeout: float = _CONTROL_TIMEOUT
    ) -> int:
        """Asks to start making samples, before they are generated; waits while there is no room for them.

        Args:
            version: of the policy that will make them.
            samples: how many.
            seconds: how long the room is kept; a `put` with the ticket uses it up.
            timeout: seconds to wait.

        Returns:
            The ticket for `put`.

        Raises:
            Full: `max_samples` left no room until the deadline.
            InvalidArgument: they can never fit, or `version` is more than the partition's `max_staleness`
                behind.
            Closed: the partition is closed.
        """
        return run(self._link, self._calls.admit(version, samples, seconds, timeout))

    def advance(self, version: int, *, timeout: float = _CONTROL_TIMEOUT) -> None:
        """Says that the policy is at `version` now, which `max_staleness` counts from. A put of a newer
        version says so too; an older one changes nothing.
        """
        run(self._link, self._calls.advance(version, timeout))

    def get(
        self,
        ids: Sequence[int] | np.ndarray,
        fields: Sequence[str] | None = None,
        *,
        timeout: float = _CONTROL_TIMEOUT,
    ) -> dict[str, Column]:
        """Reads samples without leasing them. `fields` None: all that every one of them has.

        Raises:
            UnknownSample: a sample is freed or dropped, or was never put.
            FieldNotReady: a field is not written yet.
        """
        return run(self._link, self._calls.get(ids, fields, timeout))  # type: ignore[arg-type]

    def drop(
        self, ids: Sequence[int] | np.ndarray, reason: str, *, timeout: float = _CONTROL_TIMEOUT
    ) -> None:
        """Ends samples for every task that has not acked them; the ledger keeps the reason, cut at 1 KiB of
        UTF-8. All or nothing.

        A dropped member no longer counts for its group: the others are served without it. An id that is
        dropped already keeps its first reason. Raises UnknownSample for ids that were never put or are acked
        by every task.
        """
        run(self._link, self._calls.drop(ids, reason, timeout))  # type: ignore[arg-type]

    def ledger(self, task: str, *, timeout: float = _CONTROL_TIMEOUT) -> Ledger:
        """What became of every sample ever put, for one task.

        Raises:
            TooLarge: it is more than one message takes: hundreds of thousands of drops, each with a long
                reason of its own.
        """
        return run(self._link, self._calls.ledger(task, timeout))

    def close(self, *, timeout: float = _CONTROL_TIMEOUT) -> None:
        """Ends the stream: puts raise `Closed`; fetches return what is left, then raise `Closed`.
        Idempotent.
        """
        run(self._link, self._calls.close(timeout))

    def __repr__(self) -> str:
        return f"Partition({self.name!r}, tasks {sorted(self._calls.tasks)})"


def _return(batch: Batch) -> None:
    try:
        batch.nack()
    except StaleLease:
        return  # it has lapsed, so the samples are back already
