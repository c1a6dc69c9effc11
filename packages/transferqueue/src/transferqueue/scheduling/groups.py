"""Groups: samples that belong together, and the view of them that a whole-group sampler serves from."""

from enum import Enum

from .ready import ReadyQueue


class State(int, Enum):
    """What a sample is to a task."""

    UNREADY = 0  # a field the task needs is missing
    READY = 1
    LEASED = 2
    ACKED = 3


class Standing(Enum):
    """What a group is to a task that wants it whole."""

    OPEN = "open"  # members are still to come
    WAITING = "waiting"  # all are here, some not ready
    READY = "ready"
    LEASED = "leased"  # nothing is missing, but some member is with a consumer
    DONE = "done"  # a member is acked, or none is left


class Group:
    """The members of one key, counted by state for every task.

    Attributes:
        key: the producer's name for it.
        ids: members that are neither acked by all nor dropped, in put order.
        arrived: members ever put.
        size: members in the end, if the producer said so.
        alive: members not dropped.
        tally: ``tally[task][state]`` counts of the members that are not dropped.
        order, priority, version: of the first, the last served and the oldest member: a group is served by
            these.
    """

    __slots__ = ("alive", "arrived", "ids", "key", "order", "priority", "size", "tally", "version")

    def __init__(self, key: str, tasks: int) -> None:
        self.key = key
        self.ids: dict[int, None] = {}
        self.arrived = 0
        self.alive = 0
        self.size: int | None = None
        self.tally = [[0, 0, 0, 0] for _ in range(tasks)]
        self.order = self.priority = self.version = 0

    def admit(self, sample: int, order: int, priority: int, version: int) -> None:
        """Counts one more member."""
        if self.arrived == 0:
            self.order, self.priority, self.version = order, priority, version
        self.priority = max(self.priority, priority)
        self.version = min(self.version, version)
        self.arrived += 1
        self.alive += 1
        self.ids[sample] = None


class GroupView:
    """The groups of one task under one group size, each in its standing; `refresh` keeps it in O(log
    groups).
    """

    def __init__(self, n: int, task: int) -> None:
        self.n = n
        self._task = task
        self.ready: ReadyQueue[Group] = ReadyQueue()
        self.counts = dict.fromkeys(Standing, 0)
        self._standing: dict[Group, Standing] = {}

    def standing(self, group: Group) -> Standing:
        """The standing that the group's counts say."""
        unready, ready, _, acked = group.tally[self._task]
        if group.arrived != (self.n if group.size is None else group.size):
            return Standing.OPEN
        if acked or not group.alive:
            return Standing.DONE
        if unready:
            return Standing.WAITING
        return Standing.READY if ready == group.alive else Standing.LEASED

    def refresh(self, group: Group) -> bool:
        """Moves the group to its standing; returns whether it has become ready."""
        before, now = self._standing.get(group), self.standing(group)
        if before is now:
            return False
        self._forget(group, before)
        self._standing[group] = now
        self.counts[now] += 1
        if now is Standing.READY and group not in self.ready:
            self.ready.add(group, group.priority, group.order, group.version)
        return now is Standing.READY

    def remove(self, group: Group) -> None:
        """Forgets a group of which nothing is left."""
        self._forget(group, self._standing.pop(group, None))

    def _forget(self, group: Group, standing: Standing | None) -> None:
        if standing is not None:
            self.counts[standing] -= 1
        if standing is Standing.READY:
            self.ready.discard(group)
