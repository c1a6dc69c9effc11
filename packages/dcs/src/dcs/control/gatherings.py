"""Which members receive a version together, through a collective group.

A gathering is formed when a version is complete: the publisher's only rank, and every subscriber that offers
the same backend, has the rank's layout, and does not have the version yet. Its key names the group, which is
used for later versions as long as its members are the same and nothing has broken it.

It is broken when a member staged the version over another wire. Who is to blame sits out: those that had
staged nothing when the next version was complete (a peer that is stopped holds up all others), or, when there
is none of these, those that took the other wire. They sit out for 1, 2, 4 ... 64 versions; receiving one
through a group clears the slate. Whom the publisher itself reports sits out until it joins anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dcs.control.members import Member
from dcs.control.messages import Gathering, Receipt

_LONGEST_PENALTY = 64
_UNTIL_IT_JOINS_ANEW = 1 << 62


@dataclass(slots=True)
class _Record:
    strikes: int = 0
    sits_out: int = 0


@dataclass(eq=False, slots=True)
class Gatherings:
    """Those of one run."""

    run: str
    _number: int = 0
    _key: str = ""
    _version: int = -1
    _rank: Member | None = None
    _members: tuple[int, ...] = ()
    _places: dict[int, int] = field(default_factory=dict)
    _wires: dict[int, str] = field(default_factory=dict)
    _broken: bool = False
    _records: dict[int, _Record] = field(default_factory=dict)

    def form(self, epoch: int, version: int, rank: Member | None, subscribers: Iterable[Member]) -> None:
        """A version is complete; `rank` is the publisher's only one, None when it has several."""
        live = sorted(subscribers, key=lambda member: member.id)
        self._judge({member.id for member in live})
        members: tuple[int, ...] = ()
        if rank is not None and rank.join.collective and rank.join.store is not None:
            joining = [
                member.id
                for member in live
                if member.join.collective == rank.join.collective
                and member.fingerprint == rank.fingerprint
                and member.staged_version < version
                and not self._sits_out(member.id)
            ]
            members = (rank.id, *joining) if joining else ()
        for record in self._records.values():
            record.sits_out -= record.sits_out > 0
        key = f"{self.run}/{epoch}/"
        if members != self._members or self._broken or not self._key.startswith(key):
            self._number += bool(members)
            self._key = f"{key}{self._number}"
        self._members, self._rank, self._version = members, rank, version
        self._places = {member: place for place, member in enumerate(members)}
        self._wires.clear()
        self._broken = False

    def received(self, member: int, receipt: Receipt) -> None:
        """A member has a version whole."""
        if member in self._places and receipt.version == self._version:
            self._wires.setdefault(member, receipt.wire)
            if "collective" in receipt.wire and not self._sits_out(member):
                self._records.pop(member, None)

    def report(self, members: Iterable[int]) -> None:
        """The publisher says that these members broke the group."""
        for member in members:
            if self._places.get(member, 0) > 0:
                self._broken = True
                self._records.setdefault(member, _Record()).sits_out = _UNTIL_IT_JOINS_ANEW

    def forget(self, member: int) -> None:
        """A member is gone; should it come back, it has a new number."""
        self._records.pop(member, None)

    def of(self, member: int) -> Gathering | None:
        """The group that this member is to join for the newest version, if any."""
        place, rank = self._places.get(member), self._rank
        if place is None or rank is None or rank.join.store is None or rank.join.collective == "":
            return None
        return Gathering(self._key, rank.join.collective, rank.join.store, place, len(self._members))

    def _sits_out(self, member: int) -> bool:
        record = self._records.get(member)
        return record is not None and record.sits_out > 0

    def _judge(self, live: set[int]) -> None:
        """Look back at the group of the version before."""
        strayed = [member for member, wire in self._wires.items() if "collective" not in wire]
        if not strayed:
            return
        self._broken = True
        absent = [member for member in self._members[1:] if member not in self._wires]
        for member in absent or strayed:
            if member in live:
                record = self._records.setdefault(member, _Record())
                penalty = min(1 << record.strikes, _LONGEST_PENALTY)
                record.strikes += 1
                record.sits_out = max(record.sits_out, penalty)
