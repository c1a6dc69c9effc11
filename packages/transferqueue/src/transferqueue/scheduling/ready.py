"""What is ready, lowest (priority, order) first, with O(log n) for every change and no scans."""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Item[T: Hashable](NamedTuple):
    """Something that is ready; compares by (priority, order). `token` is unique to this stay in the queue."""

    priority: int
    order: int
    token: int
    version: int
    value: T


class ReadyQueue[T: Hashable]:
    """Ready items in lanes by version, so that a lower bound on the version skips lanes, not items.

    `discard` only forgets; the heap entry it leaves is dropped when it surfaces, or when such entries
    outnumber the living and the heaps are rebuilt, so the work stays amortised O(log n) a change.
    """

    def __init__(self) -> None:
        self._tokens: dict[T, int] = {}
        self._lanes: dict[int, list[Item[T]]] = {}
        # The first item of each lane is registered in _heads; a registration that is no longer true is
        # dropped on sight.
        self._heads: list[tuple[int, int, int, int]] = []
        self._registered: dict[int, int] = {}
        self._entries = 0
        self._last_token = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, value: object) -> bool:
        return value in self._tokens

    def add(self, value: T, priority: int, order: int, version: int) -> None:
        """Puts `value` in; it must not be there."""
        self._last_token += 1
        self._tokens[value] = self._last_token
        lane = self._lanes.setdefault(version, [])
        heappush(lane, Item(priority, order, self._last_token, version, value))
        self._entries += 1
        if lane[0].token == self._last_token:
            self._register(lane[0])

    def discard(self, value: T) -> None:
        """Takes `value` out if it is there."""
        if self._tokens.pop(value, None) is not None and self._entries > 2 * len(self._tokens) + 64:
            self._rebuild()

    def take(
        self, count: int, max_priority: int | None = None, min_version: int | None = None
    ) -> list[Item[T]]:
        """Removes and returns up to `count` items, in order, within the bounds (both inclusive)."""
        if min_version is not None:
            return self._take_from(min_version, count, max_priority)
        taken: list[Item[T]] = []
        while self._heads and len(taken) < count:
            priority, _, token, version = self._heads[0]
            if max_priority is not None and priority > max_priority:
                break
            if self._registered.get(version) != token:
                heappop(self._heads)
            elif (first := self._first(version)) is not None and first.token == token:
                taken.append(self._pop(version))
        return taken

    def _take_from(self, min_version: int, count: int, max_priority: int | None) -> list[Item[T]]:
        firsts = [self._first(version) for version in list(self._lanes) if version >= min_version]
        heap = [first for first in firsts if first is not None]
        heapify(heap)
        taken: list[Item[T]] = []
        while heap and len(taken) < count and (max_priority is None or heap[0].priority <= max_priority):
            version = heappop(heap).version
            taken.append(self._pop(version))
            if (first := self._first(version)) is not None:
                heappush(heap, first)
        return taken

    def _first(self, version: int) -> Item[T] | None:
        """The first living item of a lane, registered; an empty lane disappears."""
        lane = self._lanes.get(version)
        if lane is None:
            return None
        while lane and self._tokens.get(lane[0].value) != lane[0].token:
            heappop(lane)
            self._entries -= 1
        if not lane:
            del self._lanes[version]
            self._registered.pop(version, None)
            return None
        if self._registered.get(version) != lane[0].token:
            self._register(lane[0])
        return lane[0]

    def _pop(self, version: int) -> Item[T]:
        """Removes the first item of a lane, which `_first` has just found alive."""
        item = heappop(self._lanes[version])
        self._entries -= 1
        del self._tokens[item.value]
        self._first(version)
        return item

    def _register(self, item: Item[T]) -> None:
        self._registered[item.version] = item.token
        heappush(self._heads, (item.priority, item.order, item.token, item.version))

    def _rebuild(self) -> None:
        living = [
            item
            for lane in self._lanes.values()
            for item in lane
            if self._tokens.get(item.value) == item.token
        ]
        self._lanes, self._heads, self._registered, self._entries = {}, [], {}, len(living)
        for item in living:
            self._lanes.setdefault(item.version, []).append(item)
        for lane in self._lanes.values():
            heapify(lane)
            self._register(lane[0])
