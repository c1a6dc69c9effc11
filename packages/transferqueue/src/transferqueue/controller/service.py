"""The controller: all metadata and scheduling of a store, no payload. It turns requests into partition calls,
keeps those that have to wait, and tells storage units what to let go of."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from ..errors import (
    Full,
    InvalidArgument,
    QueueError,
    SchemaMismatch,
    StorageLost,
    Timeout,
    TooLarge,
    UnknownName,
)
from ..ids import MAX_PARTITIONS, MAX_SERIAL, first_id, new_generation, unit_of
from ..samplers import Groups
from ..scheduling.partition import Lease, Partition, Row, Wanted
from ..wire.link import Link, Peer
from ..wire.messages import (
    Abort,
    Ack,
    CheckFields,
    CloseGroup,
    ClosePartition,
    Commit,
    CommitUpdate,
    Done,
    Drop,
    Extend,
    Fetch,
    Flag,
    Free,
    IsClosed,
    Leased,
    LedgerPage,
    Nack,
    Opened,
    OpenPartition,
    ReadLedger,
    ReadStats,
    Reserve,
    Reserved,
    Stats,
    UnitAddress,
)
from ..wire.node import Call

_GRACE = 2.0  # seconds a reservation outlives its put's deadline


@dataclass(slots=True)
class Shelving:
    """A partition, its limits, and how much of them is promised to puts under way."""

    number: int
    partition: Partition
    max_samples: int | None
    max_bytes: int | None
    serials: list[int]
    reserved_rows: int = 0
    reserved_bytes: int = 0


@dataclass(slots=True)
class Reservation:
    """Ids and room given to a put that has not committed yet."""

    shelving: Shelving
    ids: range
    nbytes: int


@dataclass(slots=True)
class WaitingFetch:
    call: Call
    wanted: Wanted
    partial: bool
    seconds: float


@dataclass(slots=True)
class _Timers:
    """Callbacks by time; a callback checks for itself whether it still matters."""

    heap: list[tuple[float, int, Any]] = field(default_factory=list)
    numbers: "count[int]" = field(default_factory=count)

    def at(self, when: float, callback: Any) -> None:
        heappush(self.heap, (when, next(self.numbers), callback))

    def run(self, now: float) -> None:
        while self.heap and self.heap[0][0] <= now:
            heappop(self.heap)[2]()


class ControllerService:
    """Answers the requests to the controller.

    Args:
        units: where the storage units listen.
        token: presented to them.
        max_bytes: payload bytes in the whole store, or None.
    """

    def __init__(self, units: Sequence[UnitAddress], token: str | None, max_bytes: int | None) -> None:
        self._generation = new_generation()
        self._max_bytes = max_bytes
        self._by_name: dict[str, Shelving] = {}
        self._by_number: list[Shelving] = []
        self._reservations: dict[int, Reservation] = {}
        self._reservation_ids = count(1)
        self._fetches: dict[tuple[int, str], list[WaitingFetch]] = {}
        self._puts: deque[Call] = deque()
        self._timers = _Timers()
        self._room_made = False
        self._next_unit = 0
        self._link = Link(token, patience=2.0)
        self._units = [self._connect(unit) for unit in units]

    def _connect(self, unit: UnitAddress) -> Peer:
        host = f"[{unit.host}]" if ":" in unit.host else unit.host
        address = f"tcp://{host}:{unit.port}"
        return self._link.peer(
            f"storage unit {unit.number}",
            address,
            lambda why: StorageLost(
                f"storage unit {unit.number} at {address} {why}", unit=unit.number, address=address
            ),
        )

    # -- requests --------------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        now = time.monotonic()
        match call.body:
            case OpenPartition():
                call.reply(self._open(call.body))
            case Reserve():
                self._reserve(call, call.body)
            case Commit():
                self._commit(call.body)
                call.reply(Done())
            case Abort(number):
                self._abort(number)
                call.reply(Done())
            case CheckFields(number, specs):
                self._partition(number).check_schema(specs)
                call.reply(Done())
            case CommitUpdate(number, ids, specs, nbytes):
                self._partition(number).update(ids, specs, _shares(nbytes, len(ids)))
                call.reply(Done())
            case CloseGroup(number, key, members, tombstones):
                self._partition(number).close_group(key, members, tombstones)
                call.reply(Done())
            case Fetch():
                self._fetch(call, call.body, now)
            case Ack(number, lease):
                self._partition(number).ack(lease, now)
                call.reply(Done())
            case Nack(number, lease):
                self._partition(number).nack(lease, now)
                call.reply(Done())
            case Extend(number, lease, seconds):
                self._partition(number).extend(lease, _seconds(seconds), now)
                call.reply(Done())
            case Drop(number, ids, reason):
                self._partition(number).drop(ids, reason)
                call.reply(Done())
            case ClosePartition(number):
                self._partition(number).close()
                self._room_made = True  # puts that wait end with Closed
                call.reply(Done())
            case IsClosed(number):
                call.reply(Flag(self._partition(number).closed))
            case ReadLedger(number, task):
                call.reply(_ledger(self._partition(number), task))
            case ReadStats():
                call.reply(Stats(self._stats()))
            case _:
                call.refuse()

    def _shelving(self, number: int) -> Shelving:
        if not 0 <= number < len(self._by_number):
            raise UnknownName(f"no partition has number {number}; open it by name", partition=number)
        return self._by_number[number]

    def _partition(self, number: int) -> Partition:
        return self._shelving(number).partition

    def _open(self, body: OpenPartition) -> Opened:
        shelving = self._by_name.get(body.name)
        if shelving is None:
            if body.tasks is None:
                raise UnknownName(
                    f"there is no partition {body.name!r}; pass tasks={{name: fields}} to create it",
                    partition=body.name,
                )
            if len(self._by_number) == MAX_PARTITIONS:
                raise InvalidArgument(f"a store has at most {MAX_PARTITIONS} partitions")
            for limit in (body.max_samples, body.max_bytes):
                if limit is not None and limit < 1:
                    raise InvalidArgument(
                        f"a limit of {limit} for partition {body.name!r}; give a positive one or None"
                    )
            partition = Partition(body.name, body.tasks)
            number = len(self._by_number)
            shelving = Shelving(number, partition, body.max_samples, body.max_bytes, [0] * len(self._units))
            self._by_number.append(shelving)
            self._by_name[body.name] = shelving
        tasks = {task.name: list(task.fields) for task in shelving.partition.tasks.values()}
        for what, got, has in (
            ("tasks", body.tasks, tasks),
            ("max_samples", body.max_samples, shelving.max_samples),
            ("max_bytes", body.max_bytes, shelving.max_bytes),
        ):
            if got is not None and _unordered(got) != _unordered(has):
                raise SchemaMismatch(
                    f"partition {body.name!r} exists with {what} {has}, asked for with {got}",
                    field=what,
                    got=got,
                    expected=has,
                )
        return Opened(shelving.number, tasks)

    # -- puts ------------------------------------------------------------------------------------------------

    def _reserve(self, call: Call, body: Reserve) -> None:
        shelving = self._shelving(body.partition)
        partition = shelving.partition
        partition.check_open()
        partition.check_schema(body.specs)
        partition.check_groups(body.groups or (), body.group_sizes)
        if body.rows < 0 or body.nbytes < 0:
            raise InvalidArgument(f"a put of {body.rows} rows and {body.nbytes} bytes")
        for what, asked, limit in (
            ("samples", body.rows, shelving.max_samples),
            ("bytes", body.nbytes, shelving.max_bytes),
            ("bytes", body.nbytes, self._max_bytes),
        ):
            if limit is not None and asked > limit:
                raise TooLarge(
                    f"a put of {asked} {what} can never fit a limit of {limit}; put fewer samples at once",
                    nbytes=asked,
                    limit=limit,
                )
        if body.rows == 0:
            call.reply(Reserved(0, 0, 0))
        elif self._others_wait(body.partition) or not self._fits(shelving, body):
            self._puts.append(call)
            self._timers.at(call.deadline, lambda: self._give_up_put(call, shelving))
        else:
            self._grant(call, shelving, body)

    def _others_wait(self, partition: int) -> bool:
        return any(
            not c.answered and isinstance(c.body, Reserve) and c.body.partition == partition
            for c in self._puts
        )

    def _fits(self, shelving: Shelving, body: Reserve) -> bool:
        samples = len(shelving.partition.samples) + shelving.reserved_rows + body.rows
        nbytes = shelving.partition.nbytes + shelving.reserved_bytes + body.nbytes
        if shelving.max_samples is not None and samples > shelving.max_samples:
            return False
        if shelving.max_bytes is not None and nbytes > shelving.max_bytes:
            return False
        if self._max_bytes is None:
            return True
        held = sum(other.partition.nbytes + other.reserved_bytes for other in self._by_number)
        return held + body.nbytes <= self._max_bytes

    def _grant(self, call: Call, shelving: Shelving, body: Reserve) -> None:
        unit = self._choose_unit()
        serial = shelving.serials[unit]
        if serial + body.rows > MAX_SERIAL:
            raise Full(f"partition {shelving.partition.name!r} has used up its ids; start a new store")
        shelving.serials[unit] += body.rows
        first = first_id(self._generation, shelving.number, unit, serial)
        number = next(self._reservation_ids)
        self._reservations[number] = Reservation(shelving, range(first, first + body.rows), body.nbytes)
        shelving.reserved_rows += body.rows
        shelving.reserved_bytes += body.nbytes
        self._timers.at(call.deadline + _GRACE, lambda: self._abort(number))
        call.undo = lambda: self._abort(number)
        call.reply(Reserved(number, first, unit))

    def _choose_unit(self) -> int:
        """The next unit in turn that is not known to be lost."""
        for _ in self._units:
            unit = self._next_unit
            self._next_unit = (unit + 1) % len(self._units)
            if self._units[unit].failed is None:
                return unit
        raise self._units[0].failed or StorageLost("there is no storage unit", unit=0, address="")

    def _release(self, number: int) -> Reservation | None:
        reservation = self._reservations.pop(number, None)
        if reservation is not None:
            reservation.shelving.reserved_rows -= len(reservation.ids)
            reservation.shelving.reserved_bytes -= reservation.nbytes
        return reservation

    def _abort(self, number: int) -> None:
        reservation = self._release(number)
        if reservation is not None:
            reservation.shelving.partition.freed.extend(reservation.ids)

    def _commit(self, body: Commit) -> None:
        reservation = self._release(body.reservation)
        if reservation is None:
            raise Timeout("the put took longer than its deadline and was given up; nothing of it is kept")
        ids = reservation.ids
        try:
            rows = [
                Row(*row)
                for row in zip(
                    ids,
                    _each(body.groups, len(ids)),
                    _each(body.versions, len(ids)),
                    _each(body.priorities, len(ids)),
                    _shares(reservation.nbytes, len(ids)),
                    strict=True,
                )
            ]
            reservation.shelving.partition.put(rows, body.specs, body.group_sizes)
        except QueueError:
            reservation.shelving.partition.freed.extend(ids)
            raise

    def _give_up_put(self, call: Call, shelving: Shelving) -> None:
        if not call.answered:
            partition = shelving.partition
            call.fail(
                Full(
                    f"partition {partition.name!r} left no room until the deadline: it holds "
                    f"{len(partition.samples)} samples of at most {shelving.max_samples} and "
                    f"{partition.nbytes} bytes of at most {shelving.max_bytes} (whole store: "
                    f"{self._max_bytes}); consume faster or raise the limits",
                    partition=partition.name,
                )
            )
            self._room_made = True  # smaller puts behind it may fit

    def _admit_waiting_puts(self) -> None:
        """Grants room in the order of asking; who waits in one partition does not hold up another."""
        waiting, self._puts = self._puts, deque()
        held_up: set[int] = set()
        for call in waiting:
            body = call.body
            if call.answered or not isinstance(body, Reserve):
                continue
            shelving = self._shelving(body.partition)
            try:
                if body.partition not in held_up:
                    shelving.partition.check_open()
                    if self._fits(shelving, body):
                        self._grant(call, shelving, body)
                        continue
            except QueueError as error:
                call.fail(error)
                continue
            held_up.add(body.partition)
            self._puts.append(call)

    # -- fetches ---------------------------------------------------------------------------------------------

    def _fetch(self, call: Call, body: Fetch, now: float) -> None:
        if body.count < 1:
            raise InvalidArgument(f"batch_size is {body.count}; it must be at least 1")
        if isinstance(body.sampler, Groups) and (body.sampler.n < 1 or body.count % body.sampler.n):
            raise InvalidArgument(
                f"batch_size {body.count} is no multiple of the group size {body.sampler.n}; "
                "groups are served whole"
            )
        if body.at_least is not None and not 1 <= body.at_least <= body.count:
            raise InvalidArgument(
                f"at_least is {body.at_least}; it must be in [1, {body.count}], the batch_size"
            )
        wanted = Wanted(
            body.task, body.count, body.sampler, body.max_priority, body.min_version, body.at_least
        )
        waiting = WaitingFetch(call, wanted, body.partial, _seconds(body.lease_seconds))
        if not self._serve(body.partition, waiting, now):
            self._fetches.setdefault((body.partition, body.task), []).append(waiting)
            self._timers.at(call.deadline, lambda: self._give_up_fetch(body.partition, waiting))

    def _serve(self, number: int, waiting: WaitingFetch, now: float) -> bool:
        partition = self._partition(number)
        lease = partition.lease(
            waiting.wanted, now=now, seconds=waiting.seconds, owner=waiting.call.client.number
        )
        if lease is None:
            return False
        waiting.call.undo = lambda: self._take_back(partition, lease)
        samples = [partition.samples[sample] for sample in lease.ids]
        waiting.call.reply(
            Leased(
                lease.id,
                list(lease.ids),
                [None if sample.group is None else sample.group.key for sample in samples],
                [sample.version for sample in samples],
                [sample.priority for sample in samples],
            )
        )
        return True

    @staticmethod
    def _take_back(partition: Partition, lease: Lease) -> None:
        if lease.id in partition.leases:
            partition.nack(lease.id, time.monotonic())

    def _give_up_fetch(self, number: int, waiting: WaitingFetch) -> None:
        call, wanted = waiting.call, waiting.wanted
        if call.answered:
            return
        try:
            last = replace(waiting, wanted=replace(wanted, partial=waiting.partial))
            if self._serve(number, last, time.monotonic()):
                return
            ready = len(self._partition(number).task(wanted.task).ready)
            raise Timeout(
                f"task {wanted.task!r} of partition {self._partition(number).name!r} had no {wanted.count} "
                f"samples for {wanted.sampler} until the deadline (ready: {ready}, max_priority: "
                f"{wanted.max_priority}, min_version: {wanted.min_version})",
                ready=ready,
            )
        except QueueError as error:
            call.fail(error)

    def _wake_fetches(self, shelving: Shelving, now: float) -> None:
        woken, shelving.partition.woken = shelving.partition.woken, set()
        for task in woken:
            key = (shelving.number, task)
            waiting = self._fetches.pop(key, [])
            left = [
                one
                for one in waiting
                if not one.call.answered and not self._serve_or_fail(shelving.number, one, now)
            ]
            if left:
                self._fetches[key] = left

    def _serve_or_fail(self, number: int, waiting: WaitingFetch, now: float) -> bool:
        try:
            return self._serve(number, waiting, now)
        except QueueError as error:
            waiting.call.fail(error)
            return True

    # -- what follows a request ------------------------------------------------------------------------------

    def settle(self, now: float) -> float | None:
        self._timers.run(now)
        for shelving in self._by_number:
            shelving.partition.lapse(now)
        while self._follow_up(now):
            pass
        times = [self._timers.heap[0][0]] if self._timers.heap else []
        times.extend(t for t in (s.partition.next_lapse() for s in self._by_number) if t is not None)
        return min(times) if times else None

    def _follow_up(self, now: float) -> bool:
        """Frees, admits and wakes what the last changes allow; returns whether more followed from that."""
        for shelving in self._by_number:
            if shelving.partition.freed:
                self._free(shelving.partition)
        if self._room_made:
            self._room_made = False
            self._admit_waiting_puts()
        for shelving in self._by_number:
            if shelving.partition.woken:
                self._wake_fetches(shelving, now)
        return self._room_made or any(s.partition.freed or s.partition.woken for s in self._by_number)

    def _free(self, partition: Partition) -> None:
        freed, partition.freed = partition.freed, []
        self._room_made = True
        by_unit: dict[int, list[int]] = {}
        for sample in freed:
            by_unit.setdefault(unit_of(sample), []).append(sample)
        for unit, ids in by_unit.items():
            self._link.submit(self._units[unit], Free(ids), timeout=60)

    def forget(self, client: int) -> None:
        for shelving in self._by_number:
            shelving.partition.release(client)

    def close(self) -> None:
        self._link.close()

    def _stats(self) -> dict[str, Any]:
        return {
            "max_bytes": self._max_bytes,
            "waiting_puts": sum(not call.answered for call in self._puts),
            "waiting_fetches": sum(
                not one.call.answered for fetches in self._fetches.values() for one in fetches
            ),
            "partitions": {name: _partition_stats(shelving) for name, shelving in self._by_name.items()},
        }


def _partition_stats(shelving: Shelving) -> dict[str, Any]:
    partition = shelving.partition
    tasks = {
        task.name: dict(zip(("unready", "ready", "leased", "acked"), task.counts, strict=True))
        for task in partition.tasks.values()
    }
    return {
        "samples": len(partition.samples),
        "nbytes": partition.nbytes,
        "reserved_samples": shelving.reserved_rows,
        "reserved_bytes": shelving.reserved_bytes,
        "max_samples": shelving.max_samples,
        "max_bytes": shelving.max_bytes,
        "closed": partition.closed,
        "groups": len(partition.groups),
        "leases": len(partition.leases),
        "dropped": len(partition.dropped),
        "tasks": tasks,
    }


def _ledger(partition: Partition, name: str) -> LedgerPage:
    task = partition.task(name)
    return LedgerPage(
        task.acked.intervals,
        {sample: why for sample, why in partition.dropped.items() if sample not in task.acked},
        list(task.leased),
        [s for s in partition.samples if s not in task.leased and s not in task.acked],
    )


def _each(values: Any, rows: int) -> Sequence[Any]:
    if values is None or isinstance(values, int):
        return [values] * rows
    if len(values) != rows:
        raise InvalidArgument(f"{len(values)} values for {rows} samples")
    return values


def _shares(nbytes: int, rows: int) -> list[int]:
    """`nbytes` split over `rows`; the shares add up."""
    share, rest = divmod(nbytes, rows or 1)
    return [share + (row < rest) for row in range(rows)]


def _seconds(seconds: float) -> float:
    if not (0 < seconds < math.inf):
        raise InvalidArgument(f"lease_seconds is {seconds}; it must be positive and finite")
    return seconds


def _unordered(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {task: sorted(fields) for task, fields in value.items()}
    return value
