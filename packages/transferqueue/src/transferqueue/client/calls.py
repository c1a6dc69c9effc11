"""What a client does, step by step, without saying how it waits.

Every operation is a generator that yields the requests to send at once and is sent their answers; `run`
drives it with blocking waits, `run_async` with awaits. The sync and the async client are thin layers over
these.
"""

import asyncio
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import (
    ControllerLost,
    InvalidArgument,
    QueueError,
    StorageLost,
    Timeout,
    TooLarge,
    UnknownSample,
)
from ..ids import IdSet, shortened, unit_of
from ..samplers import InOrder, Sampler
from ..values import frame
from ..values.columns import Column, ColumnPlan, FieldSpec, gather, lay_out, runs
from ..values.encode import Fields, Shared, plan_fields
from ..wire.link import Answer, Link, Peer, Pending, frame_limit
from ..wire.messages import (
    Abort,
    Ack,
    CheckFields,
    CloseGroup,
    ClosePartition,
    Commit,
    CommitUpdate,
    Drop,
    Extend,
    Fetch,
    Flag,
    Goodbye,
    IsClosed,
    Leased,
    LedgerPage,
    Nack,
    Opened,
    OpenPartition,
    Read,
    ReadLedger,
    ReadStats,
    RequestBody,
    Reserve,
    Reserved,
    Stats,
    Store,
    UnitAddress,
    Values,
    Welcome,
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request to make: to whom, what, and until when (monotonic seconds)."""

    peer: Peer
    body: RequestBody
    deadline: float
    payload: Any = None


type Steps[T] = Generator[list[Exchange], list[Answer], T]


def run[T](link: Link, steps: Steps[T]) -> T:
    """Drives an operation to its end, blocking the thread."""
    answers: list[Answer] | None = None
    failure: BaseException | None = None
    while True:
        try:
            exchanges = steps.throw(failure) if failure is not None else steps.send(answers)  # type: ignore[arg-type]
        except StopIteration as finished:
            return finished.value
        pending: list[Pending] = []
        try:
            _submit(link, exchanges, pending)
            answers, failure = [one.future.result(_patience(one)) for one in pending], None
        except QueueError as error:
            failure = error
        except BaseException:
            _give_up(link, pending)
            steps.close()
            raise


async def run_async[T](link: Link, steps: Steps[T]) -> T:
    """Drives an operation to its end, awaiting its answers."""
    answers: list[Answer] | None = None
    failure: BaseException | None = None
    while True:
        try:
            exchanges = steps.throw(failure) if failure is not None else steps.send(answers)  # type: ignore[arg-type]
        except StopIteration as finished:
            return finished.value
        pending: list[Pending] = []
        try:
            _submit(link, exchanges, pending)
            answers, failure = [await asyncio.wrap_future(one.future) for one in pending], None
        except QueueError as error:
            failure = error
        except BaseException:
            _give_up(link, pending)
            steps.close()
            raise


def _submit(link: Link, exchanges: list[Exchange], pending: list[Pending]) -> None:
    now = time.monotonic()
    pending.extend(
        link.submit(one.peer, one.body, one.payload, timeout=max(0.0, one.deadline - now))
        for one in exchanges
    )


def _patience(pending: Pending) -> float:
    return max(0.0, pending.deadline - time.monotonic()) + 30.0  # the link ends it long before


def _give_up(link: Link, pending: Iterable[Pending]) -> None:
    for one in pending:
        link.give_up(one)


@dataclass(frozen=True)
class Ledger:
    """The exact account of a task: every id ever put is in exactly one of the four.

    Attributes:
        acked: completed by the task, also those whose payload is long freed.
        dropped: id -> reason, of those that ended before the task acked them.
        leased: with a consumer now.
        pending: ready or not, waiting for the task.
    """

    task: str
    acked: IdSet
    dropped: dict[int, str]
    leased: list[int]
    pending: list[int]


@dataclass(frozen=True)
class Loan:
    """The samples of one fetch and the lease they are under."""

    lease: int
    ids: np.ndarray
    groups: list[str | None]
    versions: np.ndarray
    priorities: np.ndarray
    columns: dict[str, Column]


class Servers:
    """A client's controller and, as they are needed, its storage units.

    Lives as long as anything of the client does, and closes with it: nothing of the link refers back to it.
    """

    def __init__(self, link: Link, address: str) -> None:
        self.link = link
        self.address = address
        self.controller = link.peer(
            "the controller",
            address,
            lambda why: ControllerLost(f"the controller at {address} {why}", address=address),
        )
        self._units: dict[int, Peer] = {}
        self._connecting = threading.Lock()

    @property
    def addresses(self) -> list[UnitAddress]:
        """Where the storage units listen, as the welcome said."""
        return self.controller.welcome.result(0).units

    def unit(self, number: int) -> Peer:
        """The storage unit of that number, connected to when first asked for."""
        with self._connecting:
            if number not in self._units:
                self._units[number] = self._connect(number)
            return self._units[number]

    def _connect(self, number: int) -> Peer:
        known = {unit.number: unit for unit in self.addresses}
        if number not in known:
            raise UnknownSample(f"there is no storage unit {number}; the ids are not of this store", ids=[])
        host = known[number].host
        if host in ("0.0.0.0", "::"):  # listens everywhere: reach it as we reach the controller
            host = self.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        address = f"tcp://{f'[{host}]' if ':' in host else host}:{known[number].port}"

        def lost(why: str) -> QueueError:
            return StorageLost(
                f"storage unit {number} at {address} {why}; the samples it held are lost",
                unit=number,
                address=address,
            )

        return self.link.peer(f"storage unit {number}", address, lost)

    def stats(self, timeout: float) -> Steps[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        peers = [self.controller, *(self.unit(unit.number) for unit in self.addresses)]
        answers = yield [Exchange(peer, ReadStats(), deadline) for peer in peers]
        store, *units = (_expect(answer, Stats).values for answer in answers)
        return store | {"units": units}

    def open(
        self,
        name: str,
        tasks: Mapping[str, Sequence[str]] | None,
        max_samples: int | None,
        max_bytes: int | None,
        timeout: float,
    ) -> "Steps[PartitionCalls]":
        wanted = None if tasks is None else {task: list(fields) for task, fields in tasks.items()}
        request = OpenPartition(name, wanted, max_samples, max_bytes)
        [answer] = yield [Exchange(self.controller, request, time.monotonic() + timeout)]
        opened = _expect(answer, Opened)
        return PartitionCalls(
            self, name, opened.partition, {task: tuple(f) for task, f in opened.tasks.items()}
        )


def goodbye(controller: Peer) -> Steps[None]:
    """Returns the leases of this client, if the controller can be reached."""
    if controller.failed is None and controller.down_since is None:
        yield [Exchange(controller, Goodbye(), time.monotonic() + 1.0)]


class PartitionCalls:
    """The operations on one partition. Arguments, results and errors are described on `client.Partition`."""

    def __init__(self, servers: Servers, name: str, number: int, tasks: dict[str, tuple[str, ...]]) -> None:
        self.servers = servers
        self.name = name
        self.number = number
        self.tasks = tasks
        self._specs: dict[str, FieldSpec] = {}  # fields whose first write we have seen; they never change

    def put(
        self,
        fields: Fields,
        groups: Sequence[str | None] | None,
        version: int | Sequence[int],
        priority: int | Sequence[int],
        shared: Shared | None,
        group_sizes: Mapping[str, int] | None,
        timeout: float,
    ) -> Steps[np.ndarray]:
        deadline = time.monotonic() + timeout
        rows, plans = plan_fields(fields, shared)
        keys = None if groups is None else [None if key is None else str(key) for key in groups]
        if keys is not None and len(keys) != rows:
            raise InvalidArgument(f"{len(keys)} groups for {rows} samples; give each sample a key, or None")
        sizes = {str(key): int(size) for key, size in (group_sizes or {}).items()}
        versions, priorities = _each("version", version, rows), _each("priority", priority, rows)
        specs = {name: plan.spec for name, plan in plans.items()}
        header, payload = frame.encode(rows, plans)
        controller = self.servers.controller
        self._check_size(payload, frame_limit(controller))
        reserve = Reserve(self.number, rows, len(payload), specs, keys, sizes)
        [answer] = yield [Exchange(controller, reserve, deadline)]
        reserved = _expect(answer, Reserved)
        ids = range(reserved.first, reserved.first + rows)
        if not rows:
            return np.empty(0, np.int64)
        try:
            unit = self.servers.unit(reserved.unit)
            yield [Exchange(unit, Store(list(ids), header, True), deadline, payload)]
            commit = Commit(reserved.reservation, specs, keys, sizes, versions, priorities)
            yield [Exchange(controller, commit, deadline)]
        except BaseException:
            self._tell(Abort(reserved.reservation))
            raise
        self._remember(specs)
        return np.arange(ids.start, ids.stop, dtype=np.int64)

    def update(self, ids: Sequence[int], fields: Fields, timeout: float) -> Steps[None]:
        deadline = time.monotonic() + timeout
        samples = _samples(ids)
        rows, plans = plan_fields(fields)
        if rows != len(samples):
            raise InvalidArgument(f"columns of {rows} rows for {len(samples)} ids")
        specs = {name: plan.spec for name, plan in plans.items()}
        controller = self.servers.controller
        if any(spec.dtype != "none" and self._specs.get(name) != spec for name, spec in specs.items()):
            yield [Exchange(controller, CheckFields(self.number, specs), deadline)]
        if not samples:
            return
        stores: list[Exchange] = []
        nbytes = 0
        for unit, (members, part) in _split(samples, plans).items():
            header, payload = frame.encode(len(members), part)
            peer = self.servers.unit(unit)
            self._check_size(payload, frame_limit(controller))
            nbytes += len(payload)
            stores.append(Exchange(peer, Store(members, header, False), deadline, payload))
        yield stores
        yield [Exchange(controller, CommitUpdate(self.number, samples, specs, nbytes), deadline)]
        self._remember(specs)

    def _remember(self, specs: Mapping[str, FieldSpec]) -> None:
        self._specs.update((name, spec) for name, spec in specs.items() if spec.dtype != "none")

    @staticmethod
    def _check_size(payload: np.ndarray, limit: int) -> None:
        if len(payload) > limit:
            raise TooLarge(
                f"{len(payload)} bytes are more than one frame of {limit}; use fewer samples at once, or "
                "start the store with a larger max_frame_bytes",
                nbytes=len(payload),
                limit=limit,
            )

    def fetch(
        self,
        task: str,
        batch_size: int,
        sampler: Sampler | None,
        max_priority: int | None,
        min_version: int | None,
        fields: Sequence[str] | None,
        lease_seconds: float,
        timeout: float,
        partial: bool,
        at_least: int | None,
    ) -> Steps[Loan]:
        deadline = time.monotonic() + timeout
        request = Fetch(
            self.number,
            task,
            int(batch_size),
            sampler if sampler is not None else InOrder(),
            max_priority,
            min_version,
            None if at_least is None else int(at_least),
            partial,
            float(lease_seconds),
        )
        [answer] = yield [Exchange(self.servers.controller, request, deadline)]
        leased = _expect(answer, Leased)
        try:
            # The wait for samples may have used up the deadline; moving what was leased gets a time of its
            # own.
            columns = yield from self._read(
                leased.ids,
                list(self.tasks[task] if fields is None else fields),
                max(deadline, time.monotonic() + 30),
            )
        except BaseException:
            self._tell(Nack(self.number, leased.lease))
            raise
        return Loan(
            leased.lease,
            np.asarray(leased.ids, np.int64),
            leased.groups,
            np.asarray(leased.versions, np.int64),
            np.asarray(leased.priorities, np.int64),
            columns,
        )

    def get(
        self, ids: Sequence[int], fields: Sequence[str] | None, timeout: float
    ) -> Steps[dict[str, Column]]:
        samples = _samples(ids)
        return (
            yield from self._read(
                samples, None if fields is None else list(fields), time.monotonic() + timeout
            )
        )

    def _read(
        self, samples: list[int], fields: list[str] | None, deadline: float
    ) -> Steps[dict[str, Column]]:
        by_unit: dict[int, list[int]] = {}
        for sample in samples:
            by_unit.setdefault(unit_of(sample), []).append(sample)
        answers = yield [
            Exchange(self.servers.unit(unit), Read(ids, fields), deadline) for unit, ids in by_unit.items()
        ]
        parts = [frame.decode(_expect(answer, Values).frame, answer.payload) for answer in answers]
        if len(parts) == 1:
            return parts[0]
        return _merged(samples, dict(zip(by_unit, parts, strict=True)))

    def _control(self, body: RequestBody, timeout: float) -> Steps[Answer]:
        [answer] = yield [Exchange(self.servers.controller, body, time.monotonic() + timeout)]
        return answer

    def _tell(self, body: RequestBody) -> None:
        """Sends what cleans up after a failure, without waiting for it."""
        self.servers.link.submit(self.servers.controller, body, timeout=30)

    def ack(self, lease: int, timeout: float) -> Steps[Answer]:
        return self._control(Ack(self.number, lease), timeout)

    def nack(self, lease: int, timeout: float) -> Steps[Answer]:
        return self._control(Nack(self.number, lease), timeout)

    def extend(self, lease: int, seconds: float, timeout: float) -> Steps[Answer]:
        return self._control(Extend(self.number, lease, float(seconds)), timeout)

    def drop(self, ids: Sequence[int], reason: str, timeout: float) -> Steps[Answer]:
        return self._control(Drop(self.number, _samples(ids), reason), timeout)

    def close_group(self, key: str, count: int, tombstones: int, timeout: float) -> Steps[Answer]:
        if not 0 <= tombstones <= count:
            raise InvalidArgument(f"group {key!r}: {tombstones} tombstones of {count} members")
        return self._control(CloseGroup(self.number, str(key), int(count), int(tombstones)), timeout)

    def close(self, timeout: float) -> Steps[Answer]:
        return self._control(ClosePartition(self.number), timeout)

    def closed(self, timeout: float) -> Steps[bool]:
        return _expect((yield from self._control(IsClosed(self.number), timeout)), Flag).value

    def ledger(self, task: str, timeout: float) -> Steps[Ledger]:
        page = _expect((yield from self._control(ReadLedger(self.number, task), timeout)), LedgerPage)
        return Ledger(task, IdSet(page.acked), page.dropped, page.leased, page.pending)


def _expect[B](answer: Answer, kind: type[B]) -> B:
    if not isinstance(answer.body, kind):
        raise QueueError(
            f"the server answered {type(answer.body).__name__} where {kind.__name__} was expected"
        )
    return answer.body


def _samples(ids: Sequence[int]) -> list[int]:
    samples = ids.tolist() if isinstance(ids, np.ndarray) else [int(sample) for sample in ids]
    if len(set(samples)) != len(samples):
        raise InvalidArgument(
            f"{len(samples) - len(set(samples))} ids are given twice; name each sample once"
        )
    if any(not isinstance(sample, int) or sample < 0 for sample in samples):
        raise UnknownSample(
            "ids are the integers that put returned", ids=shortened([s for s in samples if s < 0])
        )
    return samples


def _each(name: str, values: int | Sequence[int], rows: int) -> int | list[int]:
    numbers = [int(values)] if isinstance(values, int | np.integer) else [int(value) for value in values]
    if any(not -(1 << 63) <= number < 1 << 63 for number in numbers):
        raise InvalidArgument(f"a {name} is beyond 64 bits")
    if isinstance(values, int | np.integer):
        return numbers[0]
    if len(numbers) != rows:
        raise InvalidArgument(f"{len(numbers)} values of {name} for {rows} samples")
    return numbers


def _split(
    samples: list[int], plans: dict[str, ColumnPlan]
) -> dict[int, tuple[list[int], dict[str, ColumnPlan]]]:
    """The rows of each storage unit. Usually there is one, and nothing is copied."""
    rows_of: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        rows_of.setdefault(unit_of(sample), []).append(row)
    if len(rows_of) == 1:
        return {unit: (samples, plans) for unit in rows_of}
    columns = {name: lay_out(plan) for name, plan in plans.items()}
    return {
        unit: (
            [samples[row] for row in rows],
            {name: gather(list(runs((column, row) for row in rows))) for name, column in columns.items()},
        )
        for unit, rows in rows_of.items()
    }


def _merged(samples: list[int], parts: dict[int, dict[str, Column]]) -> dict[str, Column]:
    """The columns that all units sent, with the rows in the order of `samples`."""
    names = [name for name in next(iter(parts.values()), {}) if all(name in part for part in parts.values())]
    merged: dict[str, Column] = {}
    for name in names:
        following = dict.fromkeys(parts, 0)
        rows: list[tuple[Column, int]] = []
        for sample in samples:
            unit = unit_of(sample)
            rows.append((parts[unit][name], following[unit]))
            following[unit] += 1
        merged[name] = lay_out(gather(list(runs(rows))))
    return merged


def first_welcome(welcome: "Future[Welcome]", timeout: float, address: str) -> Welcome:
    """Blocks for the controller's welcome."""
    try:
        return welcome.result(timeout)
    except TimeoutError:
        raise Timeout(
            f"no welcome from {address} within {timeout:g} s; is a transferqueue listening there?"
        ) from None
