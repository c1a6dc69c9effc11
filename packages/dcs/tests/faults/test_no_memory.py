"""No memory to stage a version, no descriptors, no threads: said, survived, and over when it is over."""

import contextlib
import resource
import socket
import threading

import dcs
import pytest
import torch
from dcs.memory import shelf as shelves
from dcs.memory.arena import Arena

TENSORS = {"w": torch.arange(100_000, dtype=torch.float32)}
TCP = {"wires": ("tcp",)}


class Scarce:
    """Stands for `Arena`; there is no memory for one while `on`."""

    def __init__(self) -> None:
        self.on = False
        self._arena = Arena

    def __call__(self, layout: dcs.Layout) -> Arena:
        if self.on:
            raise dcs.NoMemory("no memory to stage 400000 bytes: Cannot allocate memory")
        return self._arena(layout)


def test_without_memory_the_old_version_is_served_and_the_new_one_comes_when_there_is_some(
    publish_to, subscribe, monkeypatch, eventually
):
    scarce = Scarce()
    publisher = publish_to(TENSORS, **TCP)
    publisher.publish(0, TENSORS)
    publisher.publish(1, {"w": TENSORS["w"] + 1})  # it has its two buffers now
    subscriber = subscribe(TENSORS, **TCP)
    held = subscriber.next(timeout=10)
    monkeypatch.setattr(shelves, "Arena", scarce)
    scarce.on = True
    ticket = publisher.publish(2, {"w": TENSORS["w"] + 2})
    eventually(lambda: isinstance(subscriber.health().error, dcs.NoMemory))
    assert "no memory to stage" in str(subscriber.health().error)
    assert torch.equal(held.tensors["w"], TENSORS["w"] + 1)
    held.ack()
    assert subscriber.health().acked == 1
    late = subscribe(TENSORS, "late", **TCP)
    assert late.next(timeout=0.2) is None
    assert isinstance(late.health().error, dcs.NoMemory)
    scarce.on = False
    for receiver in (subscriber, late):
        assert torch.equal(receiver.fetch(2, 10)["w"], TENSORS["w"] + 2)
        assert receiver.health().error is None
    assert set(ticket.wait(10).acked) == {"engine-0"}


def test_a_publish_without_memory_fails_and_can_be_repeated(publish_to, subscribe, monkeypatch):
    scarce = Scarce()
    monkeypatch.setattr(shelves, "Arena", scarce)
    publisher = publish_to(TENSORS, **TCP)
    publisher.publish(0, TENSORS)
    scarce.on = True
    with pytest.raises(dcs.NoMemory, match="no memory to stage"):
        publisher.publish(1, TENSORS)
    scarce.on = False
    assert torch.equal(subscribe(TENSORS, **TCP).fetch(0)["w"], TENSORS["w"])
    publisher.publish(1, TENSORS)


def test_an_address_space_without_room_is_no_memory():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    layout = dcs.layout.of({"w": torch.empty(1 << 28, dtype=torch.int8, device="meta")})
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    try:
        with pytest.raises(dcs.NoMemory, match="no memory to stage 268435456 bytes"):
            Arena(layout)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    Arena(layout).close()


def test_a_subscriber_whose_address_space_is_full_says_so_and_goes_on_when_it_has_room(
    coordinator, engine, trainer, digest, eventually
):
    receiver, sender = engine(coordinator.address, "e"), trainer(coordinator.address)
    sender.ask("publish", 0)
    assert receiver.takes(0)[0] == digest(0)
    with open(f"/proc/{receiver.pid}/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.prlimit(receiver.pid, resource.RLIMIT_AS)
    resource.prlimit(receiver.pid, resource.RLIMIT_AS, (used, hard))
    sender.ask("publish", 1)
    eventually(lambda: receiver.ask("health")[3] == "NoMemory")
    resource.prlimit(receiver.pid, resource.RLIMIT_AS, (hard, hard))
    sender.ask("publish", 2)
    assert receiver.takes(2)[0] == digest(2)


def test_a_publish_without_descriptors_is_no_memory_and_the_next_one_goes_through(publish_to, subscribe):
    publisher = publish_to(TENSORS, **TCP)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(dcs.NoMemory, match="Too many open files; free descriptors"):
            publisher.publish(0, TENSORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    publisher.publish(0, TENSORS)
    assert torch.equal(subscribe(TENSORS, **TCP).fetch(0, 10)["w"], TENSORS["w"])


def test_a_source_without_descriptors_serves_again_when_it_has_some(publish_to, subscribe):
    publisher = publish_to(TENSORS, **TCP)
    subscriber = subscribe(TENSORS, **TCP)
    publisher.publish(0, TENSORS)
    subscriber.fetch(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filling: list[socket.socket] = []
    here = (publisher.endpoint.host, publisher.endpoint.port)
    waiting = socket.socket()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 64, hard))
        with contextlib.suppress(OSError):  # too many open files
            while len(filling) < 10_000:
                filling.append(socket.socket())
        assert len(filling) < 10_000
        waiting.connect(here)  # cannot be accepted now
    finally:
        for sock in filling:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        waiting.close()
    late = subscribe(TENSORS, "late", **TCP)
    assert torch.equal(late.fetch(0, 10)["w"], TENSORS["w"])
    publisher.publish(1, TENSORS)
    assert subscriber.fetch(1, 10)


@pytest.mark.parametrize("lanes", [1, 2])
def test_lanes_that_get_no_thread_cost_an_attempt_and_not_the_subscriber(
    publish_to, subscribe, monkeypatch, lanes
):
    start, refused = threading.Thread.start, []

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "dcs-lane" and len(refused) < lanes:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    publisher = publish_to(TENSORS, chunk_bytes=16 << 10, **TCP)
    publisher.publish(0, TENSORS)
    assert torch.equal(subscribe(TENSORS, chunk_bytes=16 << 10, **TCP).fetch(0, 10)["w"], TENSORS["w"])
    assert len(refused) == lanes
