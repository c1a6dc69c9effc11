"""Sample ids, and sets of them compressed into intervals.

An id is a positive int64: ``generation (13 bits) | partition (10) | serial (40)``. The generation
is drawn when a store starts and serials are never reused, so the id of a cleared sample can never name
another sample. Serials count per partition and unit, so that what a task has acked is a handful of intervals
however many samples went through.
"""

import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

MAX_UNITS = 1 << 8
MAX_PARTITIONS = 1 << 10
MAX_SERIAL = 1 << 40


def new_generation() -> int:
    """A generation for a store that starts now, in [1, 8191]."""
    return 1 + secrets.randbelow((1 << 13) - 1)


def first_id(generation: int, partition: int, serial: int) -> int:
    """The id of the sample `serial` of a partition; the following serials follow it."""
    return generation << 50 | partition << 40 | serial


def partition_of(sample: int) -> int:
    """The number of the partition that an id belongs to."""
    return sample >> 40 & (MAX_PARTITIONS - 1)


class IdSet:
    """A set of ids kept as sorted half-open intervals.

    Membership and insertion are a binary search; consecutive ids share one interval.
    """

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._count = 0
        for start, stop in intervals:
            self._starts.append(start)
            self._stops.append(stop)
            self._count += stop - start

    @property
    def intervals(self) -> list[tuple[int, int]]:
        """Sorted, disjoint ``(start, stop)`` pairs; `stop` is not in the set."""
        return list(zip(self._starts, self._stops, strict=True))

    def add(self, sample: int) -> bool:
        """Adds one id; returns whether it was new."""
        at = bisect_right(self._starts, sample) - 1
        if at >= 0 and sample < self._stops[at]:
            return False
        joins_left = at >= 0 and self._stops[at] == sample
        joins_right = at + 1 < len(self._starts) and self._starts[at + 1] == sample + 1
        if joins_left and joins_right:
            self._stops[at] = self._stops.pop(at + 1)
            self._starts.pop(at + 1)
        elif joins_left:
            self._stops[at] = sample + 1
        elif joins_right:
            self._starts[at + 1] = sample
        else:
            self._starts.insert(at + 1, sample)
            self._stops.insert(at + 1, sample + 1)
        self._count += 1
        return True

    def __contains__(self, sample: object) -> bool:
        if not isinstance(sample, int):
            sample = int(sample)  # type: ignore[arg-type]  # numpy integers
        at = bisect_right(self._starts, sample) - 1
        return at >= 0 and sample < self._stops[at]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, stop in zip(self._starts, self._stops, strict=True):
            yield from range(start, stop)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IdSet):
            return self.intervals == other.intervals
        if isinstance(other, set | frozenset):
            return set(self) == other
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"IdSet({self._count} ids in {len(self._starts)} intervals)"


def shortened(samples: Sequence[int], limit: int = 8) -> list[int]:
    """The first few ids, for an error message."""
    return [int(sample) for sample in samples[:limit]]
