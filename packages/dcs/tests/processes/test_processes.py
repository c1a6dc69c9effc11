"""Real processes that are stopped and killed."""

import importlib.util
import signal
import time

import dcs
import pytest
import torch


@pytest.fixture
def member(request):
    """The module `member_process.py`, for the models it makes and the digests it prints."""
    path = request.path.parent.parent / "member_process.py"
    spec = importlib.util.spec_from_file_location("member_process", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FLOATS = 2_000_000


def test_two_subscriber_processes_receive_every_bit(child, member):
    with dcs.serve() as coordinator:
        children = [child("subscriber", coordinator.address, name, str(FLOATS)) for name in ("e", "f")]
        for process in children:
            assert process.hear() == ["ready"]
        tensors = member.model(FLOATS, 0)
        with dcs.Publisher(coordinator.address, run="r", layout=dcs.layout.of(tensors)) as publisher:
            for version in range(4):
                tensors = member.model(FLOATS, version)
                expected = [str(version), member.digest(tensors)]
                ticket = publisher.publish(version, tensors)
                tensors["a"].zero_()
                assert [process.hear() for process in children] == [expected, expected]
                assert set(ticket.wait(10).acked) == {"e", "f"}


def test_a_killed_subscriber_stalls_no_publish_and_is_evicted(coordinator, child, member, subscribe):
    tensors = member.model(FLOATS, 0)
    process = child("subscriber", coordinator.address, "doomed", str(FLOATS))
    assert process.hear() == ["ready"]
    survivor = subscribe(tensors, "survivor")
    with dcs.Publisher(coordinator.address, run="r", layout=dcs.layout.of(tensors)) as publisher:
        publisher.publish(0, tensors)
        assert process.hear()[0] == "0"
        process.kill()
        tickets = []
        for version in range(1, 5):
            tickets.append(publisher.publish(version, tensors))
            assert tickets[-1].stats().wait_seconds < 1
            survivor.fetch(version, timeout=10)
        stats = tickets[-1].wait(10)
        assert list(stats.acked) == ["survivor"]
        assert "no heartbeat" in stats.gone["doomed"]


def test_a_stopped_subscriber_is_evicted_and_joins_again_when_it_wakes(coordinator, child, member):
    tensors = member.model(FLOATS, 0)
    process = child("subscriber", coordinator.address, "e", str(FLOATS))
    assert process.hear() == ["ready"]
    with dcs.Publisher(coordinator.address, run="r", layout=dcs.layout.of(tensors)) as publisher:
        process.signal(signal.SIGSTOP)
        began = time.monotonic()
        tickets = [publisher.publish(version, member.model(FLOATS, version)) for version in range(3)]
        assert time.monotonic() - began < 10
        assert "no heartbeat" in tickets[-1].wait(10).gone["e"]
        process.signal(signal.SIGCONT)
        assert process.hear() == ["2", member.digest(member.model(FLOATS, 2))]
        ticket = publisher.publish(3, member.model(FLOATS, 3))
        assert process.hear() == ["3", member.digest(member.model(FLOATS, 3))]
        assert list(ticket.wait(10).acked) == ["e"]


def test_a_killed_publisher_is_lost_and_the_next_one_is_followed(
    coordinator, child, member, subscribe, eventually
):
    subscriber = subscribe(member.model(FLOATS, 0))
    first = child("publisher", coordinator.address, str(FLOATS))
    assert first.hear() == ["ready", "1"]
    first.say("0")
    assert first.hear() == ["published", "0", "1"]
    assert member.digest(subscriber.fetch(timeout=10)) == member.digest(member.model(FLOATS, 0))
    first.kill()
    eventually(lambda: isinstance(subscriber.health().error, dcs.PublisherLost))
    assert subscriber.next(after=0, timeout=0.05) is None
    second = child("publisher", coordinator.address, str(FLOATS))
    assert second.hear() == ["ready", "2"]
    second.say("1")
    assert second.hear() == ["published", "1", "2"]
    staged = subscriber.next(after=0, timeout=10)
    assert staged is not None
    assert (staged.epoch, staged.version) == (2, 1)
    assert member.digest(staged.tensors) == member.digest(member.model(FLOATS, 1))
    assert subscriber.health().error is None


def test_a_publisher_killed_in_the_middle_of_a_transfer_leaves_the_old_version_whole(
    coordinator, child, member, subscribe, eventually
):
    big = 8_000_000
    subscriber = subscribe(member.model(big, 0))
    publisher = child("publisher", coordinator.address, str(big))
    assert publisher.hear()[0] == "ready"
    publisher.say("0")
    held = subscriber.next(timeout=30)
    assert held is not None
    publisher.say("1")
    eventually(lambda: subscriber.health().announced == 1, 30)
    publisher.kill()
    expected = member.digest(member.model(big, 0))
    assert member.digest(held.tensors) == expected
    held.ack()
    newer = subscriber.next(after=0, timeout=2)
    if newer is not None:  # it was faster than the signal
        assert member.digest(newer.tensors) == member.digest(member.model(big, 1))


def test_a_stopped_publisher_joins_again_and_serves_late_joiners(
    coordinator, child, member, subscribe, eventually
):
    subscriber = subscribe(member.model(FLOATS, 0))
    process = child("publisher", coordinator.address, str(FLOATS))
    assert process.hear() == ["ready", "1"]
    process.say("0")
    assert process.hear() == ["published", "0", "1"]
    subscriber.fetch(timeout=10)
    process.signal(signal.SIGSTOP)
    eventually(lambda: subscriber.health().publisher == "lost")
    process.signal(signal.SIGCONT)
    late = subscribe(member.model(FLOATS, 0), "late")
    staged = late.next(timeout=10)
    assert staged is not None
    assert staged.version == 0  # from the publisher, or from the other subscriber if that was faster
    assert member.digest(staged.tensors) == member.digest(member.model(FLOATS, 0))
    staged.ack()
    process.signal(signal.SIGSTOP)
    process.say("1")  # the first thing it does when it wakes, before it knows that its lease has lapsed
    eventually(lambda: subscriber.health().publisher == "lost")
    process.signal(signal.SIGCONT)
    assert process.hear()[:2] == ["published", "1"]
    for receiver in (subscriber, late):
        assert torch.equal(receiver.fetch(1, timeout=10)["a"], member.model(FLOATS, 1)["a"])
