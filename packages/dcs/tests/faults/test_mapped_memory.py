"""Memory that other processes have mapped: never written while they may read it, bounded, and given back."""

import gc
import os

import dcs
import pytest
import torch
from dcs.control.messages import Source
from dcs.memory.shelf import MAX_ARENAS
from dcs.wire.connection import Connection
from dcs.wire.frames import Hello

SHM = {"wires": ["shm"]}


@pytest.fixture
def publisher(coordinator, stack, model):
    layout = dcs.layout.of(model(0))
    return stack.enter_context(
        dcs.Publisher(coordinator.address, run="r", layout=layout, wires=("shm",), supersede_after=0.2)
    )


@pytest.fixture(autouse=True)
def _before() -> None:
    """What other tests have left to the garbage collector is not counted."""
    _others.clear()
    _others.update(lent())


_others: set[int] = set()


def arenas() -> int:
    """How many arenas this test has open in this process, its own and mapped ones."""
    return len(lent() - _others)


def lent() -> set[int]:
    """The arenas that this process has open, its own and mapped ones."""
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            if "memfd:dcs" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(os.stat(f"/proc/self/fd/{number}").st_ino)
        except FileNotFoundError:
            continue  # the descriptor of the listing
    return found


def test_what_a_stopped_process_has_mapped_is_not_written_until_it_lets_go(
    coordinator, publisher, engine, subscribe, model, digest, eventually
):
    holder = engine(coordinator.address, "holder", {"hold": True}, **SHM)
    other = subscribe(model(0), "other", **SHM)
    publisher.publish(0, model(0))
    assert holder.takes(0)[:2] == [digest(0), "shm"]
    other.fetch(0)
    holder.stop()
    tickets = []
    for version in range(1, 8):  # meanwhile its lease lapses, and it is cut off
        tickets.append(publisher.publish(version, model(version)))
        assert digest(other.fetch(version)) == digest(version)
    gone = [ticket.wait(20).gone.get("holder", "") for ticket in tickets]
    assert any("no heartbeat" in reason for reason in gone)  # of those that were published before that
    publisher.publish(8, model(8))
    publisher.publish(9, model(9))
    assert publisher._shelf._owned <= MAX_ARENAS
    holder.go_on()
    assert holder.ask("check") == [digest(0)]  # nobody has written what it reads
    holder.say("ack")
    assert holder.takes(9)[:2] == [digest(9), "shm"]  # and it maps again
    assert holder.ask("check") == [digest(9)]
    holder.say("ack")
    other.fetch(9)
    for version in (10, 11, 12):
        ticket = publisher.publish(version, model(version))
        assert holder.takes(version)[0] == digest(version)
        holder.say("ack")
        other.fetch(version)
        ticket.wait(10)
    eventually(lambda: publisher._shelf._owned <= 3)
    assert int(holder.ask("census")[2]) <= MAX_ARENAS
    assert arenas() <= 3  # of the publisher; a subscriber of this process has mapped the same


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_mappers_leave_no_memory_behind(
    coordinator, publisher, engine, subscribe, model, digest, kills
):
    other = subscribe(model(0), "other", **SHM)
    version = 0
    for turn in range(kills):
        publisher.publish(version, model(version))
        doomed = engine(coordinator.address, f"doomed-{turn}", {"hold": True}, **SHM)
        assert doomed.takes(version)[:2] == [digest(version), "shm"]
        other.fetch(version)
        doomed.kill()
        for _ in range(2):
            version += 1
            publisher.publish(version, model(version))
            assert digest(other.fetch(version)) == digest(version)
        version += 1
    assert publisher._shelf._owned <= 3
    assert arenas() <= 3


