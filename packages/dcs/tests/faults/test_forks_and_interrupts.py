"""A process that forks, and one that Ctrl-C reaches at any moment: both go on."""

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import dcs
import psutil
import pytest
import torch
from dcs import replicas
from dcs.appliers import StateDictApplier
from dcs.introspection import IntrospectionServer

TENSORS = {"w": torch.zeros(1000)}


def test_a_forked_child_takes_nothing_from_its_parent(stack, eventually):
    """It leaves every context that its parent has open, as `sys.exit` does, and may use none of them."""
    running = stack.enter_context(dcs.serve())
    coordinator = stack.enter_context(dcs.Coordinator())
    http = stack.enter_context(IntrospectionServer(coordinator))
    keeper = stack.enter_context(replicas.Keeper())
    apart = stack.enter_context(replicas.serve_keeper())
    kept = stack.enter_context(replicas.Replicas([keeper.address], "n", copies=1))
    layout = dcs.layout.of(TENSORS)
    publisher = stack.enter_context(dcs.Publisher(running.address, layout=layout))
    subscriber = stack.enter_context(dcs.Subscriber(running.address, name="e", layout=layout))
    publisher.publish(0, TENSORS)
    staged = subscriber.next(timeout=10)
    assert staged is not None
    child = os.fork()
    if child == 0:
        uses = [
            lambda: publisher.publish(1, TENSORS),
            subscriber.next,
            subscriber.fetch,
            subscriber.health,
            lambda: subscriber.follow(print),
            staged.ack,
            lambda: kept.save(1, TENSORS),
            kept.restore,
            kept.newest,
        ]
        for use in uses:
            with pytest.raises(dcs.DcsError, match="to process"):
                use()
        stack.close()
        os._exit(0)
    eventually(lambda: os.waitpid(child, os.WNOHANG)[1] == 0 and not psutil.pid_exists(child), 30)
    process = psutil.Process()
    before = sum(process.cpu_times()[:2])
    threading.Event().wait(0.5)
    assert sum(process.cpu_times()[:2]) - before < 0.3  # nobody turns round and round
    staged.ack()
    ticket = publisher.publish(1, TENSORS)
    subscriber.fetch(1)
    assert list(ticket.wait(10).acked) == ["e"]
    kept.save(1, TENSORS).wait(10)
    assert apart.alive
    assert coordinator.alive
    assert http.port
    os.kill(running.pid, signal.SIGKILL)
    eventually(lambda: running.restarts == 1, 30)  # who watches it still does
    publisher.publish(2, TENSORS)
    subscriber.fetch(2)


def lent() -> int:
    """How many arenas this process has open."""
    gc.collect()
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:dcs" in os.readlink(entry):
                found.add(entry.stat().st_ino)
        except FileNotFoundError:
            continue  # the descriptor of the listing
    return len(found)


@pytest.mark.parametrize("times", [150, pytest.param(1500, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_moment_of_publish_next_and_wait_costs_no_version(
    publish_to, subscribe, monkeypatch, times
):
    """Whatever was interrupted is called again: each version comes, and nothing stays locked or lent."""
    ours, dice, lent_before = str(Path(dcs.__file__).parent), random.Random(times), lent()

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != __file__:
            if frame.f_code.co_filename.startswith(ours):  # not in what this test does around the calls
                raise KeyboardInterrupt
            frame = frame.f_back

    publisher, subscriber = publish_to(model(0)), subscribe(model(0))
    other = subscribe(model(0), "other", wires=("tcp",))
    follower = other.follow(lambda staged: None)
    before, interrupted, last = signal.signal(signal.SIGALRM, interrupt), 0, -1
    try:
        for version in range(times):
            weights, staged = model(version), None
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.random() * 0.004 + 1e-5)
                ticket = publisher.publish(version, weights)
                staged = subscriber.next(after=last, timeout=5)
                if staged is not None:
                    staged.ack()
                ticket.wait(10)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                publisher.publish(version, weights)
            except dcs.StaleVersion:
                assert publisher.version == version  # it was through
            if staged is not None:
                staged.ack()
                last = staged.version
            if last < version:
                again = subscriber.next(after=last, timeout=10)
                assert again is not None, (version, subscriber.health())
                assert again.version == float(again.tensors["w"].max()) == float(again.tensors["w"].min())
                again.ack()
                last = again.version
        publisher.publish(times, model(times))
        assert follower.wait_for(times, 20) == times
        assert float(subscriber.fetch(times, 20)["w"][0]) == times
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > times // 2
    assert torch.is_grad_enabled()
    assert publisher._shelf._owned <= 3
    assert lent() <= lent_before + 8  # three of the publisher, and as many of those that take it


def model(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100_000,), float(version))}


