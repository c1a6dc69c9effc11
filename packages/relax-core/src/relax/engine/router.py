"""Which replica a request goes to: least load, and the replica whose prefix cache holds most of its prompt.

Pure bookkeeping: no sockets, no tasks, no time; the same calls give the same choices. A choice costs a hash
of the prompt and a few look-ups, whatever the number of replicas.

The **load** of a replica is the tokens that the requests on it may come to hold: prompt and `max_new_tokens`
of each; of two with as many, the one with fewer requests has less, then the one whose name comes first.

The **rule**, in this order:

1. A group is placed once. Its members' first requests follow it, as equal prompts of one call are prefilled
   once; the whole group counts as load from when it is placed.
2. A request that goes on with an episode goes to the replica that had its turn before, and one whose prompt
   begins as an earlier one did to a replica that had that one, if at least half of the prompt is held there.
3. Any other request goes to the replica with the least load.

Rule 2 is left for rule 3 when the replica is **overloaded**: its load is above `OVERLOAD_RATIO` (1.5) times
the least by more than `OVERLOAD_SLACK` (2) requests, or groups, like the one at hand. A commit of new weights
empties the prefix cache of a replica, so what it held before counts no more. Replicas that may not start the
request (see `VersionClock`) are passed over everywhere.
"""

import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

OVERLOAD_RATIO = 1.5
OVERLOAD_SLACK = 2
HELD_SHARE = 0.5
"""Of a prompt that a replica has to hold for its prefix cache to count."""

SHORTEST_PREFIX = 64
"""Tokens of the shortest prefix that is remembered; then twice as many, and so on, and the whole prompt."""

REMEMBERED = 1 << 16
"""Prefixes remembered; the one not used for longest goes first."""


@dataclass(frozen=True)
class Ask:
    """A request, as far as its place is concerned.

    Attributes:
        request: its id.
        episode: whose turn it is.
        group: of the episode.
        ordinal: of the group.
        members: episodes of the group.
        prompt: int32 [k], its tokens.
        new_tokens: the most it may sample.
        media: its placeholders stand for pictures or sound, so that equal tokens are not an equal prompt.
    """

    request: str
    episode: str
    group: str
    ordinal: int
    members: int
    prompt: npt.NDArray[np.int32]
    new_tokens: int
    media: bool = False

    @property
    def tokens(self) -> int:
        """The most it may come to hold."""
        return len(self.prompt) + self.new_tokens


class Placement(Protocol):
    """Chooses replicas, and is told what becomes of them and of what it has placed."""

    def joined(self, name: str) -> None: ...

    def left(self, name: str) -> None: ...

    def committed(self, name: str) -> None: ...

    def place(self, ask: Ask, may: Callable[[str], bool]) -> str | None:
        """The replica for a request, one of those for which `may` holds; None when there is none now."""
        ...

    def ended(self, request: str) -> None:
        """A request that was placed has been answered, or its replica lost. An unknown id is ignored."""
        ...

    def closed(self, group: str) -> None:
        """Nothing of a group is asked for any more."""
        ...


@dataclass(frozen=True, order=True)
class Load:
    """What a replica has to do; compares as "less to do", ties by name."""

    tokens: int
    requests: int
    name: str


@dataclass
class _Group:
    """Where a group was placed, with what is still reserved there, and where its episodes went on."""

    name: str
    life: int
    awaited: int
    tokens: int
    episodes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Episode -> the replica of its last turn, and the replica's cache then."""


