"""From what a fetch wants to the samples it gets: taken out of the ready queues, not leased yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgument
from ..samplers import Balanced, Freshest, TokenBudget, group_size, needs_lengths
from .book import Book
from .groups import Group, Standing
from .packing import bins_needed, pack, split_equally, split_to
from .ready import ReadyQueue
from .samples import Sample
from .tasks import Task
from .wanted import Wanted

type Unit = Sample | Group
_LEASED = int(Standing.LEASED)


@dataclass(slots=True)
class Picked:
    """Units that left their queue.

    Attributes:
        units: samples, or whole groups, in the order served.
        bins: the units of each micro-batch, where a token budget has parted them.
        ends: the stream ends with them.
    """

    queue: ReadyQueue[Any]
    units: Sequence[Unit]
    bins: list[list[Unit]] | None
    ends: bool

    def put_back(self) -> None:
        """Makes the units ready again, in their old place."""
        self.queue.restore(self.units)


class _Bins:
    """Fills micro-batches one after the other; says no to the unit that would need one too many."""

    def __init__(self, bins: int, tokens: int, units: int) -> None:
        self.filled: list[list[Unit]] = [[]]
        self._bins, self._tokens, self._units = bins, tokens, units
        self._room = tokens

    @property
    def full(self) -> bool:
        """Whether even a unit of length 1 would not fit."""
        return len(self.filled) == self._bins and (self._room < 1 or len(self.filled[-1]) == self._units)

    def __call__(self, unit: Unit) -> bool:
        last = self.filled[-1]
        if last and (unit.length > self._room or len(last) == self._units):
            if len(self.filled) == self._bins:
                self._room = 0
                return False
            self.filled.append(last := [])
            self._room = self._tokens
        last.append(unit)
        self._room -= unit.length
        return True


def pick(book: Book, task: Task, wanted: Wanted, ours: int, room: int | None = None) -> Picked | None:
    """Takes what `wanted` is to get out of the queue it is served from; None if it has to wait.

    Args:
        ours: leased samples that the caller need not wait for at the end of the stream.
        room: samples left in the global batch; None: any number.

    Raises:
        Closed: the partition is closed and nothing can come any more.
    """
    sampler = wanted.sampler
    if needs_lengths(sampler) and book.length_field is None:
        raise InvalidArgument(
            f"{type(sampler).__name__} counts lengths, but partition {book.name!r} names no "
            'length_field; create it with the ragged column that counts, such as length_field="tokens"'
        )
    n = group_size(sampler)
    view = None if n is None else book.view(task, n)
    queue = task.ready if view is None else view.ready
    unit = n or 1
    ranks = 1 if isinstance(sampler, Balanced) else wanted.world_size
    count = wanted.count // unit * ranks
    enough = 1 if wanted.partial else -(-wanted.floor // unit) * ranks
    if room is not None:
        count = min(count, room // unit)
        enough = min(enough, count)
    oldest = book.oldest_served(wanted)
    ending = False
    if book.closed:
        waiting = task.unready if view is None else view.waiting
        if oldest is not None:
            waiting = any(version >= oldest for version in waiting)
        if not waiting:
            enough = 1
            out = (view is None or view.counts[_LEASED] > 0) and len(task.leased) > ours
            newest = queue.newest()
            if not out and (newest is None or (oldest is not None and newest < oldest)):
                raise book.drained(task)
            ending = len(task.leased) <= ours
    bins = None
    if isinstance(sampler, TokenBudget):
        bins = _Bins(ranks, sampler.tokens, wanted.count // unit)
    elif len(queue) < enough:
        return None
    units = queue.take(count, wanted.max_priority, oldest, bins, isinstance(sampler, Freshest))
    picked = Picked(queue, units, None if bins is None else bins.filled, False)
    if not units or (len(units) < enough and (bins is None or not bins.full)):
        picked.put_back()
        return None
    if ending:
        newest = queue.newest()
        picked.ends = newest is None or (oldest is not None and newest < oldest)
    return picked


def members(book: Book, units: Sequence[Unit]) -> list[Sample]:
    """The samples of units, in order."""
    samples: list[Sample] = []
    for unit in units:
        if isinstance(unit, Sample):
            samples.append(unit)
        else:
            samples.extend(book.samples[sample] for sample in unit.ids)
    return samples


def arrange(book: Book, picked: Picked, wanted: Wanted) -> list[list[list[Sample]]]:
    """The rounds to make of what was picked: ``rounds[k][rank]`` are the samples of one micro-batch, none
    where there was nothing left for the rank. Every round has at least one sample.
    """
    ranks, sampler, units = wanted.world_size, wanted.sampler, picked.units
    if isinstance(sampler, Balanced):
        parts = [
            members(book, [units[at] for at in share])
            for share in split_equally([unit.length for unit in units], ranks)
        ]
        budget = sampler.token_budget
        if budget is None:
            return [parts]
        lengths = [[sample.length for sample in part] for part in parts]
        rounds = max(bins_needed(part, budget) for part in lengths)
        packed = [pack(part, budget, rounds) for part in lengths]
        return [
            [[part[at] for at in bins[k]] for part, bins in zip(parts, packed, strict=True)]
            for k in range(rounds)
        ]
    if picked.bins is not None:
        starts: list[list[int]] = []
        for filled in picked.bins:
            at = sum(map(len, starts))
            starts.append(list(range(at, at + len(filled))))
        shares = split_to(starts, [unit.length for unit in units], ranks)
    else:
        share, rest = divmod(len(units), ranks)
        ends = [share * (rank + 1) + min(rank + 1, rest) for rank in range(ranks)]
        shares = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [[members(book, [units[at] for at in share]) for share in shares]]
