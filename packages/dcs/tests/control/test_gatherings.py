"""Collective groups: who is gathered for a version, and what happens to who breaks one."""

import pytest
from dcs.control.messages import Complete, RunState, Store
from dcs.layout import Layout, TensorSpec

STORE = Store("192.0.2.1", 7)
OTHER = Layout((TensorSpec("w", (2,), "float32"), TensorSpec("x", (1,), "float32")))
W_ONLY = Layout((TensorSpec("w", (2,), "float32"),))


@pytest.fixture
def three(talk):
    """A publisher and three subscribers that offer gloo, at version 0."""
    said = talk()
    said.rank("p", collective="gloo", store=STORE)
    for who in ("s0", "s1", "s2"):
        said.join(who, "subscriber", collective="gloo")
    said.announce("p", 0)
    return said


def gathered(said, *whos: str):
    """By member, (key's number, place, size), or None."""
    found = []
    for who in whos or ("s0", "s1", "s2"):
        gathering = said.last(who, RunState).gathering
        found.append(
            None if gathering is None else (int(gathering.key.split("/")[2]), gathering.rank, gathering.size)
        )
    return found


def take(said, version: int, **wires: str) -> None:
    """These stage it by these wires, the others by the collective one; then the next is complete."""
    for who in ("s0", "s1", "s2"):
        wire = wires.get(who, "collective")
        if wire:
            said.stage(who, version, wire=wire)
    said.announce("p", version + 1)


def test_the_members_of_a_group_are_the_publisher_and_subscribers_by_joining(three):
    assert gathered(three) == [(1, 1, 4), (1, 2, 4), (1, 3, 4)]
    gathering = three.last("p", Complete).roster.gathering
    assert (gathering.key, gathering.backend, gathering.store) == ("r/1/1", "gloo", STORE)
    assert (gathering.rank, gathering.size) == (0, 4)


def test_a_group_is_used_again_while_nothing_changes(three):
    take(three, 0)
    take(three, 1)
    assert gathered(three) == [(1, 1, 4), (1, 2, 4), (1, 3, 4)]


def test_who_joins_late_takes_part_in_the_next_version(three):
    late = three.join("late", "subscriber", collective="gloo")
    assert late.state.gathering is None
    assert gathered(three) == [(1, 1, 4), (1, 2, 4), (1, 3, 4)]
    take(three, 0)
    assert gathered(three, "s0", "late") == [(2, 1, 5), (2, 4, 5)]


def test_who_is_gone_changes_the_group_of_the_next_version(three):
    three.leave("s1")
    three.beat("s0")
    assert gathered(three, "s0") == [(1, 1, 4)]  # it is broken now, but of this version
    three.stage("s0", 0, wire="tcp")
    three.stage("s2", 0, wire="tcp")
    three.announce("p", 1)
    assert gathered(three, "s0", "s2") == [(2, 1, 3), (2, 2, 3)]  # those that fell back are not to blame


def test_who_takes_another_wire_sits_out_longer_each_time(three):
    sat_out = []
    for version in range(12):
        take(three, version, s1="tcp" if gathered(three, "s1") != [None] else "shm")
        sat_out.append(gathered(three, "s1") == [None])
    assert sat_out == [True, False, True, True, False, True, True, True, True, False, True, True]
    assert gathered(three, "s0") != [None]


def test_receiving_through_a_group_clears_the_slate(three):
    sat_out = []
    for version, wire in enumerate(("tcp", "collective", "collective", "tcp", "collective", "collective")):
        take(three, version, s1=wire)
        sat_out.append(gathered(three, "s1") == [None])
    assert sat_out == [True, False, False, True, False, False]


def test_a_stopped_peer_is_to_blame_and_not_those_that_it_held_up(three):
    take(three, 0, s0="tcp", s1="", s2="tcp")
    assert gathered(three) == [(2, 1, 3), None, (2, 2, 3)]


def test_whom_the_publisher_reports_sits_out_until_it_joins_anew(three):
    three.beat("p", slow=(three.ids["s1"],))
    for version in range(3):
        take(three, version)
        assert gathered(three) == [(2, 1, 3), None, (2, 2, 3)]
    three.join("s1", "subscriber", collective="gloo")
    take(three, 3)
    assert gathered(three, "s1") == [(3, 3, 4)]


def test_a_new_epoch_makes_a_new_group_of_those_that_lack_the_version(three):
    three.stage("s0", 0, wire="collective")
    three.rank("q", collective="gloo", store=STORE)
    three.announce("q", 0)
    assert gathered(three) == [None, (2, 1, 3), (2, 2, 3)]
    assert three.last("q", Complete).roster.gathering.key == "r/2/2"


@pytest.mark.parametrize(
    ("publisher", "subscriber"),
    [
        ({}, {"collective": "gloo"}),
        ({"collective": "gloo"}, {"collective": "gloo"}),
        ({"collective": "nccl", "store": STORE}, {"collective": "gloo"}),
        ({"collective": "gloo", "store": STORE}, {}),
        ({"collective": "gloo", "store": STORE, "layout": OTHER}, {"collective": "gloo", "layout": W_ONLY}),
    ],
)
def test_nobody_is_gathered_without_a_backend_a_store_and_a_layout_in_common(talk, publisher, subscriber):
    said = talk()
    said.rank("p", **publisher)
    said.join("s", "subscriber", **subscriber)
    said.announce("p", 0)
    assert gathered(said, "s") == [None]
    assert said.last("p", Complete).roster.gathering is None


def test_several_ranks_form_no_group(talk):
    said = talk()
    for index, who in enumerate("ab"):
        said.rank(who, index, 2, "job", collective="gloo", store=STORE)
    said.join("s", "subscriber", collective="gloo")
    said.announce("a", 0)
    said.announce("b", 0)
    assert gathered(said, "s") == [None]
