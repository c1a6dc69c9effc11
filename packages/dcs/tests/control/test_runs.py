"""What a run tells its members: sources, commits of groups, evictions of slow receivers, and the snapshot."""

import time

import msgspec
import pytest
from dcs.control.messages import Complete, Endpoint, Fenced, Heartbeat, Joined, RunState, encode
from dcs.control.views import Topology

LEASE = 5.0


def place(index: int) -> Endpoint:
    return Endpoint("192.0.2.9", 100 + index, f"m{index}")


def with_subscribers(said, count: int, **options):
    """A rank "p", and subscribers s0, s1 ... on machines of their own, of a version that is announced."""
    said.rank("p")
    for index in range(count):
        said.join(f"s{index}", "subscriber", endpoint=place(index), **options)
    said.announce("p", 0)
    return said


def names(said, who: str) -> list[str]:
    return [source.name for source in said.last(who, RunState).sources]


def test_there_are_no_sources_before_there_is_a_version(talk):
    said = talk()
    said.rank("p")
    assert said.join("s", "subscriber").state.sources == ()


def test_the_children_of_a_dead_relay_are_told_at_once(talk):
    said = with_subscribers(talk(), 4)
    assert [names(said, f"s{index}")[0] for index in range(4)] == ["rank-0", "s0", "s1", "s2"]
    said.leave("s1")
    assert names(said, "s2") == ["s0", "rank-0"]
    assert names(said, "s3") == ["s2", "s0", "rank-0"]
    said.leave("s0")
    assert names(said, "s2") == ["rank-0"]


def test_without_relays_everybody_pulls_from_the_ranks(talk):
    said = with_subscribers(talk(relay=False), 3)
    assert [names(said, f"s{index}") for index in range(3)] == [["rank-0"]] * 3


def test_who_has_the_version_serves_those_that_join_late(talk):
    said = with_subscribers(talk(), 2)
    for who in ("s0", "s1"):
        said.stage(who, 0)
    sources = said.join("late", "subscriber", endpoint=place(7)).state.sources
    assert sorted((source.name, source.holds) for source in sources[:2]) == [("s0", True), ("s1", True)]
    assert sources[-1].rank == 0
    said.announce("p", 1)
    assert not any(source.holds for source in said.last("late", RunState).sources if source.rank < 0)


def test_a_member_reported_slow_relays_nothing_until_it_joins_anew(talk):
    said = with_subscribers(talk(), 3)
    said.beat("s2", slow=(said.ids["s1"], said.ids["p"], said.ids["s2"], 12345))
    assert names(said, "s2") == ["s0", "rank-0"]
    assert [s.slow for s in said.registry.snapshot(0, 0, 0).runs[0].subscribers] == [False, True, False]
    said.join("s1", "subscriber", endpoint=place(1))
    assert "s1" not in names(said, "s2")  # it is the last of the chain now
    assert said.last("s1", Joined).state.sources[0].name == "s2"


def test_without_a_group_what_is_complete_may_be_committed(talk):
    said = with_subscribers(talk(), 1)
    assert said.last("s0", RunState).commit == 0


def test_a_group_commits_what_all_of_it_have(talk):
    said = with_subscribers(talk(), 2, group="g", group_size=2)

    def commits():
        return [said.last(who, RunState).commit for who in ("s0", "s1")]

    assert commits() == [-1, -1]
    said.stage("s0", 0)
    assert commits() == [-1, -1]
    said.stage("s1", 0)
    assert commits() == [0, 0]
    said.announce("p", 1)
    said.stage("s1", 1)
    said.stage("s0", 1)
    said.ack("s0", 0)
    assert commits() == [0, 0]  # "s1" was told to commit version 0, and has not yet
    said.ack("s1", 0)
    assert commits() == [1, 1]


def test_a_group_that_lacks_members_commits_nothing(talk):
    said = with_subscribers(talk(), 2, group="g", group_size=3)
    for who in ("s0", "s1"):
        said.stage(who, 0)
    assert said.last("s0", RunState).commit == -1
    said.join("s2", "subscriber", endpoint=place(2), group="g", group_size=3)
    said.stage("s2", 0)
    assert said.last("s0", RunState).commit == 0
    said.leave("s2")
    said.announce("p", 1)
    for who in ("s0", "s1"):
        said.stage(who, 1)
    assert said.last("s0", RunState).commit == 0


def test_groups_do_not_wait_for_each_other(talk):
    said = with_subscribers(talk(), 1, group="g")
    said.join("t", "subscriber", group="h", endpoint=place(9))
    said.stage("t", 0)
    assert said.last("t", RunState).commit == 0
    assert said.last("s0", RunState).commit == -1


def test_who_takes_too_long_for_a_version_is_evicted_and_may_come_back(talk):
    said = with_subscribers(talk(transfer_seconds=8.0), 2)
    everybody = ("p", "s0", "s1")
    said.wait(4, *everybody)
    said.stage("s0", 0)
    said.announce("p", 1)  # starts no new count for who has not got the one before
    said.wait(3.9, *everybody)
    assert said.last("s1", Fenced) is None
    said.wait(0.1, *everybody)
    fenced = said.last("s1", Fenced)
    assert fenced.rejoin
    assert "had not staged what was announced 8.0 s ago, and has version -1 of 1" in fenced.message
    assert fenced.message in said.last("p", Complete).roster.departed.values()
    said.join("s1", "subscriber", known=(1, 1))
    said.wait(3.9, *everybody)
    assert said.last("s0", Fenced) is None
    said.wait(0.1, *everybody)  # eight seconds after version 1
    assert "has version 0 of 1" in said.last("s0", Fenced).message
    said.wait(4, "p", "s1")
    assert said.last("s1", Fenced) is not fenced


