"""The ranks of a publisher: who they are in one epoch, and which parts of a version they have announced.

An epoch belongs to a fixed set of processes. Ranks that give the same session and world size come together
in it as long as each rank is new to it, or is the same connection as before; another process on a rank's
place makes a new epoch, whose survivors have to offer their parts again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dcs.control.members import Member, Standing
from dcs.control.messages import Join
from dcs.control.topology import Rank
from dcs.layout import Layout

KEPT_INCOMPLETE = 3
NAMED_RANKS = 16


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank has frozen of a version."""

    root: bytes
    nbytes: int
    freeze_seconds: float


@dataclass(eq=False, slots=True)
class Slot:
    """A rank's place. Its member is None while nobody is there; `state` then says how it went."""

    identity: bytes
    standing: Standing
    name: str
    layout: Layout
    fingerprint: str
    member: Member | None
    state: Literal["absent", "alive", "lost"] = "alive"
    announced: int = -1


@dataclass(eq=False, slots=True)
class Gang:
    """The ranks of one epoch.

    Attributes:
        standing: of the newest incarnation among those that opened or joined it.
        parts: by version and rank, of versions that are not complete.
        completed: the newest version that was completed in this epoch, -1 before the first.
    """

    epoch: int
    session: str
    world_size: int
    standing: Standing
    slots: dict[int, Slot] = field(default_factory=dict)
    parts: dict[int, dict[int, Part]] = field(default_factory=dict)
    completed: int = -1

    def is_of(self, join: Join) -> bool:
        """Whether the joining rank belongs to the same gang."""
        return (self.session, self.world_size) == (join.session, join.world_size)

    @property
    def members(self) -> list[Member]:
        """Those ranks that are alive."""
        return [slot.member for slot in self.slots.values() if slot.member is not None]

    @property
    def is_known(self) -> bool:
        """Whether every rank has joined at some time, so that all layouts are known."""
        return len(self.slots) == self.world_size

    @property
    def is_whole(self) -> bool:
        """Whether every rank is alive."""
        return self.is_known and all(slot.member is not None for slot in self.slots.values())

    @property
    def state(self) -> Literal["absent", "alive", "lost"]:
        if any(slot.state == "lost" for slot in self.slots.values()):
            return "lost"
        return "alive" if self.is_whole else "absent"

    @property
    def announced(self) -> tuple[int, ...]:
        """By rank, the newest version that it has announced; -1 before the first."""
        return tuple(
            self.slots[rank].announced if rank in self.slots else -1 for rank in range(self.world_size)
        )

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks, the first few of them, that have not announced the newest version that any has."""
        announced = self.announced
        newest = max(announced)
        return tuple(rank for rank, version in enumerate(announced) if version < newest)[:NAMED_RANKS]

    @property
    def layouts(self) -> tuple[tuple[str, ...], tuple[Layout, ...]]:
        """Fingerprints and layouts, by rank."""
        ordered = [self.slots[rank] for rank in sorted(self.slots)]
        return tuple(slot.fingerprint for slot in ordered), tuple(slot.layout for slot in ordered)

    def seat(self, member: Member) -> None:
        """Give a member the place of its rank."""
        join = member.join
        before = self.slots.get(join.rank)
        slot = Slot(member.identity, member.standing, join.name, join.layout, member.fingerprint, member)
        if before is not None:
            slot.standing, slot.announced = max(before.standing, member.standing), before.announced
        self.slots[join.rank] = slot
        self.standing = max(self.standing, member.standing)

    def unseat(self, member: Member, state: Literal["absent", "lost"]) -> bool:
        """Note that a rank is gone; False when its place had been taken by another one."""
        slot = self.slots.get(member.join.rank)
        if slot is None or slot.member is not member:
            return False
        slot.member, slot.state = None, state
        return True

    def add(self, rank: int, version: int, part: Part) -> None:
        """Keep a part, and of incomplete versions only the last three."""
        self.slots[rank].announced = max(self.slots[rank].announced, version)
        self.parts.setdefault(version, {})[rank] = part
        for old in sorted(self.parts)[:-KEPT_INCOMPLETE]:
            del self.parts[old]

    def take_complete(self) -> tuple[int, tuple[Part, ...]] | None:
        """The newest version of which all parts are there while all ranks are; drops it and what is older."""
        if not self.is_whole:
            return None
        done = [version for version, parts in self.parts.items() if len(parts) == self.world_size]
        if not done:
            return None
        version = max(done)
        parts = self.parts[version]
        self.drop_parts(version)
        self.completed = version
        return version, tuple(parts[rank] for rank in sorted(parts))

    def drop_parts(self, version: int) -> None:
        """Forget the parts of this version and of older ones."""
        for old in [known for known in self.parts if known <= version]:
            del self.parts[old]

    def as_ranks(self) -> list[Rank]:
        """What the topology needs to know of those that are alive."""
        found: list[Rank] = []
        for rank, slot in sorted(self.slots.items()):
            if slot.member is not None and slot.member.endpoint is not None:
                found.append(
                    Rank(slot.member.id, rank, slot.member.name, slot.fingerprint, slot.member.endpoint)
                )
        return found
