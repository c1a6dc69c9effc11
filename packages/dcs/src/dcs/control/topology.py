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

from bisect import insort
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
    maps: str = ""


def assign(
    ranks: Sequence[Rank], receivers: Iterable[Receiver], relay: bool = True
) -> dict[int, tuple[Source, ...]]:
    """The sources of every receiver, by member; without `relay` only what it can map, and the ranks."""
    fabric = Fabric(ranks, receivers, relay)
    return {member: fabric.sources(member) for member in fabric.members}


class Fabric:
    """`assign`, one receiver at a time.

    Building it takes O(receivers), the sources of one O(depth of the tree). Receivers that join (`add`) or
    get the version (`hold`) need no new one; whoever leaves, or is slow, does.
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
        self._groups: dict[tuple[str, str], _Group] = {}
        self._by_layout: dict[str, list[_Group]] = {}
        self._holding: set[int] = set()
        self.members: dict[int, Receiver] = {}
        for receiver in sorted(receivers, key=lambda receiver: (not self._maps(receiver), receiver.member)):
            self.add(receiver)

    @property
    def is_held(self) -> bool:
        """Whether any receiver has the version whole."""
        return bool(self._holding)

    def add(self, receiver: Receiver) -> bool:
        """Let in a receiver that joined after all others; False when everything has to be built anew."""
        key = (receiver.site, receiver.layout)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
            self._by_layout.setdefault(receiver.layout, []).append(group)
        maps = self._maps(receiver)
        if maps and not group.is_mapping:
            return False  # it goes before those that map no rank
        group.is_mapping = maps
        self.members[receiver.member] = receiver
        group.add(receiver)
        if receiver.holds:
            self.hold(receiver.member)
        return True

    def hold(self, member: int) -> None:
        """A receiver has the version whole now."""
        receiver = self.members[member]
        if member not in self._holding:
            self._holding.add(member)
            self._groups[receiver.site, receiver.layout].hold(receiver)

    def sources(self, member: int) -> tuple[Source, ...]:
        """Of one receiver, best first."""
        me = self.members[member]
        group = self._groups[me.site, me.layout]
        own = self._mapped.get(_place(me))
        ranks = self._ranks
        if own is not None:
            ranks = [own, *(source for source in ranks if source is not own)]
        head = group.mappable(me)
        first = [] if own is not None or head is None else [head]
        if not self._relay:
            return (*map(self._source, first), *ranks)
        elsewhere = (
            holder
            for other in self._by_layout[me.layout]
            if other is not group
            for holder in other.holders(me)
        )
        ancestors = list(group.ancestors(me))
        found = _distinct(chain(first, group.holders(me), ancestors, elsewhere), me)
        peers = map(self._source, found)
        if not ancestors:  # the root: the ranks, and then who has it all already
            return (*ranks, *peers)
        return (*peers, *ranks) if own is None else (own, *peers, *ranks[1:])

    def _maps(self, receiver: Receiver) -> bool:
        return _place(receiver) in self._mapped

    def _source(self, receiver: Receiver) -> Source:
        assert receiver.endpoint is not None
        holds = receiver.member in self._holding
        return Source(receiver.member, -1, receiver.name, receiver.layout, receiver.endpoint, holds)


class _Group:
    """The receivers of one site and layout: heads, chains, and who has the version."""

    def __init__(self) -> None:
        self.is_mapping = True  # whether all so far map a rank
        self._heads: dict[str, Receiver] = {}  # of the machines whose members map each other
        self._chains: dict[str | None, list[Receiver]] = {"": []}  # by domain; "": the main one
        self._position: dict[int, tuple[list[Receiver], int]] = {}
        self._leaves: dict[int, int] = {}
        self._holders: dict[str | None, list[Receiver]] = {"": []}  # by domain

    def add(self, member: Receiver) -> None:
        if not _relays(member):
            self._leaves[member.member] = len(self._leaves)
            return
        endpoint = member.endpoint
        assert endpoint is not None
        if endpoint.machine and endpoint.path:
            if endpoint.machine in self._heads:
                return
            self._heads[endpoint.machine] = member
        own = self._chains.setdefault(_domain(endpoint), [])
        self._position[member.member] = (own, len(own))
        own.append(member)

    def hold(self, member: Receiver) -> None:
        if _relays(member):
            assert member.endpoint is not None
            holders = self._holders.setdefault(_domain(member.endpoint), [])
            insort(holders, member, key=lambda holder: holder.member)

    def mappable(self, me: Receiver) -> Receiver | None:
        """The head of my machine, when that is not me and I can map it."""
        head = self._heads.get(_maps(me))
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


def _relays(member: Receiver) -> bool:
    """Whether others may pull from it."""
    return member.endpoint is not None and not member.slow and _domain(member.endpoint) is not None


def _maps(member: Receiver) -> str:
    """The machine whose memory it maps; "" when it maps none."""
    own = member.endpoint
    return member.maps or ("" if own is None or not own.path else own.machine)


def _place(member: Receiver) -> tuple[str, str]:
    """The machine whose memory it maps, and its layout."""
    return _maps(member), member.layout


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
