"""Very many at once: connections that say nothing, and subscribers of which half die."""

import os
import resource
import socket
from contextlib import suppress

import dcs
import psutil
import pytest
import torch
from dcs import replicas
from dcs.control import coordinator as coordinators

TENSORS = {"w": torch.arange(50_000, dtype=torch.float32)}


@pytest.fixture
def many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["coordinator", "publisher", "subscriber", "keeper"])
def test_those_that_connect_and_say_little_shut_nobody_out(
    publish_to, subscribe, coordinator, eventually, many_descriptors, where, count
):
    publisher, subscriber = publish_to(TENSORS, wires=("tcp",)), subscribe(TENSORS, wires=("tcp",))
    publisher.publish(0, TENSORS)
    subscriber.fetch(0)
    with replicas.Keeper() as keeper, replicas.Replicas([keeper.address], "n", copies=1) as kept:
        port = {
            "coordinator": int(coordinator.address.rpartition(":")[2]),
            "publisher": publisher.endpoint.port,
            "subscriber": subscriber._server.port,
            "keeper": int(keeper.address.rpartition(":")[2]),
        }[where]
        before = psutil.Process().num_fds()
        silent = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(count)]
        for sock in silent[::2]:
            sock.send({"coordinator": b"\xff", "keeper": b"dcsk"}.get(where, b"dcsw"))
        late = subscribe(TENSORS, "late", wires=("tcp",))
        assert torch.equal(late.fetch(0, 20)["w"], TENSORS["w"])
        ticket = publisher.publish(1, TENSORS)
        for each in (subscriber, late):
            assert torch.equal(each.fetch(1, 20)["w"], TENSORS["w"])
        assert set(ticket.wait(20).acked) == {"engine-0", "late"}
        kept.save(1, TENSORS).wait(20)
        for sock in silent:
            sock.close()
        late.close()
        eventually(lambda: psutil.Process().num_fds() <= before + count // 2, 30)


def test_who_does_not_shake_hands_with_the_coordinator_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(coordinators, "_HANDSHAKE_MILLISECONDS", 200)
    with dcs.Coordinator() as coordinator:
        port = int(coordinator.address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            sock.settimeout(10)
            heard = b""
            with suppress(ConnectionResetError):
                while more := sock.recv(100):
                    heard += more
            assert len(heard) <= 64  # its half of the greeting, and then the end


def test_a_closed_keeper_has_let_go_of_what_ranks_have_lent_it(no_leak):
    with replicas.Keeper() as keeper, replicas.Replicas([keeper.address], "n", copies=1) as kept:
        for step in range(3):
            kept.save(step, TENSORS).wait(10)
        kept.restore(10)


def test_a_keeper_without_descriptors_says_so_and_takes_the_next_step():
    with replicas.serve_keeper() as keeper, replicas.Replicas([keeper.address], "n", copies=1) as kept:
        kept.save(0, TENSORS).wait(10)
        _, hard = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
        open_now = max(int(name) for name in os.listdir(f"/proc/{keeper.pid}/fd")) + 1
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (open_now, hard))
        outcomes = []
        for step in (1, 2, 3):
            try:
                kept.save(step, {"w": torch.zeros(3_000_000)}).wait(10)
                outcomes.append("")
            except dcs.DcsError as error:
                outcomes.append(str(error))
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert any("no descriptor left" in outcome for outcome in outcomes), outcomes
        saved = kept.save(9, TENSORS).wait(10)
        assert saved.blocked_seconds < 5  # what was not taken is memory for the next step
        found = kept.restore(10)
        assert found is not None
        assert found[0] == 9


@pytest.mark.slow
def test_a_hundred_engines_are_served_and_half_of_them_may_die_at_once(engine, trainer, digest, payload):
    with dcs.serve() as running:
        process = psutil.Process(running.pid)
        engines = [engine(running.address, f"e{number}", wires=["shm", "tcp"]) for number in range(100)]
        sender = trainer(running.address, wires=["shm", "tcp"])
        for version in range(3):
            sender.ask("publish", version)
            assert {each.takes(version)[0] for each in engines} == {digest(version)}
        for doomed in engines[:50]:
            doomed.kill()
        for version in range(3, 6):
            sender.ask("publish", version)
            assert {each.takes(version)[0] for each in engines[50:]} == {digest(version)}
        assert process.num_fds() < 150
        assert sum(process.cpu_times()[:2]) < 20
        assert int(sender.ask("sent")[0]) <= 6 * payload