class Router:
    """The rule above. `affinity=False` keeps only the third part, but for a group's first requests."""

    def __init__(self, *, affinity: bool = True) -> None:
        self._affinity = affinity
        self._loads: dict[str, Load] = {}
        self._order: list[Load] = []
        self._lives: dict[str, int] = {}  # how often a replica has joined
        self._caches: dict[str, int] = {}  # how often its prefix cache was emptied
        self._groups: dict[str, _Group] = {}
        self._running: dict[str, tuple[str, int, int]] = {}  # request -> replica, its life, tokens
        self._prefixes: OrderedDict[bytes, dict[str, int]] = OrderedDict()  # -> replicas and their caches

    def joined(self, name: str) -> None:
        """A replica without load, and with nothing in its cache."""
        self._lives[name] = self._lives.get(name, 0) + 1
        self._caches[name] = self._caches.get(name, 0) + 1
        self._loads[name] = Load(0, 0, name)
        insort(self._order, self._loads[name])

    def left(self, name: str) -> None:
        """The replica is gone with all that was placed there."""
        del self._order[bisect_left(self._order, self._loads.pop(name))]

    def committed(self, name: str) -> None:
        """The replica has new weights: what its cache held is of no use."""
        self._caches[name] += 1

    @property
    def loads(self) -> Mapping[str, Load]:
        return dict(self._loads)

    def place(self, ask: Ask, may: Callable[[str], bool]) -> str | None:
        group = self._groups.get(ask.group)
        new = group is not None and group.awaited > 0 and ask.episode not in group.episodes
        if group is not None and new and self._stands(group.name, group.life) and may(group.name):
            self._use_reservation(group)
            return self._placed(ask, group, group.name, remember=False)
        least = next((load.name for load in self._order if may(load.name)), None)
        if least is None:
            return None
        first = group is None
        if group is not None and new:
            self._drop_reservation(group)  # it does not stay together
        cost = ask.tokens * (ask.members if first else 1)
        name = self._holder(ask, group, least, cost, may) or least
        if first:
            group = _Group(name, self._lives[name], ask.members, ask.tokens)
            self._groups[ask.group] = group
            self._add(name, ask.members * ask.tokens, ask.members)
            self._use_reservation(group)
        return self._placed(ask, group, name, remember=True)

    def ended(self, request: str) -> None:
        name, life, tokens = self._running.pop(request, ("", 0, 0))
        if self._stands(name, life):
            self._add(name, -tokens, -1)

    def closed(self, group: str) -> None:
        if (found := self._groups.pop(group, None)) is not None:
            self._drop_reservation(found)

    def _placed(self, ask: Ask, group: _Group, name: str, *, remember: bool) -> str:
        self._add(name, ask.tokens, 1)
        self._running[ask.request] = (name, self._lives[name], ask.tokens)
        group.episodes[ask.episode] = (name, self._caches[name])
        if remember and self._affinity and not ask.media:
            for _, digest in prefixes(ask.prompt):
                self._prefixes.setdefault(digest, {})[name] = self._caches[name]
                self._prefixes.move_to_end(digest)
            while len(self._prefixes) > REMEMBERED:
                self._prefixes.popitem(last=False)
        return name

    def _holder(
        self, ask: Ask, group: _Group | None, least: str, cost: int, may: Callable[[str], bool]
    ) -> str | None:
        """The replica that holds most of the prompt, unless it is overloaded."""
        if not self._affinity:
            return None
        holders = self._of_episode(ask, group) or self._of_prefix(ask)
        if least in holders:
            return least
        there = [self._loads[name] for name in holders if may(name)]
        if not there:
            return None
        best = min(there)
        most = OVERLOAD_RATIO * self._loads[least].tokens + OVERLOAD_SLACK * cost
        return best.name if best.tokens <= most else None

    def _of_episode(self, ask: Ask, group: _Group | None) -> list[str]:
        name, cache = ("", 0) if group is None else group.episodes.get(ask.episode, ("", 0))
        return [name] if self._holds(name, cache) else []

    def _of_prefix(self, ask: Ask) -> list[str]:
        if ask.media:
            return []
        for length, digest in reversed(list(prefixes(ask.prompt))):
            if length < HELD_SHARE * len(ask.prompt):
                break
            holders = self._prefixes.get(digest)
            if holders and (names := [name for name, cache in holders.items() if self._holds(name, cache)]):
                return names
        return []

    def _holds(self, name: str, cache: int) -> bool:
        return name in self._loads and self._caches[name] == cache

    def _stands(self, name: str, life: int) -> bool:
        return name in self._loads and self._lives[name] == life

    def _use_reservation(self, group: _Group) -> None:
        group.awaited -= 1
        self._add(group.name, -group.tokens, -1)

    def _drop_reservation(self, group: _Group) -> None:
        if group.awaited and self._stands(group.name, group.life):
            self._add(group.name, -group.awaited * group.tokens, -group.awaited)
        group.awaited = 0

    def _add(self, name: str, tokens: int, requests: int) -> None:
        before = self._loads[name]
        del self._order[bisect_left(self._order, before)]
        self._loads[name] = Load(before.tokens + tokens, before.requests + requests, name)
        insort(self._order, self._loads[name])


class StaticPlacement:
    """By the ordinal of the group, so that a run repeats: `ordinal mod replicas`, of those there are."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def joined(self, name: str) -> None:
        insort(self._names, name)

    def left(self, name: str) -> None:
        self._names.remove(name)

    def committed(self, name: str) -> None:
        pass

    def by_ordinal(self, ordinal: int) -> str:
        return self._names[ordinal % len(self._names)]

    def place(self, ask: Ask, may: Callable[[str], bool]) -> str | None:
        name = self.by_ordinal(ask.ordinal) if self._names else None
        return name if name is not None and may(name) else None

    def ended(self, request: str) -> None:
        pass

    def closed(self, group: str) -> None:
        pass


class RecordedPlacement(StaticPlacement):
    """As a recorded run placed them: single requests first, then their groups."""

    def __init__(self, groups: Mapping[str, str], requests: Mapping[str, str]) -> None:
        super().__init__()
        self.groups, self._requests = groups, requests

    def place(self, ask: Ask, may: Callable[[str], bool]) -> str | None:
        name = self._requests.get(ask.request) or self.groups.get(ask.group) or self.by_ordinal(ask.ordinal)
        return name if may(name) else None


def prefixes(prompt: npt.NDArray[np.int32]) -> Iterator[tuple[int, bytes]]:
    """(length, digest) of the prefixes of a prompt that are remembered, the shortest first; the last one is
    the whole prompt.
    """
    content = memoryview(np.ascontiguousarray(prompt)).cast("B")
    hashed = hashlib.blake2b(digest_size=16)
    done, length = 0, SHORTEST_PREFIX
    while length < len(prompt):
        hashed.update(content[4 * done : 4 * length])
        yield length, hashed.copy().digest()
        done, length = length, 2 * length
    hashed.update(content[4 * done :])
    yield len(prompt), hashed.digest()
