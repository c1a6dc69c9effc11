"""Groups: samples that belong together, and the view of them that a whole-group sampler serves from."""

from collections.abc import Iterable, Mapping
from enum import IntEnum

import msgspec

from ..errors import GroupMismatch
from .ready import ReadyQueue


class State(IntEnum):
    """What a sample is to a task."""

    UNREADY = 0  # a field the task needs is missing
    READY = 1
    LEASED = 2
    ACKED = 3


class Standing(IntEnum):
    """What a group is to a task that wants it whole."""

    OPEN = 0  # members are still to come
    WAITING = 1  # all are here, some not ready
    READY = 2
    LEASED = 3  # nothing is missing, but some member is with a consumer
    DONE = 4  # a member is acked, or none is left


# Plain ints compare faster.
UNREADY, READY, LEASED, ACKED = map(int, State)
_OPEN, _WAITING, _READY, _LEASED, _DONE = map(int, Standing)


class Group(msgspec.Struct, gc=False, eq=False):
    """The members of one key, counted by state for every task.

    Attributes:
        key: the producer's name for it.
        tally: ``tally[4 * task + state]``, counts of the members that are not dropped.
        ids: members that are neither acked by all nor dropped, in put order.
        arrived: members ever put.
        size: members in the end, if the producer said so.
        alive: members not dropped.
        order, priority, version: of the first, the last served and the oldest member: a group is served by
            these.
        length: of all members that are not dropped.
        ready, queued: bit sets of views; their queues' own.
    """

    key: str
    tally: list[int]
    ids: dict[int, None] = {}
    arrived: int = 0
    size: int | None = None
    alive: int = 0
    order: int = 0
    priority: int = 0
    version: int = 0
    length: int = 0
    ready: int = 0
    queued: int = 0

    def admit(self, sample: int, order: int, priority: int, version: int, length: int) -> None:
        """Counts one more member."""
        if self.arrived == 0:
            self.order, self.priority, self.version = order, priority, version
        elif priority > self.priority:
            self.priority = priority
        if version < self.version:
            self.version = version
        self.arrived += 1
        self.alive += 1
        self.length += length
        self.ids[sample] = None


class GroupView:
    """The groups of one task under one group size, each in its standing; `refresh` keeps it in O(log
    groups).

    Attributes:
        waiting: groups that are complete but not ready, by version.
    """

    def __init__(self, n: int, task: int, bit: int) -> None:
        self.n = n
        self.bit = bit
        self.ready: ReadyQueue[Group] = ReadyQueue(bit)
        self.counts = [0] * len(Standing)
        self.waiting: dict[int, int] = {}
        self._first = 4 * task
        self._standing: dict[Group, tuple[int, int]] = {}  # and its version in that standing

    def standing(self, group: Group) -> int:
        """The standing that the group's counts say."""
        if group.arrived != (self.n if group.size is None else group.size):
            return _OPEN
        first, tally = self._first, group.tally
        if tally[first + ACKED] or not group.alive:
            return _DONE
        if tally[first]:
            return _WAITING
        return _READY if tally[first + READY] == group.alive else _LEASED

    def refresh(self, group: Group) -> bool:
        """Moves the group to its standing; returns whether it has become ready."""
        known = self._standing.get(group)
        before = None if known is None else known[0]
        now = self.standing(group)
        if before == now:
            return False
        if known is not None:
            self._forget(group, *known)
        self._standing[group] = (now, group.version)
        self.counts[now] += 1
        if now == _READY:
            self.ready.add(group)
            return True
        if now == _WAITING:
            self.waiting[group.version] = self.waiting.get(group.version, 0) + 1
        return False

    def remove(self, group: Group) -> None:
        """Forgets a group of which nothing is left."""
        known = self._standing.pop(group, None)
        if known is not None:
            self._forget(group, *known)

    def unqueue(self, group: Group) -> None:
        """Takes a group out with all traces, as its place in the order is about to change."""
        self.remove(group)
        self.ready.rebuild()

    def _forget(self, group: Group, standing: int, version: int) -> None:
        self.counts[standing] -= 1
        if standing == _READY:
            self.ready.discard(group)
        elif standing == _WAITING:
            left = self.waiting[version] - 1
            if left:
                self.waiting[version] = left
            else:
                del self.waiting[version]


def check_sizes(
    groups: Mapping[str, Group], largest: int | None, keys: Iterable[str | None], sizes: Mapping[str, int]
) -> None:
    """Raises GroupMismatch if new members would let a group outgrow its size, or get a second size.

    Args:
        groups: those there are.
        largest: the largest size that a sampler has asked for, if any has; the limit of a group without one.
        keys: of the new members.
        sizes: announced with them.
    """
    arriving: dict[str, int] = dict.fromkeys(sizes, 0)
    for key in keys:
        if key is not None:
            arriving[key] = arriving.get(key, 0) + 1
    for key, count in arriving.items():
        group = groups.get(key)
        known = None if group is None else group.size
        size = sizes.get(key, known)
        total = count + (0 if group is None else group.arrived)
        if known is not None and size != known:
            raise GroupMismatch(
                f"group {key!r} has size {known}, not {size}", group=key, size=known, members=total
            )
        limit = size if size is not None else largest
        if limit is not None and total > limit:
            raise GroupMismatch(
                f"group {key!r} would have {total} members where {limit} were announced; use another key",
                group=key,
                size=limit,
                members=total,
            )
