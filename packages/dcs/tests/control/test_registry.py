"""The coordinator's state machine, without sockets or time: one rank, its subscribers, and their leases."""

import pytest
from dcs.control.messages import (
    Acked,
    Announce,
    Announced,
    Complete,
    Fenced,
    Heartbeat,
    Join,
    Joined,
    Layouts,
    Refused,
    Roster,
    RunState,
    WantLayouts,
)
from dcs.layout import Layout, TensorSpec

LEASE = 5.0
LAYOUT = Layout((TensorSpec("w", (2,), "float32"),))
OTHER = Layout((TensorSpec("w", (3,), "float32"),))


def test_a_token_is_demanded(talk):
    said = talk(token="secret")
    for token in (None, "", "wrong", "secret\0"):
        reply = said.join("a", "subscriber", token=token)
        assert isinstance(reply, Refused)
        assert reply.code == "unauthorized"
        assert "secret" not in reply.message
    assert isinstance(said.join("a", "subscriber", token="secret"), Joined)


def test_versions_grow_and_a_new_epoch_may_repeat_the_newest_with_the_same_bits_only(talk):
    said = talk()
    first = said.rank("p")
    assert (first.epoch, first.version) == (1, -1)
    assert isinstance(said.announce("p", 5), Announced)
    stale = said.announce("p", 4)
    assert isinstance(stale, Refused)
    assert stale.code == "stale"
    assert "publish 6 or later" in stale.message
    second = said.rank("q")
    assert (second.epoch, second.version, second.root) == (2, 5, bytes([5]) * 16)
    fenced = said.announce("p", 6)
    assert isinstance(fenced, Fenced)
    assert not fenced.rejoin
    other = said.announce("q", 5, root=6)
    assert isinstance(other, Refused)
    assert "with other weights" in other.message
    assert isinstance(said.announce("q", 6, epoch=1), Refused)
    assert isinstance(said.announce("q", 5), Announced)
    assert isinstance(said.announce("q", 6), Announced)


def test_only_a_publisher_announces_and_only_from_its_own_connection(talk):
    said = talk()
    said.rank("p")
    said.join("s", "subscriber")
    said.epochs["s"] = 1
    assert isinstance(said.announce("s", 0), Refused)
    assert isinstance(said.tell("s", Announce(1, said.ids["p"], 1, 0, bytes(16))), Fenced)
    state = said.beat("s")
    assert isinstance(state, RunState)
    assert state.announcement is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": None}, "without the endpoint"),
        ({"rank": 2, "of": 2}, "rank 2 of 2 ranks"),
        ({"known": (1 << 63, 0)}, "no coordinator issues"),
    ],
)
def test_a_publisher_that_cannot_be_one_is_refused(talk, options, words):
    reply = talk().rank("p", **options)
    assert isinstance(reply, Refused)
    assert words in reply.message


def test_a_subscriber_that_does_not_fit_is_refused_or_fenced_and_named(talk):
    said = talk()
    early = said.join("early", "subscriber", layout=OTHER).member
    said.rank("p")
    fenced = said.last("early", Fenced)
    assert fenced.member == early
    assert not fenced.rejoin
    assert fenced.detail == {"tensor": "w", "got": "float32[2]", "expected": "float32[3]"}
    assert "'early'" in said.last("p", Joined).roster.departed[early]
    refused = said.join("late", "subscriber", layout=OTHER)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.detail) == ("layout", fenced.detail)
    assert "subscriber 'late' of run 'r'" in refused.message


def test_a_subscriber_is_not_measured_by_a_publisher_that_has_gone(talk):
    said = talk()
    said.rank("p")
    said.leave("p")
    assert isinstance(said.join("s", "subscriber", layout=OTHER), Joined)


def test_a_lease_lapses_without_heartbeats_and_the_publisher_is_told(talk):
    said = talk()
    said.rank("p")
    member = said.join("s", "subscriber").member
    said.wait(4, "p")
    assert said.registry.next_deadline() == LEASE
    said.wait(0.9)
    assert said.last("s", Fenced) is None
    said.wait(0.1)
    assert said.last("s", Fenced).rejoin
    roster = said.last("p", Roster)
    assert roster.live == {}
    assert "no heartbeat" in roster.departed[member]
    assert said.join("s", "subscriber", known=(1, -1)).member != member


def test_a_lost_publisher_is_told_to_subscribers_and_takes_its_version_with_it(talk):
    said = talk()
    said.rank("p")
    said.join("s", "subscriber")
    said.announce("p", 3)
    assert said.announced("s") == (1, 3)
    said.wait(5, "s")
    state = said.last("s", RunState)
    assert (state.publisher, state.announcement, state.sources) == ("lost", None, ())
    said.rank("p", known=(1, 3))
    assert said.last("s", RunState).publisher == "alive"
    assert said.announced("s") == (1, 3)


