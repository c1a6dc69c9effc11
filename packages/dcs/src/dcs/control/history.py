"""The last versions of a run: when they were announced and completed, and when they came to whom."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from dcs.control.gangs import Part
from dcs.control.messages import Acked

REMEMBERED = 64


@dataclass(slots=True)
class Delivery:
    """How a version came to one subscriber; times are those of the registry's caller."""

    name: str
    staged_at: float | None = None
    acked_at: float | None = None
    acked: Acked | None = None


@dataclass(slots=True)
class Entry:
    """One version of one epoch."""

    epoch: int
    version: int
    world_size: int
    announced_at: float
    complete_at: float | None = None
    parts: dict[int, Part] = field(default_factory=dict)
    deliveries: dict[int, Delivery] = field(default_factory=dict)

    def delivery(self, member: int, name: str) -> Delivery:
        return self.deliveries.setdefault(member, Delivery(name))


class History:
    """The last 64 versions, the oldest first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[int, int], Entry] = OrderedDict()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def announced(
        self, epoch: int, version: int, world_size: int, rank: int, part: Part, now: float
    ) -> Entry:
        """A rank has announced its part."""
        entry = self._entries.setdefault((epoch, version), Entry(epoch, version, world_size, now))
        entry.parts.setdefault(rank, part)
        if len(self._entries) > REMEMBERED:
            self._entries.popitem(last=False)
        return entry

    def completed(self, epoch: int, version: int, now: float) -> None:
        """All ranks have."""
        entry = self._entries.get((epoch, version))
        if entry is not None and entry.complete_at is None:
            entry.complete_at = now

    def newest(self, version: int) -> Entry | None:
        """The last entry of this version, whatever its epoch."""
        for entry in reversed(self._entries.values()):
            if entry.version == version:
                return entry
        return None

    def first_complete_above(self, version: int) -> float | None:
        """When the oldest remembered version above this one was complete; None without any."""
        times = [
            (entry.version, entry.complete_at)
            for entry in self._entries.values()
            if entry.version > version and entry.complete_at is not None
        ]
        return min(times)[1] if times else None

    def newer(self, version: int) -> int:
        """How many remembered complete versions are above this one."""
        return len(
            {
                entry.version
                for entry in self._entries.values()
                if entry.version > version and entry.complete_at is not None
            }
        )
