"""Versions by broadcast, with another wire for whatever fails; versions that are staged on a device too."""

import signal
import subprocess
import sys

import dcs
import pytest
import torch

GLOO = {"wires": ("tcp",), "collective": "gloo", "chunk_bytes": 64 << 10}


def model(version: int, floats: int = 300_000) -> dict[str, torch.Tensor]:
    return {"a": torch.randn(floats, generator=torch.Generator().manual_seed(version))}


def take(subscriber: dcs.Subscriber, version: int, floats: int = 300_000) -> dcs.Staged:
    staged = subscriber.next(after=version - 1, timeout=30)
    assert staged is not None, subscriber.health()
    assert torch.equal(staged.tensors["a"], model(version, floats)["a"])
    staged.ack()
    return staged


def test_versions_come_by_broadcast_through_one_group(publish_to, subscribe):
    publisher = publish_to(model(0), **GLOO)
    subscribers = [subscribe(model(0), f"engine-{index}", **GLOO) for index in range(2)]
    for version in range(4):
        ticket = publisher.publish(version, model(version))
        assert [take(each, version).wire for each in subscribers] == ["collective"] * 2
        assert len(ticket.wait(10).acked) == 2
    assert publisher.sent == 0
    late = subscribe(model(0), "late", **GLOO)
    assert take(late, 3).wire == "tcp"  # the broadcast is over
    publisher.publish(4, model(4))
    assert [take(each, 4).wire for each in (*subscribers, late)] == ["collective"] * 3


def test_who_could_map_takes_part_in_a_broadcast_too(publish_to, subscribe):
    publisher = publish_to(model(0), collective="gloo")
    subscribers = [
        subscribe(model(0), "maps", collective="gloo"),
        subscribe(model(0), "does-not", collective="gloo", wires=("tcp",)),
    ]
    for version in range(3):
        publisher.publish(version, model(version))
        assert [take(each, version).wire for each in subscribers] == ["collective"] * 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone_costs_one_deadline_and_the_version_comes(
    coordinator, publish_to, subscribe, child, how
):
    options = '{"wires": ["tcp"], "collective": "gloo", "collective_seconds": 1.5}'
    publisher = publish_to(model(0), collective_seconds=1.5, **GLOO)
    survivor = subscribe(model(0), "survivor", collective_seconds=1.5, **GLOO)
    process = child("plain", coordinator.address, "doomed", "300000", options)
    assert process.hear() == ["ready"]
    publisher.publish(0, model(0))
    assert take(survivor, 0).wire == "collective"
    assert process.hear()[0] == "0"
    process.signal(how)
    publisher.publish(1, model(1))
    assert take(survivor, 1).transfer_seconds < 5  # by broadcast, if its own part of the tree is whole
    for version in (2, 3):  # the group is formed without it
        publisher.publish(version, model(version))
        assert take(survivor, version).transfer_seconds < 5
    process.signal(signal.SIGCONT) if how == signal.SIGSTOP else None


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_ends_well_while_a_group_is_waiting_for_a_peer(coordinator, closes):
    script = """
import sys, threading, dcs, torch
tensors = {"a": torch.zeros(1000)}
layout = dcs.layout.of(tensors)
options = dict(collective="gloo", collective_seconds=4.0)
publisher = dcs.Publisher(sys.argv[1], run="r", layout=layout, **options)
subscriber = dcs.Subscriber(sys.argv[1], run="r", name="e", layout=layout, **options)
busy = threading.Event()
subscriber._intake._puller._groups.broadcast = lambda *_: busy.wait()
publisher.publish(0, tensors)
busy.wait(0.5)
busy.set()
if sys.argv[2] == "True":
    subscriber.close()
    publisher.close()
print("done")
"""
    command = [sys.executable, "-c", script, coordinator.address, str(closes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr


def test_a_broadcast_that_is_damaged_is_mended_over_tcp(publish_to, subscribe, monkeypatch):
    publisher = publish_to(model(0), **GLOO)
    subscriber = subscribe(model(0), **GLOO)
    plain = dcs.wire.gathering.Groups.broadcast

    def damaged(groups, gathering, flat):
        plain(groups, gathering, flat)
        if gathering.rank:
            flat[100_000] ^= 1

    monkeypatch.setattr("dcs.wire.gathering.Groups.broadcast", damaged)
    publisher.publish(0, model(0))
    staged = take(subscriber, 0)
    assert staged.from_ranks == 64 << 10  # the chunk that is damaged, and no other


def test_versions_are_staged_on_the_device(publish_to, subscribe):
    publisher = publish_to(model(0), wires=("tcp",))
    subscriber = subscribe(model(0), wires=("tcp",), device="cpu")
    publisher.publish(0, model(0))
    held = subscriber.next(timeout=10)
    assert held is not None
    assert held.tensors["a"].data_ptr() not in {
        copy.arena.tensors["a"].data_ptr() for copy in subscriber._intake.shelf.held
    }
    for version in range(1, 5):
        publisher.publish(version, model(version))
    assert torch.equal(held.tensors["a"], model(0)["a"])
    held.ack()
    take(subscriber, 4)
    assert subscriber.health().staging == "cpu"


def test_a_device_without_room_is_named_and_the_host_is_used(publish_to, subscribe):
    publisher = publish_to(model(0))
    subscriber = subscribe(model(0), device="cuda:0")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    publisher.publish(0, model(0))
    take(subscriber, 0)
    assert subscriber.health().staging.startswith("host, as cuda:0 was asked for")