def test_a_mapper_killed_with_a_version_in_its_hands_costs_nothing_in_200_versions(
    coordinator, publisher, engine, subscribe, model, digest
):
    weights = model(0)
    other = subscribe(weights, "other", **SHM)
    publisher.publish(0, model(0))
    doomed = engine(coordinator.address, "doomed", {"hold": True}, **SHM)
    assert doomed.takes(0)[:2] == [digest(0), "shm"]
    other.fetch(0)
    doomed.kill()
    memory, descriptors = [], []
    for version in range(1, 201):
        for tensor in weights.values():
            tensor.fill_(version)
        ticket = publisher.publish(version, weights)
        taken = other.fetch(version)
        assert all(torch.equal(taken[name], tensor) for name, tensor in weights.items())
        ticket.wait(20)
        if version % 50 == 0:
            memory.append(arenas())
            descriptors.append(len(os.listdir("/proc/self/fd")))
    assert publisher._shelf._owned <= 3
    assert max(memory) <= 3
    assert descriptors[-1] <= descriptors[0]


def test_readers_that_never_let_go_cost_neither_the_newest_version_nor_the_trainer(
    coordinator, publisher, engine, subscribe, model, digest, clock
):
    """More versions are held at once, by living processes, than there are arenas."""
    holders = []
    for version in range(MAX_ARENAS + 2):
        publisher.publish(version, model(version))
        holder = engine(coordinator.address, f"h{version}", {"hold": True}, **SHM)
        assert holder.takes(version)[0] == digest(version)
        holders.append(holder)
    clock()
    publisher.publish(99, model(99))
    assert clock() < 5
    assert publisher._shelf._owned <= MAX_ARENAS
    late = subscribe(model(0), "late", wires=("shm", "tcp"))
    assert digest(late.fetch(99)) == digest(99)
    for version, holder in enumerate(holders):
        assert holder.ask("check") == [digest(version)]
        holder.say("ack")
        assert holder.takes(99)[0] == digest(99)


def test_memory_is_lent_by_its_owner_only(publisher, subscribe, model):
    """Who has mapped a version gives chunks of it, and not the memory: its owner would not know."""
    mapper = subscribe(model(0), "mapper", wires=("shm", "tcp"))
    publisher.publish(0, model(0))
    held = mapper.next(timeout=10)
    assert held.wire == "shm"
    assert mapper._server is not None
    there = mapper._server.endpoint("127.0.0.1")
    source = Source(1, -1, "mapper", mapper.layout.fingerprint, there, True)
    copy = mapper._server.shelf.find(0)
    connection = Connection(source, unix=True)
    connection.greet(Hello("r", "thief", 99, mapper.layout.fingerprint, None, 4 << 20))
    with pytest.raises(Exception, match=r"^$") as refused:
        connection.map(0, copy.mark, lambda: None)
    assert type(refused.value).__name__ == "Superseded"
    connection.close()
    assert not copy.readers
    held.ack()


def test_a_mapper_whose_connection_was_cut_maps_the_next_version_again(
    publisher, subscribe, model, eventually
):
    mapper = subscribe(model(0), "mapper", wires=("shm", "tcp"))
    publisher.publish(0, model(0))
    staged = mapper.next(timeout=10)
    assert staged.wire == "shm"
    staged.ack()
    publisher._server.drop(mapper._member)
    eventually(lambda: not any(connection.open for connection in publisher._server._connections))
    publisher.publish(1, model(1))
    staged = mapper.next(after=0, timeout=10)
    assert staged.wire == "shm"
    staged.ack()


def test_nobody_waits_for_a_relay_that_has_let_go_of_what_it_had_mapped(
    coordinator, stack, subscribe, model, digest, clock
):
    layout = dcs.layout.of(model(0))
    publisher = stack.enter_context(dcs.Publisher(coordinator.address, run="r", layout=layout))
    mapper = subscribe(model(0), "mapper")  # the relay of this machine
    other = subscribe(model(0), "other", wires=("tcp",))
    clock()
    for version in range(5):
        publisher.publish(version, model(version))
        mapper.fetch(version)
        assert digest(other.fetch(version)) == digest(version)
    assert clock() < 4  # it would be two seconds each
