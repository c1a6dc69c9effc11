"""A group stays together, a prefix is followed unless its holder is overloaded, and ties are fixed."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from relax.engine.router import (
    HELD_SHARE,
    OVERLOAD_RATIO,
    OVERLOAD_SLACK,
    REMEMBERED,
    SHORTEST_PREFIX,
    Ask,
    RecordedPlacement,
    Router,
    StaticPlacement,
    prefixes,
)

NAMES: tuple[str, ...] = ("a", "b", "c", "d")


def ask(group: int = 0, member: int = 0, turn: int = 0, *, members: int = 1, prompt: int = 10, **more) -> Ask:
    tokens = more.pop("tokens", None)
    if tokens is None:
        tokens = np.arange(group * 1000, group * 1000 + prompt, dtype=np.int32)
    episode = f"{group:08d}-{member:03d}"
    return Ask(f"{episode}/{turn}", episode, f"{group:08d}", group, members, tokens, 10, **more)


def anywhere(name: str) -> bool:
    return True


def router(*names: str, affinity: bool = True) -> Router:
    made = Router(affinity=affinity)
    for name in names:
        made.joined(name)
    return made


class Routing(RuleBasedStateMachine):
    """Groups, turns, commits, leaving and joining in any order, against a plain account of what is where."""

    @initialize(affinity=st.booleans())
    def begin(self, affinity: bool) -> None:
        self.affinity = affinity
        self.router = Router(affinity=affinity)
        self.there: set[str] = set()
        self.lives: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.running: dict[str, tuple[str, int, Ask]] = {}
        self.turns: dict[tuple[int, int], int] = {}
        self.homes: dict[int, tuple[str, int]] = {}
        self.sizes: dict[int, int] = {}
        self.reserved: dict[int, int] = {}

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name not in self.there:
            self.router.joined(name)
            self.there.add(name)
            self.lives[name] += 1

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.there)))
        self.router.left(name)
        self.there.remove(name)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.router.committed(data.draw(st.sampled_from(sorted(self.there))))

    @rule(
        group=st.integers(0, 3),
        member=st.integers(0, 2),
        shared=st.booleans(),
        allowed=st.sets(st.sampled_from(NAMES)),
    )
    def request(self, group: int, member: int, shared: bool, allowed: set[str]) -> None:
        turn = self.turns.get((group, member), 0)
        members = self.sizes.setdefault(group, 3)
        tokens = np.arange(100, dtype=np.int32) + (0 if shared else 1000 * group)
        asked = ask(group, member, turn, members=members, tokens=tokens[: 80 + turn])
        if asked.request in self.running:
            return
        loads = self.router.loads
        name = self.router.place(asked, allowed.__contains__)
        if name is None:
            assert not allowed & self.there
            return
        assert name in allowed & self.there
        self.turns[group, member] = turn + 1
        least = min((loads[n].tokens for n in allowed & self.there), default=0)
        home, life = self.homes.get(group, ("", 0))
        first = turn == 0 and home in self.there and self.lives[home] == life and self.reserved.get(group)
        if first and home in allowed:
            assert name == home  # the members of a group stay together
        elif not self.affinity:
            assert loads[name].tokens == least
        else:
            cost = asked.tokens * (1 if home else members)
            assert loads[name].tokens <= max(least, OVERLOAD_RATIO * least + OVERLOAD_SLACK * cost)
        if not home:
            self.homes[group] = (name, self.lives[name])
            self.reserved[group] = members - 1
        elif first and home in allowed:
            self.reserved[group] -= 1
        elif turn == 0:
            self.reserved[group] = 0
        self.running[asked.request] = (name, self.lives[name], asked)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[request]
        self.router.ended(request)
        self.router.ended(request)  # said twice, it counts once

    @rule(group=st.integers(0, 3))
    def close(self, group: int) -> None:
        if any(asked.ordinal == group for _, _, asked in self.running.values()):
            return
        self.router.closed(f"{group:08d}")
        self.homes.pop(group, None)
        self.reserved.pop(group, None)
        for member in range(3):
            self.turns.pop((group, member), None)

    @invariant()
    def loads_are_what_runs_and_what_is_reserved(self) -> None:
        if not hasattr(self, "router"):
            return
        loads = self.router.loads
        assert loads.keys() == self.there
        for name in self.there:
            mine = [a for n, life, a in self.running.values() if (n, life) == (name, self.lives[name])]
            kept = sum(
                left for group, left in self.reserved.items() if self.homes[group] == (name, self.lives[name])
            )
            assert loads[name].requests == len(mine) + kept
            assert loads[name].tokens >= sum(a.tokens for a in mine)
        assert [load.name for load in self.router._order] == [load.name for load in sorted(loads.values())]


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_groups_go_to_the_least_load_and_ties_to_the_first_name() -> None:
    chosen = router("b", "a", "c")
    places = [chosen.place(ask(group, members=4), anywhere) for group in range(6)]
    assert places == ["a", "b", "c", "a", "b", "c"]
    chosen.closed("00000001")
    chosen.ended("00000001-000/0")
    assert chosen.place(ask(9), anywhere) == "b"


def test_load_is_tokens_not_episodes() -> None:
    chosen = router("a", "b")
    assert chosen.place(ask(0, prompt=300), anywhere) == "a"
    assert [chosen.place(ask(group, prompt=10), anywhere) for group in range(1, 6)] == ["b"] * 5


def test_a_turn_goes_where_the_turn_before_was_unless_that_is_overloaded_or_has_new_weights() -> None:
    def played(load: int, commit: bool = False) -> str | None:
        chosen = router("a", "b")
        assert chosen.place(ask(0), anywhere) == "a"
        chosen.ended("00000000-000/0")
        for other in range(1, load + 1):
            chosen.place(ask(other), "a".__eq__)
        if commit:
            chosen.committed("a")
        return chosen.place(ask(0, turn=1), anywhere)

    assert played(load=OVERLOAD_SLACK) == "a"
    assert played(load=OVERLOAD_SLACK + 1) == "b"
    assert played(load=OVERLOAD_SLACK, commit=True) == "b"


def test_a_shared_prefix_is_followed_when_half_of_the_prompt_is_held() -> None:
    system = np.arange(2 * SHORTEST_PREFIX, dtype=np.int32)

    def second(own: int) -> str | None:
        chosen = router("a", "b")
        for group, name in ((0, "b"), (1, "b")):
            tail = np.full(own, 5000 + group, np.int32)
            asked = ask(group, tokens=np.concatenate([system, tail]))
            if group == 0:
                assert chosen.place(asked, name.__eq__) == "b"
        return chosen.place(asked, anywhere)

    assert second(own=len(system)) == "b"
    assert second(own=int(len(system) / HELD_SHARE) - len(system) + 1) == "a"


def test_pictures_are_not_told_apart_by_tokens() -> None:
    chosen = router("a", "b")
    prompt = np.arange(200, dtype=np.int32)
    assert chosen.place(ask(0, tokens=prompt, media=True), "b".__eq__) == "b"
    assert chosen.place(ask(1, tokens=prompt, media=True), anywhere) == "a"


def test_a_group_that_lost_its_replica_is_placed_again() -> None:
    chosen = router("a", "b", "c")
    assert chosen.place(ask(0, 0, members=3), anywhere) == "a"
    chosen.left("a")
    assert [chosen.place(ask(0, member, members=3), anywhere) for member in (0, 1, 2)] == ["b"] * 3
    chosen.joined("a")
    assert chosen.loads["a"].tokens == 0  # what was reserved on its former life is gone
    assert chosen.place(ask(1), anywhere) == "a"


def test_replicas_that_may_not_are_passed_over() -> None:
    chosen = router("a", "b")
    assert chosen.place(ask(0), "b".__eq__) == "b"
    assert chosen.place(ask(1), lambda name: False) is None


def test_what_is_remembered_is_bounded() -> None:
    chosen = router("a")
    for group in range(REMEMBERED // 50):
        chosen.place(ask(0, turn=group, tokens=np.full(SHORTEST_PREFIX * 4, group, np.int32)), anywhere)
    assert len(chosen._prefixes) <= REMEMBERED


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 1000])
def test_prefixes_double_and_end_with_the_whole_prompt(length: int) -> None:
    prompt = np.arange(length, dtype=np.int32)
    found = list(prefixes(prompt))
    assert [n for n, _ in found] == [64 * 2**k for k in range(9) if 64 * 2**k < length] + [length]
    assert all(dict(prefixes(prompt[:n]))[n] == digest for n, digest in found)


def test_static_placement_counts_over_those_that_are_there() -> None:
    fixed = StaticPlacement()
    for name in ("b", "a", "c"):
        fixed.joined(name)
    places: Callable[[], list[str]] = lambda: [fixed.by_ordinal(n) for n in range(4)]  # noqa: E731
    assert places() == ["a", "b", "c", "a"]
    fixed.left("b")
    assert places() == ["a", "c", "a", "c"]


def test_a_replay_places_as_recorded() -> None:
    recorded = RecordedPlacement({"00000000": "b"}, {"00000000-001/1": "a"})
    for name in ("a", "b"):
        recorded.joined(name)
    placed = [
        recorded.place(ask(0, member, turn), anywhere) for member, turn in ((0, 0), (1, 0), (1, 1), (0, 1))
    ]
    assert placed == ["b", "b", "a", "b"]
    assert recorded.place(ask(0), "a".__eq__) is None  # it waits for that one
