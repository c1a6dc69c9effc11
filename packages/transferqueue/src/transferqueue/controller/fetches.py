"""Fetches: those that wait, and what is told to a consumer about where its samples lie."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ..errors import InvalidArgument, QueueError, Timeout
from ..samplers import Groups
from ..scheduling.partition import Partition
from ..scheduling.samples import Lease, Sample
from ..scheduling.wanted import Wanted
from ..wire.messages import Fetch, Leased, Locate, Located, Places
from ..wire.node import Call
from .memory import Block, Memory
from .shelves import Shelf, Shelves
from .timers import Timers


@dataclass(slots=True)
class WaitingFetch:
    """A fetch for which too little is ready. `partial`: at its deadline it takes what there is."""

    call: Call
    wanted: Wanted
    fields: list[str] | None
    partial: bool
    seconds: float


class Fetches:
    """Serves fetches now or when something becomes ready."""

    def __init__(self, shelves: Shelves, memory: Memory, timers: Timers) -> None:
        self._shelves = shelves
        self._memory = memory
        self._timers = timers
        self._waiting: dict[tuple[int, str], list[WaitingFetch]] = {}

    @property
    def waiting(self) -> int:
        return sum(not one.call.answered for fetches in self._waiting.values() for one in fetches)

    def fetch(self, call: Call, body: Fetch, now: float) -> None:
        wanted = body.wanted
        if wanted.count < 1:
            raise InvalidArgument(f"batch_size is {wanted.count}; it must be at least 1")
        if isinstance(wanted.sampler, Groups) and (wanted.sampler.n < 1 or wanted.count % wanted.sampler.n):
            raise InvalidArgument(
                f"batch_size {wanted.count} is no multiple of the group size {wanted.sampler.n}; "
                "groups are served whole"
            )
        if wanted.at_least is not None and not 1 <= wanted.at_least <= wanted.count:
            raise InvalidArgument(
                f"at_least is {wanted.at_least}; it must be in [1, {wanted.count}], the batch_size"
            )
        shelf = self._shelves[body.partition]
        waiting = WaitingFetch(call, wanted, body.fields, body.partial, lease_seconds(body.lease_seconds))
        if not self._serve(shelf, waiting, now):
            self._waiting.setdefault((shelf.number, wanted.task), []).append(waiting)
            self._timers.at(call.deadline, lambda: self._give_up(shelf, waiting))

    def _serve(self, shelf: Shelf, waiting: WaitingFetch, now: float) -> bool:
        partition, call = shelf.partition, waiting.call
        lease = partition.lease(
            waiting.wanted,
            now=now,
            seconds=waiting.seconds,
            owner=call.session.number,
            require=waiting.fields or (),
        )
        if lease is None:
            return False
        self.deliver(call, partition, lease, waiting.fields)
        return True

    def deliver(self, call: Call, partition: Partition, lease: Lease, fields: Sequence[str] | None) -> None:
        """Answers a call with what it has leased."""
        samples = [partition.samples[sample] for sample in lease.ids]
        names = partition.task(lease.task).fields if fields is None else fields
        places = self._place(call, samples, partition.fields_mask(names))
        unpin = call.undo

        def take_back() -> None:
            if unpin is not None:
                unpin()
            if lease.id in partition.leases:
                partition.nack(lease.id, self._timers.now())

        call.undo = take_back
        call.reply(
            Leased(
                lease.id,
                list(lease.ids),
                [None if sample.group is None else sample.group.key for sample in samples],
                [sample.version for sample in samples],
                [sample.priority for sample in samples],
                places,
                0,
                [],
                False,
                False,
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
            ready = len(shelf.partition.task(wanted.task).ready)
            raise Timeout(
                f"task {wanted.task!r} of partition {shelf.partition.name!r} had no {wanted.count} "
                f"samples for {wanted.sampler} until the deadline (ready: {ready}, max_priority: "
                f"{wanted.max_priority}, min_version: {wanted.min_version})",
                ready=ready,
            )
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
