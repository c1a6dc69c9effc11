"""What is ready, lowest (priority, order) first, with O(log n) for every change and no scans."""

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Protocol


class Orderable(Protocol):
    """What a queue orders. `ready` and `queued` are bit sets of queues, one bit for each queue it can be in:
    whether it is ready there, and whether an entry for it (alive or not) is there.
    """

    priority: int
    order: int
    version: int
    ready: int
    queued: int


class _Lane[T: Orderable]:
    """The entries of one version: those that came in order, and the others."""

    __slots__ = ("fifo", "heap")

    def __init__(self) -> None:
        self.fifo: deque[T] = deque()  # ascending
        self.heap: list[tuple[int, int, T]] = []


class ReadyQueue[T: Orderable]:
    """Ready items in lanes by version, so that a lower bound on the version skips lanes, not items.

    What leaves out of turn leaves its entry behind: it is dropped when it surfaces, or revived when the item
    is added again, as (priority, order, version) of an item in a queue never change. When the dead outnumber
    the living the lanes are rebuilt, so the work stays amortised O(log n) a change.
    """

    def __init__(self, bit: int) -> None:
        self._bit = bit
        self._count = 0
        self._entries = 0
        self._lanes: dict[int, _Lane[T]] = {}
        # The first item of each lane stands in _heads, the version of each lane in _newest; what is no longer
        # true there is dropped on sight.
        self._heads: list[tuple[int, int, int]] = []
        self._newest: list[int] = []

    def __len__(self) -> int:
        return self._count

    def __contains__(self, item: T) -> bool:
        return bool(item.ready & self._bit)

    def add(self, item: T) -> None:
        """Makes `item` ready; it must not be."""
        bit = self._bit
        item.ready |= bit
        self._count += 1
        if item.queued & bit:
            return
        item.queued |= bit
        self._entries += 1
        priority, order = item.priority, item.order
        lane = self._lanes.get(item.version)
        if lane is None:
            lane = self._lanes[item.version] = _Lane()
            heappush(self._newest, -item.version)
            if len(self._newest) > 2 * len(self._lanes) + 64:
                self._newest[:] = sorted(-version for version in self._lanes)
        fifo = lane.fifo
        if not fifo:
            fifo.append(item)
            if not lane.heap or (priority, order) < lane.heap[0][:2]:
                self._register(priority, order, item.version)
            return
        last = fifo[-1]
        if priority > last.priority or (priority == last.priority and order > last.order):
            fifo.append(item)
            return
        first = fifo[0]
        before = priority < first.priority or (priority == first.priority and order < first.order)
        if before:
            fifo.appendleft(item)
        else:
            heappush(lane.heap, (priority, order, item))
        if before and (not lane.heap or (priority, order) < lane.heap[0][:2]):
            self._register(priority, order, item.version)

    def restore(self, items: Iterable[T]) -> None:
        """Adds many, given in ascending order; fastest where they precede what is there."""
        for item in reversed(list(items)):
            self.add(item)

    def discard(self, item: T) -> None:
        """Makes `item` not ready, if it is."""
        bit = self._bit
        if not item.ready & bit:
            return
        item.ready ^= bit
        self._count -= 1
        lane = self._lanes[item.version]
        if lane.fifo and lane.fifo[0] is item:
            self._settle(item.version, lane)
        elif self._entries > 2 * self._count + 64:
            self.rebuild()

    def take(
        self,
        count: int,
        max_priority: int | None = None,
        min_version: int | None = None,
        fits: Callable[[T], bool] | None = None,
        newest_first: bool = False,
    ) -> list[T]:
        """Removes and returns up to `count` items, in order, within the bounds (both inclusive).

        Args:
            fits: asked of each item in turn; the first that does not fit ends it, and stays.
            newest_first: highest version first; (priority, order) decides within a version.
        """
        taken: list[T] = []
        if newest_first:
            self._take_newest(taken, count, max_priority, min_version, fits)
        elif min_version is not None:
            self._take_from(taken, count, max_priority, min_version, fits)
        else:
            self._take_all(taken, count, max_priority, fits)
        self._count -= len(taken)
        return taken

    def newest(self) -> int | None:
        """The highest version of a ready item; None if nothing is ready."""
        newest = self._newest
        while newest:
            lane = self._lanes.get(-newest[0])
            if lane is not None and self._first(lane) is not None:
                return -newest[0]
            self._close_lane(-newest[0])
        return None

    def _take_all(
        self, taken: list[T], count: int, max_priority: int | None, fits: Callable[[T], bool] | None
    ) -> None:
        heads = self._heads
        while heads and len(taken) < count:
            priority, order, version = heads[0]
            lane = self._lanes.get(version)
            first = None if lane is None else self._first(lane)
            if lane is None or first is None:
                heappop(heads)
                self._close_lane(version)
                continue
            if first.priority != priority or first.order != order:
                heappop(heads)  # a better registration of this lane is in, or goes in now
                self._register(first.priority, first.order, version)
                continue
            heappop(heads)
            going = self._drain(lane, taken, count, max_priority, fits, heads[0] if heads else None)
            self._settle(version, lane)
            if not going:
                return

    def _take_from(
        self,
        taken: list[T],
        count: int,
        max_priority: int | None,
        min_version: int,
        fits: Callable[[T], bool] | None,
    ) -> None:
        versions = self._versions_from(min_version)
        heap: list[tuple[int, int, int]] = []
        for version in versions:
            first = self._first(self._lanes[version])
            if first is not None:
                heap.append((first.priority, first.order, version))
        heapify(heap)
        going = True
        while heap and going and len(taken) < count:
            version = heappop(heap)[2]
            lane = self._lanes[version]
            going = self._drain(lane, taken, count, max_priority, fits, heap[0] if heap else None)
            first = self._first(lane)
            if first is not None:
                heappush(heap, (first.priority, first.order, version))
        for version in versions:
            if version in self._lanes:
                self._settle(version, self._lanes[version])

    def _take_newest(
        self,
        taken: list[T],
        count: int,
        max_priority: int | None,
        min_version: int | None,
        fits: Callable[[T], bool] | None,
    ) -> None:
        passed: list[int] = []  # lanes that keep something beyond max_priority
        while len(taken) < count:
            version = self.newest()
            if version is None or (min_version is not None and version < min_version):
                break
            lane = self._lanes[version]
            self._drain(lane, taken, count, max_priority, fits, None)
            first = self._first(lane)
            self._settle(version, lane)
            if first is not None:
                if len(taken) == count or max_priority is None or first.priority <= max_priority:
                    break  # full, or the next does not fit
                heappop(self._newest)
                passed.append(-version)
        for version in passed:
            heappush(self._newest, version)

    def _versions_from(self, min_version: int) -> list[int]:
        """The versions of living lanes from `min_version` on; work in proportion to them."""
        found: list[int] = []
        while (version := self.newest()) is not None and version >= min_version:
            heappop(self._newest)
            if not found or found[-1] != version:  # a lane that came back stands there twice
                found.append(version)
        for version in found:
            heappush(self._newest, -version)
        return found

    # -- one lane --------------------------------------------------------------------------------------------

    def _drain(
        self,
        lane: _Lane[T],
        taken: list[T],
        count: int,
        max_priority: int | None,
        fits: Callable[[T], bool] | None,
        until: tuple[int, int, int] | None,
    ) -> bool:
        """Moves items of a lane to `taken`, up to `count` in all and the key `until`; returns whether it may
        go on with another lane.
        """
        bit, fifo = self._bit, lane.fifo
        if not lane.heap and until is None and max_priority is None and fits is None:
            left = len(fifo)
            while fifo and len(taken) < count:
                item = fifo.popleft()
                item.queued ^= bit
                if item.ready & bit:
                    item.ready ^= bit
                    taken.append(item)
            self._entries -= left - len(fifo)
            return True
        while len(taken) < count:
            item = self._first(lane)
            if item is None:
                return True
            if until is not None and (item.priority, item.order) > until[:2]:
                return True
            if max_priority is not None and item.priority > max_priority:
                return False
            if fits is not None and not fits(item):
                return False
            if fifo and fifo[0] is item:
                fifo.popleft()
            else:
                heappop(lane.heap)
            item.queued ^= bit
            item.ready ^= bit
            self._entries -= 1
            taken.append(item)
        return True

    def _first(self, lane: _Lane[T]) -> T | None:
        """The first living item of a lane; dead ones before it go."""
        bit, fifo, heap = self._bit, lane.fifo, lane.heap
        while fifo and not fifo[0].ready & bit:
            fifo.popleft().queued ^= bit
            self._entries -= 1
        while heap and not heap[0][2].ready & bit:
            heappop(heap)[2].queued ^= bit
            self._entries -= 1
        if not heap:
            return fifo[0] if fifo else None
        priority, order, item = heap[0]
        if not fifo:
            return item
        first = fifo[0]
        if first.priority < priority or (first.priority == priority and first.order < order):
            return first
        return item

    def _settle(self, version: int, lane: _Lane[T]) -> None:
        """Registers a lane's first item after a change, or ends the lane."""
        first = self._first(lane)
        if first is None:
            self._close_lane(version)
        else:
            self._register(first.priority, first.order, version)

    def _close_lane(self, version: int) -> None:
        self._lanes.pop(version, None)
        while self._newest and -self._newest[0] not in self._lanes:
            heappop(self._newest)

    def _register(self, priority: int, order: int, version: int) -> None:
        heads = self._heads
        if heads and heads[0] == (priority, order, version):
            return
        heappush(heads, (priority, order, version))
        if len(heads) > 2 * len(self._lanes) + 64:
            self._index()

    def _index(self) -> None:
        """Makes both registers anew."""
        firsts = [(version, self._first(lane)) for version, lane in self._lanes.items()]
        self._lanes = {version: self._lanes[version] for version, first in firsts if first is not None}
        # In place: callers hold on to the lists.
        self._heads[:] = [
            (first.priority, first.order, version) for version, first in firsts if first is not None
        ]
        self._newest[:] = [-version for version in self._lanes]
        heapify(self._heads)
        heapify(self._newest)

    def rebuild(self) -> None:
        """Drops every dead entry."""
        bit = self._bit
        for lane in self._lanes.values():
            for item in lane.fifo:
                if not item.ready & bit:
                    item.queued ^= bit
            for _, _, item in lane.heap:
                if not item.ready & bit:
                    item.queued ^= bit
            lane.fifo = deque(item for item in lane.fifo if item.ready & bit)
            lane.heap = [entry for entry in lane.heap if entry[2].ready & bit]
            heapify(lane.heap)
        self._entries = self._count
        self._index()