def test_a_version_outlives_its_publisher_where_somebody_has_it(talk):
    said = talk()
    said.rank("p")
    for who in ("s", "t"):
        said.join(who, "subscriber")
    said.announce("p", 3)
    said.stage("s", 3)
    said.leave("p")
    assert said.last("t", RunState).publisher == "absent"
    assert said.announced("t") == (1, 3)
    said.leave("s")
    said.beat("t")
    assert said.announced("t") is None


def test_a_member_that_was_granted_time_is_not_evicted(talk):
    said = talk()
    said.rank("p")
    said.now = 20.0
    said.registry.grant(said.now)
    said.wait(4.9)
    assert said.last("p", Fenced) is None
    said.wait(0.1)
    assert said.last("p", Fenced) is not None


def test_an_acknowledgement_only_grows_and_never_passes_the_run(talk):
    said = talk()
    said.rank("p")
    member = said.join("s", "subscriber").member
    said.announce("p", 3)

    def acked_after(version):
        said.ack("s", version)
        return said.beat("p").roster.live[member].acked

    assert acked_after(4) is None
    assert acked_after(3) == Acked(1, 3, 0.5, 0.25)
    assert acked_after(2) == Acked(1, 3, 0.5, 0.25)


def test_a_newer_subscriber_of_a_name_replaces_the_older_one_which_does_not_come_back(talk):
    said = talk()
    said.rank("p")
    said.join("old", "subscriber", "e")
    said.join("new", "subscriber", "e")
    fenced = said.last("old", Fenced)
    assert not fenced.rejoin
    assert "replaced by a newer incarnation" in fenced.message
    assert said.beat("old") == fenced
    assert isinstance(said.beat("new"), RunState)


def test_a_subscriber_that_slept_does_not_take_its_name_back_from_its_successor(talk):
    said = talk()
    said.rank("p")
    said.join("old", "subscriber", "e")
    said.wait(5, "p")  # its lease lapses, so it may join again
    said.join("new", "subscriber", "e")
    assert said.beat("old").rejoin
    refused = said.join("old", "subscriber", "e", known=(1, -1))
    assert isinstance(refused, Refused)
    assert refused.code == "evicted"
    assert isinstance(said.beat("new"), RunState)


def test_a_duplicate_join_is_answered_again_and_an_older_one_is_not(talk):
    said = talk()
    first = said.join("s", "subscriber", request=7)
    said.rank("p")
    again = said.join("s", "subscriber", request=7)
    assert (again.member, again.request) == (first.member, 7)
    before = len(said.heard["s"])
    assert said.join("s", "subscriber", request=6) is None
    assert len(said.heard["s"]) == before
    publisher = said.ids["p"]
    assert said.rank("p", request=said.last("p", Joined).request).member == publisher
    assert said.last("s", Fenced) is None
    assert said.registry.snapshot(0, 0, 0).counters.joins == 2


def test_duplicates_of_announcements_and_heartbeats_change_nothing(talk):
    said = talk()
    said.rank("p")
    said.join("s", "subscriber")
    assert isinstance(said.announce("p", 3), Announced)
    assert isinstance(said.announce("p", 3), Announced)
    said.stage("s", 3)
    said.stage("s", 3)
    (run,) = said.registry.snapshot(0, 0, 0).runs
    assert [version.version for version in run.versions] == [3]
    assert (run.subscribers[0].from_ranks, run.subscribers[0].from_peers) == (10, 20)
    assert said.registry.snapshot(0, 0, 0).counters.completions == 1


def test_a_lost_completion_is_repaired_by_the_next_heartbeat(talk):
    said = talk()
    said.rank("p")
    assert isinstance(said.beat("p"), Roster)
    said.announce("p", 3)
    said.heard["p"].clear()
    complete = said.beat("p")
    assert isinstance(complete, Complete)
    assert (complete.epoch, complete.version) == (1, 3)


def test_layouts_are_given_by_fingerprint_as_far_as_they_are_known(talk):
    said = talk()
    said.rank("p")
    said.join("s", "subscriber")
    wanted = (LAYOUT.fingerprint, OTHER.fingerprint)
    reply = said.tell("s", WantLayouts(9, said.ids["s"], wanted))
    assert reply == Layouts(9, {LAYOUT.fingerprint: LAYOUT})


def test_runs_do_not_mix(talk):
    said = talk()
    said.rank("p", run="one")
    said.rank("q", run="two", layout=OTHER)
    said.join("s", "subscriber", "e", run="one")
    said.join("t", "subscriber", "e", run="two", layout=OTHER)
    said.announce("p", 1)
    said.announce("q", 2)
    assert said.announced("s") == (1, 1)
    assert said.announced("t") == (1, 2)


def test_an_unknown_member_is_told_to_join_again(talk):
    said = talk()
    fenced = said.tell("ghost", Heartbeat(99))
    assert isinstance(fenced, Fenced)
    assert fenced.rejoin
    assert isinstance(said.tell("ghost", Join(1, "subscriber", "r", "g", LAYOUT, None, None)), Joined)
