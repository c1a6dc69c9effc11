"""Who pulls from whom: a pure function of the members of a run, without state, sockets or clocks.

The sources of a subscriber, best first (at most `MAX_PEERS` subscribers; training ranks beside them):

1. whom it can map: a training rank of its layout on its machine, else the first subscriber there, the
   machine's *head*;
2. up to four of its site and layout that have the version whole, not the same ones for everybody;
3. its relay parent, which forwards each chunk as soon as it has verified it, and that one's ancestors;
4. those of other sites that have the version whole;
5. all training ranks. The root of a site's relays asks them first, and after them only who has the version.

The relays of one (site, layout) are the heads of its machines, in the order in which they joined, those that
map a training rank before the others: a chain of at most eight, beyond that a binary tree. Members that do
not let their memory be mapped are heads by themselves. A member is a leaf, and relays nothing, when it has
no endpoint or was reported to be slow. One that listens on loopback is a source only for its own machine:
such heads make chains of their own, one a machine, whose roots hang below the relays that they can reach.
So exactly one member of a (site, layout) pulls from the ranks, if it has any relay that the others reach.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from dcs.control.address import is_loopback
from dcs.control.messages import Endpoint, Source

MAX_PEERS = 8
MAX_HOLDERS = 4
MAX_CHAIN = 8
_ARITY = 2


@dataclass(frozen=True, slots=True)
class Rank:
    """A training rank that is alive and has the version; `layout` is a fingerprint."""

    member: int
    rank: int
    name: str
    layout: str
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Receiver:
    """A live subscriber; `member` numbers are in the order of joining. `holds`: it has the version whole."""

    member: int
    name: str
    layout: str
    endpoint: Endpoint | None
    site: str = ""
    holds: bool = False
    slow: bool = False


def assign(
    ranks: Sequence[Rank], receivers: Iterable[Receiver], relay: bool = True
) -> dict[int, tuple[Source, ...]]:
    """The sources of every receiver, by member; without `relay` only what it can map, and the ranks."""
    fabric = Fabric(ranks, receivers, relay)
    return {member: fabric.sources(member) for member in fabric.members}


class Fabric:
    """`assign`, one receiver at a time; building it takes O(receivers), a receiver's sources O(1) to O(tree
    depth).
    """

    def __init__(self, ranks: Sequence[Rank], receivers: Iterable[Receiver], relay: bool = True) -> None:
        self._relay = relay
        ordered = sorted(ranks, key=lambda rank: rank.rank)
        self._ranks = [
            Source(rank.member, rank.rank, rank.name, rank.layout, rank.endpoint, True) for rank in ordered
        ]
        self._mapped: dict[tuple[str, str], Source] = {}  # by machine and layout
        for source in self._ranks:
            if source.endpoint.machine and source.endpoint.path:
                self._mapped.setdefault((source.endpoint.machine, source.layout), source)
        self.members = {
            receiver.member: receiver for receiver in sorted(receivers, key=lambda receiver: receiver.member)
        }
        groups: dict[tuple[str, str], list[Receiver]] = {}
        for receiver in self.members.values():
            groups.setdefault((receiver.site, receiver.layout), []).append(receiver)
        self._groups = {key: _Group(members, self._mapped) for key, members in groups.items()}
        self._by_layout: dict[str, list[_Group]] = {}
        for (_, layout), group in self._groups.items():
            self._by_layout.setdefault(layout, []).append(group)

    def sources(self, member: int) -> tuple[Source, ...]:
        """Of one receiver, best first."""
        me = self.members[member]
        group = self._groups[me.site, me.layout]
        machine = "" if me.endpoint is None else me.endpoint.machine
        own = self._mapped.get((machine, me.layout)) if machine else None
        ranks = self._ranks
        if own is not None:
            ranks = [own, *(source for source in ranks if source is not own)]
        if not self._relay:
            head = None if own is not None else group.mappable(me)
            return (*(() if head is None else (_source(head),)), *ranks)
        elsewhere = (
            holder
            for other in self._by_layout[me.layout]
            if other is not group
            for holder in other.holders(me)
        )
        ancestors = list(group.ancestors(me))
        if not ancestors:  # the root: nobody but the ranks, unless somebody has it all already
            found = _distinct(chain(group.holders(me), elsewhere), me)
            return (*ranks, *map(_source, found))
        head = group.mappable(me)
        first = [] if own is not None or head is None else [head]
        found = _distinct(chain(first, group.holders(me), ancestors, elsewhere), me)
        peers = map(_source, found)
        if own is None:
            return (*peers, *ranks)
        return (own, *peers, *ranks[1:])


class _Group:
    """The receivers of one site and layout: heads, chains, and who has the version."""

    def __init__(self, members: list[Receiver], mapped: dict[tuple[str, str], Source]) -> None:
        self._heads: dict[str, Receiver] = {}  # of the machines whose members map each other
        self._position: dict[int, tuple[list[Receiver], int]] = {}
        self._leaves: dict[int, int] = {}
        self._holders: dict[str | None, list[Receiver]] = {"": []}  # "": those that every machine reaches
        relays: list[Receiver] = []
        for member in members:
            endpoint = member.endpoint
            if endpoint is None or member.slow or _domain(endpoint) is None:
                self._leaves[member.member] = len(self._leaves)
                continue
            if member.holds:
                self._holders.setdefault(_domain(endpoint), []).append(member)
            if endpoint.machine and endpoint.path:
                if endpoint.machine in self._heads:
                    continue
                self._heads[endpoint.machine] = member
            relays.append(member)
        relays.sort(key=lambda member: (_place(member) not in mapped, member.member))
        self._chains: dict[str | None, list[Receiver]] = {"": []}  # by domain; "": the main one
        for member in relays:
            assert member.endpoint is not None
            own = self._chains.setdefault(_domain(member.endpoint), [])
            self._position[member.member] = (own, len(own))
            own.append(member)

    def mappable(self, me: Receiver) -> Receiver | None:
        """The head of my machine, when that is not me and I can map it."""
        if me.endpoint is None or not me.endpoint.path:
            return None
        head = self._heads.get(me.endpoint.machine)
        return None if head is None or head.member == me.member else head

    def holders(self, me: Receiver) -> Iterator[Receiver]:
        """Up to four that I reach, beginning elsewhere for each of us."""
        everywhere = self._holders[""]
        here = () if me.endpoint is None else self._holders.get(me.endpoint.machine or None, ())
        size = len(everywhere) + len(here)
        taken = 0
        for turn in range(size):
            index = (me.member + turn) % size
            holder = everywhere[index] if index < len(everywhere) else here[index - len(everywhere)]
            if holder.member != me.member:
                yield holder
                taken += 1
            if taken == MAX_HOLDERS:
                return

    def ancestors(self, me: Receiver) -> Iterator[Receiver]:
        """My relay parent, its parent, and so on up to the root; none for the root itself."""
        head = self.mappable(me)
        if head is not None:
            yield head
            me = head
        main = self._chains[""]
        machine = "" if me.endpoint is None else me.endpoint.machine
        found = self._position.get(me.member)
        if found is None:  # a leaf; its machine's loopback chain, if there is one, is nearest
            below = self._chains.get(machine, main) if machine else main
            yield from _hang(below, self._leaves[me.member])
        else:
            below, index = found
            yield from _climb(below, index)
        if below is not main:
            yield from _hang(main, list(self._chains).index(machine) - 1)


def _domain(endpoint: Endpoint) -> str | None:
    """From where a member is reached: its machine, "" when from everywhere, None when from nowhere."""
    return (endpoint.machine or None) if is_loopback(endpoint.host) else ""


def _place(member: Receiver) -> tuple[str, str]:
    assert member.endpoint is not None
    return member.endpoint.machine, member.layout


def _parent(index: int, size: int) -> int:
    return index - 1 if size <= MAX_CHAIN else (index - 1) // _ARITY


def _climb(relays: list[Receiver], index: int) -> Iterator[Receiver]:
    while index > 0:
        index = _parent(index, len(relays))
        yield relays[index]


def _hang(relays: list[Receiver], turn: int) -> Iterator[Receiver]:
    """A parent for what is no relay itself, the last first, and that one's ancestors."""
    if relays:
        index = len(relays) - 1 - turn % len(relays)
        yield relays[index]
        yield from _climb(relays, index)


def _distinct(candidates: Iterable[Receiver], me: Receiver) -> list[Receiver]:
    found: dict[int, Receiver] = {}
    for candidate in candidates:
        if len(found) == MAX_PEERS:
            break
        if candidate.member != me.member:
            found.setdefault(candidate.member, candidate)
    return list(found.values())


def _source(receiver: Receiver) -> Source:
    assert receiver.endpoint is not None
    return Source(receiver.member, -1, receiver.name, receiver.layout, receiver.endpoint, receiver.holds)
