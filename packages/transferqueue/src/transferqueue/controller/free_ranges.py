"""What is free in an arena: ranges that join with their neighbours, found by size in constant time."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import islice

_TRIES = 8  # ranges of the right order of size that are looked at before a larger one is cut


class FreeRanges:
    """Disjoint free ranges. The one freed last is given out first, as its pages are warm."""

    def __init__(self) -> None:
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # Ranges by the bit length of their size; `_sizes` has a bit for each class that is not empty.
        self._bins: list[dict[int, None]] = [{} for _ in range(64)]
        self._sizes = 0
        self.nbytes = 0

    def add(self, start: int, stop: int) -> None:
        """Frees a range, which must not overlap what is free."""
        if start >= stop:
            return
        self.nbytes += stop - start
        before = self._start_of.get(start)
        if before is not None:
            self._remove(before, start)
            start = before
        after = self._stop_of.get(stop)
        if after is not None:
            self._remove(stop, after)
            stop = after
        self._insert(start, stop)

    def take(self, nbytes: int) -> int | None:
        """Takes a range of `nbytes`; returns its start, or None if no free range is as large."""
        size = nbytes.bit_length()
        for start in islice(reversed(self._bins[size]), _TRIES):
            if self._stop_of[start] - start >= nbytes:
                return self._cut(start, nbytes)
        larger = self._sizes >> (size + 1)
        if not larger:
            return None
        size += 1 + ((larger & -larger).bit_length() - 1)
        return self._cut(next(reversed(self._bins[size])), nbytes)

    def cut(self, start: int, stop: int, of: tuple[int, int]) -> None:
        """Takes ``[start, stop)`` out of the free range `of`, as iteration gave it."""
        self._remove(*of)
        self._insert(of[0], start)
        self._insert(stop, of[1])
        self.nbytes -= stop - start

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(sorted(self._stop_of.items()))

    def _cut(self, start: int, nbytes: int) -> int:
        stop = self._stop_of[start]
        self._remove(start, stop)
        self._insert(start + nbytes, stop)
        self.nbytes -= nbytes
        return start

    def _insert(self, start: int, stop: int) -> None:
        if start == stop:
            return
        self._stop_of[start] = stop
        self._start_of[stop] = start
        size = (stop - start).bit_length()
        self._bins[size][start] = None
        self._sizes |= 1 << size

    def _remove(self, start: int, stop: int) -> None:
        del self._stop_of[start]
        del self._start_of[stop]
        size = (stop - start).bit_length()
        del self._bins[size][start]
        if not self._bins[size]:
            self._sizes &= ~(1 << size)


class Holes:
    """Disjoint ranges whose pages are not there: never written, or given back. They are few and lie in what
    is free.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.nbytes = 0

    def add(self, start: int, stop: int) -> None:
        """Adds a range, which must not overlap another."""
        if start < stop:
            insort(self._ranges, (start, stop))
            self.nbytes += stop - start

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of holes that lie in a range."""
        return [(max(s, start), min(e, stop)) for s, e in self._ranges[self._overlapping(start, stop)]]

    def fill(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Removes what lies in a range, and returns it."""
        where = self._overlapping(start, stop)
        holes = self._ranges[where]
        if not holes:
            return holes
        left, right = (holes[0][0], start), (stop, holes[-1][1])
        self._ranges[where] = [part for part in (left, right) if part[0] < part[1]]
        filled = [(max(s, start), min(e, stop)) for s, e in holes]
        self.nbytes -= sum(e - s for s, e in filled)
        return filled

    def _overlapping(self, start: int, stop: int) -> slice:
        first = bisect_right(self._ranges, (start, start))
        if first and self._ranges[first - 1][1] > start:
            first -= 1
        return slice(first, max(first, bisect_left(self._ranges, (stop, stop))))
