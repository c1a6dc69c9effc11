"""One run: its publisher's ranks, its subscribers, its versions, and what each member is to be told."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import msgspec

from dcs.control.gangs import Gang, Part
from dcs.control.gatherings import Gatherings
from dcs.control.groups import Groups
from dcs.control.history import History
from dcs.control.members import NEVER, Member
from dcs.control.messages import (
    Announcement,
    Complete,
    Join,
    Known,
    Receipt,
    Roster,
    RunState,
    Source,
)
from dcs.control.topology import Fabric
from dcs.layout import Layout
from dcs.manifest import is_content

MAX_DEPARTED = 64


@dataclass(frozen=True, slots=True)
class Departed:
    """A member that is none any more."""

    role: Literal["publisher", "subscriber"]
    name: str
    reason: str
    at: float


class Run:
    """The state of one run, and the messages that tell it.

    Attributes:
        epoch: the highest that was ever issued, by this coordinator or the one before it.
        version: the newest that was ever complete; -1 before the first.
        layouts: of its members, by fingerprint.
        roots: of that version by rank; None when they are not known, as after a restart.
        stale: subscribers that are to be told the state anew.
        roster_is_stale: whether the ranks are to be told the roster anew.
    """

    def __init__(self, name: str, relay: bool = True, transfer_seconds: float | None = None) -> None:
        self.name = name
        self.epoch = 0
        self.version = -1
        self.roots: tuple[bytes, ...] | None = None
        self.gang: Gang | None = None
        self.subscribers: dict[str, Member] = {}
        self.departed: OrderedDict[int, Departed] = OrderedDict()
        self.layouts: dict[str, Layout] = {}
        self.history = History()
        self.gatherings = Gatherings(name)
        self.stale: set[Member] = set()
        self.roster_is_stale = False
        self._relay = relay
        self._transfer_seconds = transfer_seconds
        self._announcement: Announcement | None = None
        self._same_version: set[int] = set()  # epochs that have announced the newest version, bit for bit
        self.groups = Groups()
        self._fabric: Fabric | None = None
        self._roster: Roster | None = None
        self._complete: Complete | None = None

    # What changes it.

    def intern(self, join: Join) -> tuple[Join, str]:
        """The same with a layout that is shared by all that have it, and its fingerprint."""
        fingerprint = join.layout.fingerprint
        shared = self.layouts.get(fingerprint)
        if shared is not None:
            return msgspec.structs.replace(join, layout=shared), fingerprint
        slots = () if self.gang is None else self.gang.slots.values()
        if len(self.layouts) > 2 * (len(self.subscribers) + len(slots)) + 16:
            self.layouts = {member.fingerprint: member.join.layout for member in self.subscribers.values()}
            self.layouts |= {slot.fingerprint: slot.layout for slot in slots}
        self.layouts[fingerprint] = join.layout
        return join, fingerprint

    def learn(self, known: Known) -> None:
        """Take up what a member knows, perhaps of a former coordinator: nothing may go back behind it."""
        self.epoch = max(self.epoch, known.epoch)
        if known.version > self.version:
            self.version, self.roots, self._same_version = known.version, None, set()
            self._announcement = None
            if self.gang is not None:
                self.gang.drop_parts(known.version - 1)
            self.refresh()

    def open(self, gang_of: Member) -> None:
        """Start an epoch for the gang of this rank; the caller has fenced the ranks of the one before."""
        before, join = self.gang, gang_of.join
        standing = gang_of.standing
        if before is not None and before.is_of(join):
            standing = max(standing, before.standing)
        self.epoch += 1
        self.gang = Gang(self.epoch, join.session, join.world_size, standing)
        self.refresh()

    def add_subscriber(self, member: Member, now: float) -> None:
        self.subscribers[member.name] = member
        if self._fabric is not None and not self._fabric.add(member.as_receiver(self._holds(member))):
            self._fabric = None
        self._roster = None
        self.roster_is_stale = True
        if self._transfer_seconds is not None and self.announcement is not None:
            member.due = now + self._transfer_seconds
        self._regroup(member.join.group)

    def remove_subscriber(self, member: Member) -> None:
        if self.subscribers.get(member.name) is member:
            del self.subscribers[member.name]
        self.stale.discard(member)
        self.gatherings.forget(member.id)
        self._fabric = self._roster = None
        self.roster_is_stale = True
        self.stale.update(other for other in self.subscribers.values() if member.id in other.told)
        group = member.join.group
        if group and not any(other.join.group == group for other in self.subscribers.values()):
            self.groups.forget(group)
        else:
            self._regroup(group)

    def lost(self, member: Member, version: int) -> None:
        """No rank holds this version any more, a subscriber says; its group goes for another one."""
        if self.groups.lost(member.join.group, version):
            self.stale.update(m for m in self.subscribers.values() if m.join.group == member.join.group)

    def _regroup(self, group: str) -> None:
        if group:
            self.groups.changed(group)
            self.stale.update(member for member in self.subscribers.values() if member.join.group == group)
            self._settle_group(group)

    def depart(self, member: Member, reason: str, now: float) -> None:
        """Remember why a member is gone."""
        self.departed[member.id] = Departed(member.join.role, member.name, reason, now)
        if len(self.departed) > MAX_DEPARTED:
            self.departed.popitem(last=False)
        self._roster = None

    def refresh(self) -> None:
        """Everybody is to be told anew: the ranks, or the newest version, have changed."""
        self._fabric = self._roster = None
        self.stale.update(self.subscribers.values())
        self.roster_is_stale = True

    def staged(self, member: Member, receipt: Receipt, now: float) -> None:
        """A subscriber has a version whole."""
        if receipt.version > self.version or not member.take(receipt):
            return
        entry = self.history.newest(receipt.version)
        if entry is not None:
            delivery = entry.delivery(member.id, member.name)
            if delivery.staged_at is None:
                delivery.staged_at = now
        if self._holds(member) and self._fabric is not None:
            self._fabric.hold(member.id)
        if receipt.version == self.version:
            self.gatherings.received(member.id, receipt)
        if self._transfer_seconds is not None:
            since = self.history.first_complete_above(receipt.version)
            member.due = NEVER if since is None else max(since, member.joined_at) + self._transfer_seconds
        self._settle_group(member.join.group)

    def acked(self, member: Member, now: float) -> None:
        """A subscriber has committed `member.acked`."""
        self._roster = None
        self.roster_is_stale = True
        self._settle_group(member.join.group)
        entry = self.history.newest(member.acked_version)
        if entry is not None:
            delivery = entry.delivery(member.id, member.name)
            delivery.acked_at, delivery.acked = now, member.acked

    def slowed(self, member: Member) -> None:
        """A subscriber was reported to be slow: it becomes a leaf until it joins anew."""
        member.slow = True
        self._fabric = None
        self.stale.add(member)
        self.stale.update(other for other in self.subscribers.values() if member.id in other.told)

    def complete(self, now: float) -> bool:
        """Offer the newest version of which all parts are there; False when there is none."""
        gang = self.gang
        done = None if gang is None else gang.take_complete()
        if gang is None or done is None:
            return False
        version, parts = done
        roots = tuple(part.root for part in parts)
        if version != self.version or roots != self.roots:
            self._same_version = set()
        self._same_version.add(gang.epoch)
        self.version, self.roots = version, roots
        self._announcement = Announcement(self.name, gang.epoch, version, roots)
        self.history.completed(gang.epoch, version, now)
        subscribers = self.subscribers.values()
        rank = gang.slots[0].member if gang.world_size == 1 else None
        self.gatherings.form(gang.epoch, version, rank, [m for m in subscribers if not self._holds(m)])
        if self._transfer_seconds is not None:
            for member in subscribers:
                if member.staged_version < version:
                    member.due = min(member.due, now + self._transfer_seconds)
        self.refresh()
        for group in {member.join.group for member in subscribers}:
            self._settle_group(group)
        return True

    # What it is.

    @property
    def announcement(self) -> Announcement | None:
        """The newest complete version, while a rank of its epoch is alive or a subscriber has it whole."""
        if self._announcement is None or self._ranks_offer():
            return self._announcement
        return self._announcement if self.fabric().is_held else None

    @property
    def publisher(self) -> Literal["absent", "alive", "lost"]:
        return "absent" if self.gang is None else self.gang.state

    def refusal(self, gang: Gang, rank: int, version: int, root: bytes) -> str | None:
        """Why a rank may not announce this, in words; None when it may."""
        if version == self.version and self.roots is None:
            return None  # a restarted coordinator takes what comes
        if version == self.version and self.roots is not None and len(self.roots) == gang.world_size:
            if self.roots[rank] == root or not (is_content(root) and is_content(self.roots[rank])):
                return None  # the same, or (where one was never hashed) taken again by those that have it
            return (
                f"version {version} of run {self.name!r} exists with other weights on rank {rank}; publish"
                f" {version + 1} or later"
            )
        if version <= self.version:
            return (
                f"version {version} of run {self.name!r} is not newer than version {self.version}"
                f" (epoch {gang.epoch}); publish {self.version + 1} or later"
            )
        announced = gang.slots[rank].announced
        if version < announced:
            return (
                f"version {version} of run {self.name!r} is not newer than version {announced}, which rank"
                f" {rank} has announced; publish {announced + 1} or later"
            )
        part = gang.parts.get(version, {}).get(rank)
        if part is not None and part.root != root:
            return (
                f"rank {rank} has announced version {version} of run {self.name!r} with other weights before;"
                f" publish {version + 1} or later"
            )
        return None

    def announce(self, gang: Gang, rank: int, version: int, part: Part, now: float) -> None:
        """Take a rank's part; `refusal` has let it pass."""
        self.history.announced(gang.epoch, version, gang.world_size, rank, part, now)
        if version > gang.completed:
            gang.add(rank, version, part)
            self._roster = None  # whoever asks next sees who has not announced it yet

    def commit(self, member: Member) -> int:
        """The newest version that this subscriber may commit."""
        group = member.join.group
        return self.groups.commit(group) if group else self.version

    def root(self, gang: Gang, rank: int) -> bytes:
        """That rank's root of the newest version; empty when it is not known."""
        roots = self.roots
        return roots[rank] if roots is not None and len(roots) == gang.world_size else b""

    def fabric(self) -> Fabric:
        """Who pulls from whom, of the newest version."""
        if self._fabric is None:
            receivers = [member.as_receiver(self._holds(member)) for member in self.subscribers.values()]
            ranks = self.gang.as_ranks() if self.gang is not None and self._ranks_offer() else []
            self._fabric = Fabric(ranks, receivers, self._relay)
        return self._fabric

    # What its members are told.

    def state(self, member: Member) -> RunState:
        """For one subscriber."""
        newest = self.announcement
        announcement = self.groups.goal(member.join.group, newest)
        sources: tuple[Source, ...] = ()
        if announcement is not None:
            sources = self.fabric().sources(member.id)
        member.told = tuple(source.member for source in sources if source.rank < 0)
        gathering = (
            None if announcement is None or announcement is not newest else self.gatherings.of(member.id)
        )
        self.stale.discard(member)
        behind = () if self.gang is None else self.gang.behind
        return RunState(self.publisher, announcement, sources, self.commit(member), gathering, behind)

    def roster(self) -> Roster:
        """For all ranks; the same object until it changes."""
        if self._roster is None:
            live = {member.id: member.shown for member in self.subscribers.values()}
            departed = {
                member: gone.reason for member, gone in self.departed.items() if gone.role == "subscriber"
            }
            rank = next(iter(self.gang.members), None) if self.gang is not None else None
            gathering = None if rank is None else self.gatherings.of(rank.id)
            announced = () if self.gang is None else self.gang.announced
            self._roster = Roster(live, departed, gathering, announced)
        return self._roster

    def news(self) -> Roster | Complete:
        """For all ranks: the newest version that this epoch has completed, with the roster; or the roster."""
        gang, roster = self.gang, self.roster()
        if gang is None or gang.completed < 0:
            return roster
        if (
            self._complete is None
            or self._complete.roster is not roster
            or self._complete.epoch != gang.epoch
            or self._complete.version != gang.completed
        ):
            self._complete = Complete(gang.epoch, gang.completed, roster)
        return self._complete

    def _ranks_offer(self) -> bool:
        gang, announcement = self.gang, self._announcement
        return (
            gang is not None
            and announcement is not None
            and gang.epoch == announcement.epoch
            and bool(gang.members)
        )

    def _holds(self, member: Member) -> bool:
        staged = member.staged
        if staged is None or staged.wire == "shm":  # mapped, and let go of when it is acknowledged
            return False
        return staged.version == self.version and staged.epoch in self._same_version

    def _settle_group(self, group: str) -> None:
        members = [member for member in self.subscribers.values() if group and member.join.group == group]
        if self.groups.settle(group, members):
            self.stale.update(members)
