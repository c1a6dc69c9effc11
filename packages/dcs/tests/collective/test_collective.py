"""Collective groups of real processes over gloo: all get it, or all go on within the deadline."""

import signal
import socket
import threading
import time

import pytest
import torch
from dcs.wire.collective import CollectiveBroken, CollectiveStore, Group

MIB = 1 << 20
DEADLINE = 1.2  # seconds
SLACK = 6.0  # of a loaded machine; what is wrong here takes 20 s, or has no end


def test_everybody_gets_the_bytes_bucket_by_bucket(ranks, gather, together):
    members = ranks(3)
    assert gather(members) == [{}, {}, {}]
    nbytes = 5 * MIB + 17
    for answer in together(members, "broadcast", nbytes=nbytes, fill=3, source=0, bucket=2 * MIB):
        assert answer["equal"]
        assert answer["buckets"] == [[0, 2 * MIB], [2 * MIB, 4 * MIB], [4 * MIB, nbytes]]
    assert all(answer["seconds"] < SLACK for answer in together(members, "close"))


def test_a_group_is_used_for_many_versions_and_any_source(ranks, gather, together):
    members = ranks(3)
    gather(members)
    for version in range(1, 9):
        command = {"nbytes": MIB + version, "fill": version, "source": version % 3, "bucket": MIB // 4}
        assert all(answer["equal"] for answer in together(members, "broadcast", **command))


def test_nothing_to_send_is_no_work(ranks, gather, together):
    members = ranks(2)
    gather(members)
    answers = together(members, "broadcast", nbytes=0, fill=1, source=0, bucket=MIB)
    assert [answer["buckets"] for answer in answers] == [[], []]


def test_a_peer_missing_at_init_costs_the_deadline_and_is_named(ranks, store):
    (member,) = ranks(1)
    before = member.ask("held")
    began = time.monotonic()
    answer = member.ask("make", port=store.port, key="alone", rank=0, size=3, deadline=0.5)
    assert time.monotonic() - began < 0.5 + SLACK
    assert answer["bucket"] == -1
    assert answer["broken"] == "no sign of rank 1, 2 in time"
    await_release(member, before)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_mid_bucket_breaks_the_group_well_before_its_deadline(ranks, gather, together, victim):
    members = ranks(3)
    gather(members)
    survivors = [member for member in members if member is not members[victim]]
    command = {"nbytes": 8 * MIB, "fill": 7, "source": 0, "bucket": MIB // 8}
    members[victim].tell("broadcast", act=[5, signal.SIGKILL], **command)
    for answer in together(survivors, "broadcast", **command):
        # Who has everything already, or has sent it, has nothing to break.
        assert "broken" in answer or answer["equal"]
        assert answer["prefix"]
        assert answer["seconds"] < 1.0 + SLACK
        assert answer["quiet"]
    assert all(answer["seconds"] < SLACK for answer in together(survivors, "close"))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_stopped_mid_bucket_costs_the_others_the_deadline_once(ranks, gather, together, victim):
    members = ranks(3)
    gather(members)
    survivors = [member for member in members if member is not members[victim]]
    command = {"nbytes": 8 * MIB, "fill": 7, "source": 0, "bucket": MIB // 8}
    command |= {"deadline_seconds": DEADLINE}
    members[victim].tell("broadcast", act=[5, signal.SIGSTOP], **command)
    answers = together(survivors, "broadcast", **command)
    assert any("broken" in answer for answer in answers)
    for answer in answers:
        assert answer["seconds"] < DEADLINE + SLACK
        assert answer["quiet"]
    digests = together(survivors, "digest")
    members[victim].signal(signal.SIGCONT)
    assert members[victim].hear()["quiet"]  # it learns that it is too late
    assert together(survivors, "digest") == digests  # and writes nothing into their buffers any more
    for answer in together(survivors, "broadcast", **command):
        assert "broken" in answer
        assert answer["seconds"] < DEADLINE  # it is paid once


def test_an_abort_from_another_thread_ends_it_at_once_everywhere(ranks, gather, together):
    members = ranks(3)
    gather(members)
    command = {"nbytes": 8 * MIB, "fill": 7, "source": 0, "bucket": MIB // 8}
    members[1].tell("broadcast", act=[3, "abort"], **command)
    others = together([members[0], members[2]], "broadcast", **command)
    aborted = members[1].hear()
    assert aborted["broken"] == "the test aborts it" or aborted["equal"]
    for answer in [aborted, *others]:
        assert answer["seconds"] < 1.0 + SLACK
        assert answer["quiet"]


def test_a_group_that_is_still_being_made_can_be_aborted(store):
    group = Group("gloo", store.host, store.port, "alone", 0, 2, 60.0, wait=False)
    timer = threading.Timer(0.2, group.abort, ("this member is closing",))
    timer.start()
    began = time.monotonic()
    with pytest.raises(CollectiveBroken, match="closing"):
        group.broadcast(torch.zeros(4, dtype=torch.uint8))
    assert time.monotonic() - began < SLACK
    timer.join()
    with pytest.raises(CollectiveBroken, match="closing"):
        group.ready()
    began = time.monotonic()
    group.close()
    assert time.monotonic() - began < SLACK


def test_what_on_bucket_raises_comes_out_and_breaks_the_group(ranks, gather, together):
    members = ranks(2)
    gather(members)
    command = {"nbytes": 8 * MIB, "fill": 7, "source": 0, "bucket": MIB}
    members[0].tell("broadcast", **command)
    assert members[1].ask("broadcast", act=[1, "raise"], **command)["raised"] == "the test raises"
    members[0].hear()
    assert "broken" in members[1].ask("broadcast", **command)


def test_the_trainers_own_default_group_is_left_alone(ranks, gather, together, tmp_path):
    with_own, without = ranks(2)
    assert with_own.ask("default_group", path=str(tmp_path / "store"))["size"] == 1
    gather([with_own, without])
    command = {"nbytes": MIB, "fill": 7, "source": 0, "bucket": MIB}
    assert all(answer["equal"] for answer in together([with_own, without], "broadcast", **command))
    assert with_own.ask("default_group") == {"initialized": True, "size": 1, "sum": 3.0}
    assert without.ask("default_group") == {"initialized": False}
    together([with_own, without], "close")
    assert with_own.ask("default_group") == {"initialized": True, "size": 1, "sum": 3.0}


@pytest.mark.parametrize("cycles", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_broken_groups_leave_no_thread_and_no_descriptor(ranks, gather, together, cycles):
    members = ranks(2)
    gather(members, "warm")
    together(members, "close")
    before = [member.ask("held") for member in members]
    command = {"nbytes": 4 * MIB, "fill": 7, "source": 0, "bucket": MIB, "deadline_seconds": DEADLINE}
    for cycle in range(cycles):
        gather(members, f"cycle-{cycle}")
        members[0].tell("broadcast", act=[1, "raise"], **command)
        answer = members[1].ask("broadcast", **command)
        assert "broken" in answer or answer["equal"]
        members[0].hear()
        together(members, "close")
    for member, held in zip(members, before, strict=True):
        await_release(member, held)


def test_a_store_serves_only_the_address_it_was_given(store):
    with pytest.raises(CollectiveBroken, match="at rank 0 of 1"):
        Group("gloo", "127.0.0.2", store.port, "elsewhere", 0, 1, 0.3)


def test_a_store_that_does_not_answer_costs_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(CollectiveBroken):
            Group("gloo", "127.0.0.1", silent.getsockname()[1], "silent", 0, 2, 0.3)
        assert time.monotonic() - began < 0.3 + SLACK


def test_a_store_that_is_stopped_costs_the_deadline_and_nothing_more(ranks):
    server, member = ranks(2)
    port = server.ask("serve")["port"]
    before = member.ask("held")
    server.signal(signal.SIGSTOP)
    began = time.monotonic()
    answer = member.ask("make", port=port, key="stopped", rank=0, size=1, deadline=0.5)
    assert answer["bucket"] == -1
    assert time.monotonic() - began < 0.5 + SLACK
    server.close()
    await_release(member, before)


def test_a_group_of_one_and_wrong_arguments(store):
    with Group("gloo", store.host, store.port, "one", 0, 1, 5.0) as group:
        seen = []
        group.broadcast(torch.arange(10, dtype=torch.uint8), 0, 4, lambda *span: seen.append(span))
        assert seen == [(0, 4), (4, 8), (8, 10)]
        with pytest.raises(ValueError, match="uint8"):
            group.broadcast(torch.zeros(4))
        with pytest.raises(ValueError, match="source 1 of 1"):
            group.broadcast(torch.zeros(4, dtype=torch.uint8), 1)
    group.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcs-gloo-one")]
    with pytest.raises(ValueError, match="rank 2"):
        Group("gloo", store.host, store.port, "two", 2, 2, 5.0)


def test_nccl_without_a_gpu_says_so(store):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: scripts/gpu_check.sh")
    with pytest.raises(CollectiveBroken, match="GPU"):
        Group("nccl", store.host, store.port, "nccl", 0, 1, 5.0)


def test_a_store_gives_its_port_back(store):
    second = CollectiveStore()
    port = second.port
    second.close()
    second.close()
    with pytest.raises(CollectiveBroken):
        Group("gloo", "127.0.0.1", port, "late", 0, 1, 0.3)


def await_release(member, before: dict) -> None:
    """What torch holds back goes when the deadline of its call has passed."""
    limit, pause = time.monotonic() + DEADLINE + SLACK, threading.Event()
    while True:
        held = member.ask("held")
        if all(count <= before[kind] for kind, count in held.items()):
            return
        assert time.monotonic() < limit, (held, before)
        pause.wait(0.05)