def test_who_stages_in_time_stays(talk):
    said = with_subscribers(talk(transfer_seconds=4.0), 1)
    for version in range(1, 6):
        said.wait(3, "p", "s0")
        said.stage("s0", version - 1)
        said.announce("p", version)
    assert said.last("s0", Fenced) is None


def test_nobody_is_evicted_for_a_version_that_cannot_be_had(talk):
    said = with_subscribers(talk(transfer_seconds=4.0), 1)
    said.leave("p")
    for _ in range(4):
        said.wait(3, "s0")
    assert said.last("s0", Fenced) is None


def test_a_snapshot_says_everything_and_shares_nothing(talk):
    said = with_subscribers(talk(), 2, site="x")
    said.wait(2, "p", "s0", "s1")
    said.stage("s0", 0, wire="tcp+delta")
    said.ack("s0", 0)
    said.announce("p", 1)
    said.leave("s1")
    shown = said.registry.snapshot(said.now, 1000.0, -3.0)
    (run,) = shown.runs
    assert (shown.at, shown.uptime_seconds, shown.lease_seconds) == (1000.0, 5.0, LEASE)
    assert (run.name, run.epoch, run.session, run.publisher, run.version) == ("r", 1, "of p", "alive", 1)
    (rank,) = run.ranks
    assert (rank.name, rank.state, rank.nbytes, rank.announced, rank.heard_seconds) == (
        "rank-0",
        "alive",
        8,
        1,
        0.0,
    )
    (subscriber,) = run.subscribers
    assert (subscriber.name, subscriber.site, subscriber.machine) == ("s0", "x", "m0")
    assert (subscriber.staged, subscriber.acked, subscriber.lag, subscriber.wire) == (0, 0, 1, "tcp+delta")
    assert (subscriber.from_ranks, subscriber.from_peers) == (10, 20)
    assert [source.name for source in subscriber.sources] == ["rank-0"]
    first, second = run.versions
    assert (first.version, first.roots, first.nbytes, first.freeze_seconds) == (0, ("00" * 16,), 100, 0.5)
    assert (first.announced_at, first.complete_at, second.complete_at) == (998.0, 998.0, 1000.0)
    (delivery,) = first.deliveries
    assert (delivery.name, delivery.staged_seconds, delivery.acked_seconds) == ("s0", 2.0, 2.0)
    assert (delivery.transfer_seconds, delivery.pause_seconds) == (0.5, 0.25)
    (gone,) = run.departed
    assert (gone.role, gone.name, gone.reason, gone.at) == ("subscriber", "s1", "done", 1000.0)
    counters = shown.counters
    assert (counters.joins, counters.announcements, counters.completions) == (3, 2, 2)
    assert msgspec.json.decode(msgspec.json.encode(shown), type=Topology) == shown


def test_a_snapshot_shows_ranks_that_are_missing_and_versions_that_are_incomplete(talk):
    said = talk()
    said.rank("a", 0, 2, "job")
    said.rank("b", 1, 2, "job")
    said.announce("a", 0)
    said.leave("b")
    (run,) = said.registry.snapshot(0.0, 0.0, 0.0).runs
    assert [(rank.state, rank.announced) for rank in run.ranks] == [("alive", 0), ("absent", -1)]
    (version,) = run.versions
    assert (version.roots, version.complete_at) == (("00" * 16, ""), None)


def test_the_last_64_versions_and_departures_are_remembered(talk):
    said = with_subscribers(talk(), 1)
    for version in range(1, 100):
        said.announce("p", version)
        said.join(f"x{version}", "subscriber")
        said.leave(f"x{version}")
    (run,) = said.registry.snapshot(0.0, 0.0, 0.0).runs
    assert [version.version for version in run.versions] == list(range(36, 100))
    assert len(run.departed) == 64
    assert run.subscribers[0].lag == 64


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_subscribers_join_a_run_with_a_version_and_stage_the_next(talk, count):
    said = talk()
    for index in range(4):
        said.rank(f"p{index}", index, 4, "job")
        said.announce(f"p{index}", 0)
    began = time.process_time()
    for index in range(count):
        said.join(f"s{index}", "subscriber", endpoint=Endpoint("192.0.2.9", 1, f"m{index // 8}", "/s"))
    joined = time.process_time() - began
    for index in range(4):
        said.announce(f"p{index}", 1)
    for index in range(count):
        said.stage(f"s{index}", 1)
        said.ack(f"s{index}", 1)
    for message in said.heard[f"s{count - 1}"][-1], said.heard["p0"][-1]:
        assert len(encode(message)[1]) < 100 * count
    took = time.process_time() - began
    assert said.registry.snapshot(0, 0, 0).runs[0].subscribers[-1].acked == 1
    print(f"{count} joins {joined:.2f} s, with staging and acknowledging {took:.2f} s")
    assert took < 10


def test_a_heartbeat_of_a_stranger_changes_nothing(talk):
    said = with_subscribers(talk(), 1)
    before = said.registry.snapshot(0, 0, 0)
    said.tell("x", Heartbeat(said.ids["s0"]))
    assert said.registry.snapshot(0, 0, 0) == before
