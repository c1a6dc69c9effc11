"""A consumer group: the fields it needs, and the incremental sets it is served from."""

from collections import deque
from dataclasses import dataclass, field

from ..ids import IdSet
from .groups import GroupView
from .loans import Loan
from .ready import ReadyQueue
from .samples import Sample


@dataclass(slots=True, eq=False)
class Task:
    """One task of a partition.

    Attributes:
        bit: ``1 << index``, its place in the bit sets of a sample.
        needs: bit set of the fields it needs.
        ready: its ready samples, and views: its ready groups by group size.
        unready: samples by version for which a field is missing.
        leased: sample id -> the lease it is in.
        held: samples leased, by owner.
        backlog: ids in put order, of which those that the task has done are dropped from the left when it
            is read.
        delivered_total, acked_total, nacked_total, lapsed_total: samples since the partition was made.
    """

    name: str
    index: int
    bit: int
    fields: tuple[str, ...]
    needs: int
    ready: ReadyQueue[Sample]
    views: dict[int, GroupView] = field(default_factory=dict)
    unready: dict[int, int] = field(default_factory=dict)
    leased: dict[int, Loan] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    acked: IdSet = field(default_factory=IdSet)
    backlog: deque[int] = field(default_factory=deque)
    delivered_total: int = 0
    acked_total: int = 0
    nacked_total: int = 0
    lapsed_total: int = 0

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Samples that are unready, ready, leased and acked."""
        return sum(self.unready.values()), len(self.ready), len(self.leased), len(self.acked)

    def count_unready(self, version: int, by: int) -> None:
        """Counts samples of a version that became unready, or (negative) are no longer."""
        left = self.unready.get(version, 0) + by
        if left:
            self.unready[version] = left
        else:
            del self.unready[version]

    def count_held(self, owner: int, by: int) -> None:
        """Counts samples that an owner has got, or (negative) has no longer."""
        left = self.held.get(owner, 0) + by
        if left:
            self.held[owner] = left
        else:
            self.held.pop(owner, None)