def test_nothing_turns_gradients_off_so_that_an_interrupt_cannot_leave_them_off(
    publish_to, subscribe, stack, monkeypatch
):
    """What turns them on again is Python, which Ctrl-C may end at its first instruction."""
    keeper = stack.enter_context(replicas.Keeper())
    kept = stack.enter_context(replicas.Replicas([keeper.address], "n", copies=1))
    layer, engine = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
    weights = {**dict(layer.named_parameters()), "weight": layer.weight.t()}  # one not contiguous
    applier = StateDictApplier(engine, dtype=torch.float16)
    half = {name: tensor.half() for name, tensor in weights.items()}
    publisher, subscriber = publish_to(half), subscribe(half, wires=("tcp",))
    monkeypatch.setattr(torch._C, "_set_grad_enabled", lambda enabled: pytest.fail(f"set to {enabled}"))
    for version in range(2):
        publisher.publish(version, weights)
        staged = subscriber.next(after=version - 1, timeout=10)
        assert staged is not None
        applier(staged)
        staged.ack()
        kept.save(version, weights).wait(10)
    assert engine.weight.requires_grad
    assert torch.equal(engine.weight, layer.weight.t().half().float())
    restored = kept.restore(10)
    assert restored is not None
    assert torch.equal(restored[1]["weight"], layer.weight.t())


@pytest.mark.parametrize("step", ["_intake.settle", "_link.report"])
def test_an_ack_that_was_interrupted_is_said_again(publish_to, subscribe, monkeypatch, step):
    publisher, subscriber = publish_to(model(0)), subscribe(model(0))
    part, name = step.split(".")

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for version in range(2):
        ticket = publisher.publish(version, model(version))
        staged = subscriber.next(after=version - 1, timeout=10)
        assert staged is not None
        with monkeypatch.context() as patched:
            patched.setattr(getattr(subscriber, part), name, stop)
            with pytest.raises(KeyboardInterrupt):
                staged.ack()
        staged.ack()
        staged.ack()
        assert list(ticket.wait(10).acked) == ["engine-0"]


def test_giving_a_version_back_twice_does_not_take_it_from_who_has_it_then(publish_to, subscribe):
    publisher, subscriber = publish_to(model(0)), subscribe(model(0))
    publisher.publish(0, model(0))
    first = subscriber.next(timeout=10)
    assert first is not None
    first.release()
    again = subscriber.next(timeout=10)
    assert again is not None
    first.release()
    with pytest.raises(dcs.Unacknowledged):
        subscriber.next(timeout=10)
    again.ack()


def test_an_interrupted_publish_is_the_same_version_or_none(publish_to, subscribe, monkeypatch):
    publisher, subscriber = publish_to(model(0)), subscribe(model(0))
    announce = publisher._link.announce

    def heard(*arguments, **options):
        announce(*arguments, **options)
        raise KeyboardInterrupt

    def unheard(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(publisher._link, "announce", heard)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(0, model(0))
    assert float(subscriber.fetch(0, 10)["w"][0]) == 0  # the coordinator has it, so it is served
    with pytest.raises(dcs.StaleVersion, match="exists with other weights"):
        publisher.publish(0, model(7))
    assert list(publisher.publish(0, model(0)).wait(10).acked) == ["engine-0"]
    with monkeypatch.context() as patched:
        patched.setattr(publisher._link, "announce", unheard)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(1, model(1))
    publisher.publish(1, model(8))  # nobody has heard of the first
    assert float(subscriber.fetch(1, 10)["w"][0]) == 8


def test_the_time_of_day_may_be_anything(monkeypatch):
    """It jumps by hours, both ways, at every look; who waits or counts leases looks at another clock."""
    true, looks = time.time, [0]

    def jumping() -> float:
        looks[0] += 1
        return true() + random.Random(looks[0]).uniform(-9e4, 9e4)

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    layout = dcs.layout.of(TENSORS)
    port = 0
    with replicas.Keeper() as keeper, replicas.Replicas([keeper.address], "n", copies=1) as kept:
        with dcs.Coordinator(lease_seconds=1.0) as first:
            port = int(first.address.rpartition(":")[2])
            publisher = dcs.Publisher(first.address, layout=layout)
            subscriber = dcs.Subscriber(first.address, name="e", layout=layout)
            for version in range(5):
                ticket = publisher.publish(version, TENSORS)
                subscriber.fetch(version)
                assert list(ticket.wait(10).acked) == ["e"]
                kept.save(version, TENSORS).wait(10)
        with dcs.Coordinator(port=port, lease_seconds=1.0) as second:
            for version in range(5, 10):
                ticket = publisher.publish(version, TENSORS)
                subscriber.fetch(version)
                assert set(ticket.wait(10).acked) <= {"e"}  # not before it has joined again, too
            assert second.snapshot().counters.evictions == 0
        subscriber.close()
        publisher.close()
        found = kept.restore(10)
        assert found is not None
        assert found[0] == 4
    with replicas.Keeper() as keeper:
        for start in range(5):  # each start of a run takes over from the one before it, whatever the time
            with replicas.Replicas([keeper.address], "n", copies=1) as kept:
                kept.save(start, TENSORS).wait(10)
    assert looks[0] > 0
