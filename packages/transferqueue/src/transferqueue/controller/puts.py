"""Puts and updates: memory to write to, room within the limits, and the moment when samples may be seen."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Full, InvalidArgument, QueueError, StorageLost, Timeout, TooLarge
from ..ids import MAX_SERIAL, first_id
from ..scheduling.partition import Partition
from ..scheduling.samples import MAX_LENGTH, MAX_MEMBERS, Row
from ..wire.messages import (
    Commit,
    Committed,
    CommitUpdate,
    Done,
    Granted,
    Range,
    Reserve,
    ReserveUpdate,
    Return,
    TakeSlab,
)
from ..wire.node import Call
from .blocks import Grant
from .memory import SLAB_BYTES, Memory
from .shelves import Shelf, Shelves
from .timers import Timers
from .units import Units

_GRACE = 2.0  # seconds a reservation outlives its put's deadline
_MAX_ROWS = 1 << 20  # of one put: everybody waits while they are entered
_INT64 = 1 << 63


@dataclass(slots=True)
class Reservation:
    """Room within the limits for a large put that has not committed."""

    shelf: Shelf
    rows: int
    nbytes: int


class Puts:
    """What waits for memory, for room, or for bytes that are on their way to a unit.

    Args:
        again: handles a request once more.
    """

    def __init__(
        self,
        generation: int,
        shelves: Shelves,
        memory: Memory,
        units: Units,
        timers: Timers,
        again: Callable[[Call], None],
    ) -> None:
        self._again = again
        self.generation = generation
        self._shelves = shelves
        self._memory = memory
        self._units = units
        self._timers = timers
        self._reservations: dict[int, Reservation] = {}
        self._waiting: deque[Call] = deque()
        self._coming: dict[tuple[int, int], Call] = {}
        self.room_made = False

    @property
    def waiting(self) -> int:
        return sum(not call.answered for call in self._waiting)

    # -- memory ----------------------------------------------------------------------------------------------

    def slab(self, call: Call, body: TakeSlab) -> None:
        self._grant(call, SLAB_BYTES, body.remote, slab=True)

    def reserve_update(self, call: Call, body: ReserveUpdate) -> None:
        self._grant(call, _positive(body.span), body.remote)

    def reserve(self, call: Call, body: Reserve) -> None:
        shelf = self._shelves[body.partition]
        partition = shelf.partition
        partition.check_open()
        partition.check_schema(body.specs)
        partition.check_groups(body.groups or (), body.group_sizes)
        _check_counts(body.rows, body.nbytes, _positive(body.span))
        check_sizes(body.group_sizes.values())
        self._shelves.check_size(shelf, body.rows, body.nbytes)
        if self._must_wait(shelf, body.rows, body.nbytes, body.ticket):
            self._wait(call, shelf)
        else:
            self._grant_reserved(call, shelf, body)

    def _grant_reserved(self, call: Call, shelf: Shelf, body: Reserve) -> None:
        grant = self._grant(call, body.span, body.remote)
        if grant.number not in self._memory.grants:
            return  # its unit was lost at once
        rows = body.rows - shelf.partition.admission.covered(body.ticket, body.rows)  # those count already
        self._reservations[grant.number] = Reservation(shelf, rows, body.nbytes)
        shelf.reserved_rows += rows
        shelf.reserved_bytes += body.nbytes
        self._timers.at(
            call.deadline + _GRACE,
            lambda: self._give_up_reservation(grant),
            lambda: grant.number in self._reservations,
        )

    def _grant(self, call: Call, span: int, remote: bool, *, slab: bool = False) -> Grant:
        unit = self._units.choose() if remote else None
        grant = self._memory.take(span, call.session.number, unit, slab=slab)
        call.undo = lambda: self.end_grant(grant)
        granted = Granted(grant.range, -1 if unit is None else unit)
        if unit is None:
            call.arenas = [self._memory.arena(grant.arena)]
            call.reply(granted)
        else:
            # The client may write only once the unit will take it.
            self._units.expect(unit, grant.range, lambda lost: self._expected(call, grant, granted, lost))
        return grant

    def _expected(self, call: Call, grant: Grant, granted: Granted, lost: str) -> None:
        if call.answered:
            self.end_grant(grant)
        elif lost:
            call.undo = None
            self.end_grant(grant)
            # Another unit may take it, or this one when it is back.
            self._timers.at(self._timers.now(), lambda: self._again(call))
        else:
            call.reply(granted)

    def _give_up_reservation(self, grant: Grant) -> None:
        if grant.unit is None:
            # A client of this host that was stopped may go on to write where it was: the memory stays its own
            # until it says or dies; only the room goes to others.
            self._release(grant.number)
        else:
            self.end_grant(grant)

    def end_grant(self, grant: Grant) -> None:
        """Frees what a client did not commit, once nothing can be written there any more."""
        self._release(grant.number)
        if grant.number not in self._memory.grants:
            return
        if grant.unit is None:
            self._memory.end(grant)
        else:
            self._units.forget(grant.unit, grant.number, lambda: self._memory.end(grant))

    def returned(self, call: Call, body: Return) -> None:
        grant = self._memory.grants.get(body.grant)
        if grant is not None and grant.owner == call.session.number:
            self.end_grant(grant)
        call.reply(Done())

    def _release(self, number: int) -> None:
        reservation = self._reservations.pop(number, None)
        if reservation is not None:
            reservation.shelf.reserved_rows -= reservation.rows
            reservation.shelf.reserved_bytes -= reservation.nbytes
            self.room_made = True

    # -- commits ---------------------------------------------------------------------------------------------

    def commit(self, call: Call, body: Commit | CommitUpdate) -> None:
        shelf = self._shelves[body.partition]
        if isinstance(body, Commit):
            _check_counts(body.rows, body.nbytes, body.range.stop - body.range.start, least=1)
            check_sizes(body.group_sizes.values())
            check_int64(body.versions, body.rows)
            check_int64(body.priorities, body.rows)
            _check_lengths(body.lengths, body.rows)
            if body.groups is not None:
                _each(body.groups, body.rows)
        else:
            _check_counts(len(body.ids), body.nbytes, body.range.stop - body.range.start, least=1)
            if body.lengths is not None:
                _check_lengths(body.lengths, len(body.ids))
        grant = self._memory.name(body.range, call.session.number)
        where = (body.range.start, body.range.stop)
        if grant.unit is not None and where not in grant.written:
            self._check_early(body, shelf, grant)
            if self._units.silent(grant.unit):
                self._memory.discard(body.range)
                self.end_grant(grant)
                raise _silent(grant.unit)
            self._coming[grant.number, body.range.start] = call
            call.undo = lambda: self._not_coming(call, grant, body.range)
            self._timers.at(
                call.deadline,
                lambda: self._give_up_coming(call, grant, _too_late()),
                lambda: not call.answered,
            )
        else:
            self._arrived(call, grant, body)

    def written(self, unit: int, where: Range) -> None:
        """A unit says that a range is filled."""
        grant = self._memory.grants.get(where.grant)
        if grant is None or grant.unit != unit:
            return  # given up meanwhile; its memory is free once the unit has forgotten it
        self._memory.written(grant, where)
        call = self._coming.pop((where.grant, where.start), None)
        if call is not None and not call.answered:
            call.undo = None
            body = call.body
            assert isinstance(body, Commit | CommitUpdate)
            try:
                self._arrived(call, grant, body)
            except QueueError as error:
                call.fail(error)

    def _give_up_coming(self, call: Call, grant: Grant, error: QueueError) -> None:
        undo = call.undo
        if undo is not None and not call.answered:
            call.fail(error)
            undo()

    def _not_coming(self, call: Call, grant: Grant, where: Range) -> None:
        """Nobody waits any more for what was to fill a range."""
        if self._coming.get((grant.number, where.start)) is call:
            del self._coming[grant.number, where.start]
            self._memory.discard(where)
            self.end_grant(grant)

    def unit_silent(self, number: int) -> None:
        """A unit does not answer: what was on its way to it has to go by another."""
        for (granted, _), call in list(self._coming.items()):
            grant = self._memory.grants.get(granted)
            if grant is not None and grant.unit == number:
                self._give_up_coming(call, grant, _silent(number))

    def _arrived(self, call: Call, grant: Grant, body: Commit | CommitUpdate) -> None:
        if isinstance(body, CommitUpdate):
            self._update(call, grant, body)
        elif grant.number in self._reservations:
            self._release(grant.number)
            self._put(call, grant, body)
        else:
            shelf = self._shelves[body.partition]
            if self._must_wait(shelf, body.rows, body.nbytes, body.ticket):
                self._check_early(body, shelf, grant)
                self._wait(call, shelf)
            else:
                self._put(call, grant, body)

    def _check_early(self, body: Commit | CommitUpdate, shelf: Shelf, grant: Grant) -> None:
        """Refuses at once what would be refused after a wait."""
        try:
            if isinstance(body, Commit):
                shelf.partition.check_open()
                shelf.partition.check_groups(body.groups or (), body.group_sizes)
                self._shelves.check_size(shelf, body.rows, body.nbytes)
            else:
                shelf.partition.known(body.ids)
            shelf.partition.check_schema(body.specs)
        except QueueError:
            self._memory.discard(body.range)
            self.end_if_large(grant)
            raise

    def _put(self, call: Call, grant: Grant | None, body: Commit) -> None:
        shelf = self._shelves[body.partition]
        partition = shelf.partition
        try:
            if shelf.serial + body.rows > MAX_SERIAL:
                raise Full(f"partition {partition.name!r} has used up its ids; start a new store")
            first = first_id(self.generation, shelf.number, shelf.serial)
            ids = range(first, first + body.rows)
            rows = [
                Row(*row)
                for row in zip(
                    ids,
                    _each(body.groups, body.rows),
                    _each(body.versions, body.rows),
                    _each(body.priorities, body.rows),
                    _shares(body.nbytes, body.rows),
                    _each(body.lengths, body.rows),
                    strict=True,
                )
            ]
            samples = partition.put(rows, body.specs, body.group_sizes, self._timers.now(), body.ticket)
        except QueueError:
            self._memory.discard(body.range)
            self.end_if_large(grant)
            raise
        shelf.serial += body.rows
        self._memory.block(body.range, partition.fields_mask(body.specs) or 0, samples)
        self.end_if_large(grant)
        call.undo, call.stays = (lambda: take_back(partition, ids)), True
        call.reply(Committed(first))

    def _update(self, call: Call, grant: Grant, body: CommitUpdate) -> None:
        partition = self._shelves[body.partition].partition
        try:
            samples = partition.update(
                body.ids, body.specs, _shares(body.nbytes, len(body.ids)), body.lengths
            )
        except QueueError:
            self._memory.discard(body.range)
            self.end_if_large(grant)
            raise
        self._memory.block(body.range, partition.fields_mask(body.specs) or 0, samples)
        self.end_if_large(grant)
        call.reply(Done())

    def end_if_large(self, grant: Grant | None) -> None:
        """A grant that was for one put is over with it; a slab goes on."""
        if grant is not None and not grant.slab:
            self.end_grant(grant)

    # -- waiting for room ------------------------------------------------------------------------------------

    def _must_wait(self, shelf: Shelf, rows: int, nbytes: int, ticket: int | None) -> bool:
        # Who was admitted does not queue again behind those that were not.
        others = ticket is None and any(
            not call.answered and _shelf_number(call) == shelf.number for call in self._waiting
        )
        return others or not self._shelves.fits(shelf, rows, nbytes, ticket)

    def _wait(self, call: Call, shelf: Shelf) -> None:
        self._waiting.append(call)
        call.undo = lambda: self._given_up(call)
        self._timers.at(call.deadline, lambda: self._give_up(call, shelf), lambda: not call.answered)

    def _given_up(self, call: Call) -> None:
        """Its client has given a waiting put up."""
        self._forget_waiting(call)
        self._waiting.remove(call)
        self.room_made = True  # smaller puts behind it may fit

    def _give_up(self, call: Call, shelf: Shelf) -> None:
        if call.answered:
            return
        partition = shelf.partition
        call.fail(
            Full(
                f"partition {partition.name!r} left no room until the deadline: {self._held(shelf)}; consume "
                "faster or raise the limits",
                partition=partition.name,
            )
        )
        self._forget_waiting(call)
        self.room_made = True  # smaller puts behind it may fit

    def _held(self, shelf: Shelf) -> str:
        """What takes up the room, by the limits there are."""
        partition, store = shelf.partition, self._shelves
        said: list[str] = []
        if shelf.max_samples is not None:
            promised = partition.admission.promised
            tickets = f" and {promised} promised to tickets (put with ticket=...)" if promised else ""
            said.append(f"{len(partition.samples)} samples{tickets} of at most {shelf.max_samples}")
        if shelf.max_bytes is not None:
            said.append(f"{partition.nbytes} bytes of at most {shelf.max_bytes}")
        if store.max_bytes is not None:
            said.append(f"{store.nbytes} bytes in the whole store of at most {store.max_bytes}")
        return "it holds " + ", ".join(said)

    def _check_still_open(self, call: Call, shelf: Shelf) -> None:
        if shelf.partition.closed:
            self._forget_waiting(call)
        shelf.partition.check_open()

    def _forget_waiting(self, call: Call) -> None:
        if isinstance(call.body, Commit):
            self._memory.discard(call.body.range)

    def admit(self) -> None:
        """Grants room in the order of asking; who waits in one partition does not hold up another."""
        waiting, self._waiting = self._waiting, deque()
        held_up: set[int] = set()
        for call in waiting:
            body = call.body
            if call.answered:
                continue
            assert isinstance(body, Commit | Reserve)
            shelf = self._shelves[body.partition]
            try:
                if shelf.number not in held_up:
                    self._check_still_open(call, shelf)
                    if self._shelves.fits(shelf, body.rows, body.nbytes, body.ticket):
                        if isinstance(body, Reserve):
                            self._grant_reserved(call, shelf, body)
                        else:
                            self._put(call, self._memory.grants.get(body.range.grant), body)
                        continue
            except QueueError as error:
                call.fail(error)
                continue
            held_up.add(shelf.number)
            self._waiting.append(call)

    def forget(self, session: int) -> None:
        """A client is gone: so are its puts under way."""
        for call in self._waiting:
            if call.session.number == session and isinstance(call.body, Commit):
                call.answered = True
                self._memory.discard(call.body.range)
        for key, call in list(self._coming.items()):
            if call.session.number == session:
                del self._coming[key]
                body = call.body
                assert isinstance(body, Commit | CommitUpdate)
                self._memory.discard(body.range)
        for grant in self._memory.grants_of(session):
            self.end_grant(grant)
        self.room_made = True


def take_back(partition: Partition, ids: Sequence[int]) -> None:
    """Its producer has given the put up without hearing that it was done."""
    there = [sample for sample in ids if sample in partition.samples]
    if there:
        partition.drop(there, "given up by its producer before the put was confirmed")


def _too_late() -> Timeout:
    return Timeout("the payload did not reach its storage unit in time; nothing of it is kept")


def _silent(number: int) -> StorageLost:
    return StorageLost(
        f"storage unit {number} does not answer; nothing of this put is kept", unit=number, address=""
    )


def _shelf_number(call: Call) -> int:
    body: Any = call.body
    return body.partition


def check_sizes(sizes: Iterable[int]) -> None:
    """Of groups."""
    for size in sizes:
        if not 0 <= size < MAX_MEMBERS:
            raise InvalidArgument(f"a group of {size} members")


def _check_counts(rows: int, nbytes: int, span: int, least: int = 0) -> None:
    if rows > _MAX_ROWS:
        raise TooLarge(
            f"a put of {rows} samples; at most {_MAX_ROWS} go at once, put the rest after them",
            nbytes=rows,
            limit=_MAX_ROWS,
        )
    if rows < least or not 0 <= nbytes <= span:
        raise InvalidArgument(f"a put of {rows} rows and {nbytes} bytes in {span} bytes of memory")


def check_int64(values: Sequence[int] | int, rows: int = 1) -> None:
    """Readers get them as int64, one for each sample."""
    if isinstance(values, int):
        values = (values,)
    elif len(values) != rows:
        raise InvalidArgument(f"{len(values)} values for {rows} samples")
    if not -_INT64 <= min(values) <= max(values) < _INT64:
        raise InvalidArgument("a version or priority is beyond 64 bits")


def _check_lengths(values: Sequence[int] | int, rows: int) -> None:
    """They are added up: over a group, over a batch."""
    if isinstance(values, int):
        values = (values,)
    elif len(values) != rows:
        raise InvalidArgument(f"{len(values)} lengths for {rows} samples")
    for value in (min(values), max(values)):
        if not 0 <= value < MAX_LENGTH:
            raise InvalidArgument(
                f"a sample of length {value}; the length_field of a sample has to say between 0 and "
                f"{MAX_LENGTH - 1}"
            )


def _positive(span: int) -> int:
    if not 0 < span < 1 << 40:
        raise InvalidArgument(f"a grant of {span} bytes")
    return span


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
