"""Fetches: those that wait, and what is told to a consumer about where its samples lie."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ..errors import InvalidArgument, QueueError
from ..scheduling.partition import Partition
from ..scheduling.samples import Lease, Sample
from ..scheduling.wanted import Wanted
from ..wire.messages import (
    Candidates,
    Fetch,
    FetchChosen,
    Flag,
    Leased,
    ListCandidates,
    Locate,
    Located,
    Places,
)
from ..wire.node import Call
from .blocks import Block
from .explaining import nothing_served
from .memory import Memory
from .shelves import Shelf, Shelves
from .timers import Timers

_MAX_CANDIDATES = 100_000
_FEW = 16


@dataclass(slots=True, eq=False)
class WaitingFetch:
    """A fetch for which too little is ready.

    Attributes:
        partial: at its deadline it takes what there is.
        limit: it only wants to see so many candidates; None: it leases.
    """

    call: Call
    wanted: Wanted
    fields: list[str] | None
    partial: bool
    seconds: float
    limit: int | None


class Fetches:
    """Serves fetches now or when something becomes ready."""

    def __init__(self, shelves: Shelves, memory: Memory, timers: Timers) -> None:
        self._shelves = shelves
        self._memory = memory
        self._timers = timers
        self._waiting: dict[tuple[int, str], list[WaitingFetch]] = {}
        self._sweep_at: dict[tuple[int, str], int] = {}

    @property
    def waiting(self) -> int:
        return sum(not one.call.answered for fetches in self._waiting.values() for one in fetches)

    def fetch(self, call: Call, body: Fetch, now: float) -> None:
        body.wanted.check()
        shelf = self._shelves[body.partition]
        waiting = WaitingFetch(
            call, body.wanted, body.fields, body.partial, lease_seconds(body.lease_seconds), None
        )
        self._serve_or_wait(shelf, waiting, now)

    def list_candidates(self, call: Call, body: ListCandidates, now: float) -> None:
        body.wanted.check()
        if not body.wanted.count <= body.limit <= _MAX_CANDIDATES:
            raise InvalidArgument(
                f"a list of {body.limit} candidates for {body.wanted.count} samples; "
                f"at most {_MAX_CANDIDATES}"
            )
        shelf = self._shelves[body.partition]
        self._serve_or_wait(shelf, WaitingFetch(call, body.wanted, None, False, 1.0, body.limit), now)

    def fetch_chosen(self, call: Call, body: FetchChosen, now: float) -> None:
        partition = self._shelves[body.partition].partition
        lease = partition.lease_ids(
            body.task,
            body.ids,
            now=now,
            seconds=lease_seconds(body.lease_seconds),
            owner=call.session.number,
            require=body.fields or (),
        )
        if lease is None:
            call.reply(Flag(False))
        else:
            self._deliver(call, partition, lease, body.fields)

    def _serve_or_wait(self, shelf: Shelf, waiting: WaitingFetch, now: float) -> None:
        if not self._serve(shelf, waiting, now):
            self._wait((shelf.number, waiting.wanted.task), waiting)
            call = waiting.call
            self._timers.at(call.deadline, lambda: self._give_up(shelf, waiting), lambda: not call.answered)

    def _wait(self, key: tuple[int, str], waiting: WaitingFetch) -> None:
        """Queues it, and now and then drops those that were given up: nothing may ever wake them."""
        queue = self._waiting.setdefault(key, [])
        queue.append(waiting)
        if len(queue) >= self._sweep_at.get(key, _FEW):
            queue[:] = [one for one in queue if not one.call.answered]
            self._sweep_at[key] = 2 * len(queue) + _FEW

    def _serve(self, shelf: Shelf, waiting: WaitingFetch, now: float) -> bool:
        partition, call = shelf.partition, waiting.call
        if waiting.limit is not None:
            found = partition.candidates(waiting.wanted, waiting.limit, now=now, owner=call.session.number)
            if found is not None:
                call.reply(Candidates(found))
            return found is not None
        lease = partition.lease(
            waiting.wanted,
            now=now,
            seconds=waiting.seconds,
            owner=call.session.number,
            require=waiting.fields or (),
        )
        if lease is None:
            return False
        self._deliver(call, partition, lease, waiting.fields)
        return True

    def _deliver(self, call: Call, partition: Partition, lease: Lease, fields: Sequence[str] | None) -> None:
        """Answers a call with what it has leased."""
        samples = lease.samples
        names = partition.task(lease.task).fields if fields is None else fields
        places = self._place(call, samples, partition.fields_mask(names))
        unpin = call.undo

        def take_back() -> None:
            if unpin is not None:
                unpin()
            partition.take_back(lease, self._timers.now())

        call.undo = take_back
        call.reply(
            Leased(
                lease.id,
                lease.ids,
                [None if sample.group is None else sample.group.key for sample in samples],
                [sample.version for sample in samples],
                [sample.priority for sample in samples],
                places,
                -1 if lease.seat is None else lease.seat[3],
                lease.is_last,
                lease.dummy,
            )
        )

    def locate(self, call: Call, body: Locate) -> None:
        partition = self._shelves[body.partition].partition
        samples = partition.known(body.ids)
        mask = None
        if body.fields is not None:
            partition.require(samples, body.fields)
            mask = partition.fields_mask(body.fields)
        call.reply(Located(self._place(call, samples, mask)))

    def _place(self, call: Call, samples: Sequence[Sample], mask: int | None) -> Places:
        """Where samples lie, pinned for the caller."""
        places, blocks = places_of(samples, mask)
        session = call.session.number
        call.pins = self._memory.pin(session, blocks)
        call.undo = lambda: self._memory.unpin(session, call.pins)
        if call.local:
            call.arenas = [self._memory.arena(arena) for arena in {block.arena for block in blocks}]
        return places

    def _give_up(self, shelf: Shelf, waiting: WaitingFetch) -> None:
        call, wanted = waiting.call, waiting.wanted
        if call.answered:
            return
        try:
            waiting.wanted = replace(wanted, partial=waiting.partial)
            if self._serve(shelf, waiting, self._timers.now()):
                return
            raise nothing_served(shelf.partition, wanted)
        except QueueError as error:
            call.fail(error)

    def wake(self, shelf: Shelf, now: float) -> None:
        """Serves those that wait for the tasks in which something has become ready, first come first."""
        woken, shelf.partition.woken = shelf.partition.woken, set()
        for task in woken:
            key = (shelf.number, task)
            left = [
                one
                for one in self._waiting.pop(key, [])
                if not one.call.answered and not self._serve_or_fail(shelf, one, now)
            ]
            if left:
                self._waiting[key] = left

    def _serve_or_fail(self, shelf: Shelf, waiting: WaitingFetch, now: float) -> bool:
        try:
            return self._serve(shelf, waiting, now)
        except QueueError as error:
            waiting.call.fail(error)
            return True


def places_of(samples: Sequence[Sample], mask: int | None) -> tuple[Places, list[Block]]:
    """Where the fields in `mask` (None: all) of samples lie, in as few runs as there are."""
    index: dict[Block, int] = {}
    runs: list[tuple[int, int, int, int]] = []
    depth = max((len(sample.places) for sample in samples), default=0)
    for level in range(depth):
        last: Block | None = None
        start = count = first = 0
        for position, sample in enumerate(samples):
            block, row = sample.places[level] if level < len(sample.places) else (None, 0)
            if block is not None and mask is not None and not block.fields & mask:
                block = None
            if block is last and last is not None and row == first + count:
                count += 1
                continue
            if last is not None:
                runs.append((start, count, index.setdefault(last, len(index)), first))
            last, start, count, first = block, position, 1, row
        if last is not None:
            runs.append((start, count, index.setdefault(last, len(index)), first))
    blocks = list(index)
    return Places(len(samples), [block.handle for block in blocks], runs), blocks


def lease_seconds(seconds: float) -> float:
    if not (0 < seconds < math.inf):
        raise InvalidArgument(f"lease_seconds is {seconds}; it must be positive and finite")
    return seconds
