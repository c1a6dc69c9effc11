"""Members and their coordinator: refusals, layouts, leases, replays, noise."""

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import dcs
import numpy as np
import pytest
import torch
import zmq
from dcs.control.messages import (
    PROTOCOL,
    Announcement,
    Fenced,
    Join,
    Joined,
    Refused,
    Roster,
    RunState,
    decode_from_coordinator,
    decode_from_member,
    encode,
)

TENSORS = {"a": torch.zeros(3), "w": torch.zeros(2, 2)}
OTHER = {"a": torch.zeros(3), "w": torch.zeros(2, 2, dtype=torch.bfloat16)}


@pytest.fixture
def fake_coordinator() -> Iterator[tuple[str, zmq.Socket[bytes]]]:
    """An address, and the ROUTER socket that a test answers from."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield f"tcp://127.0.0.1:{port}", router


class Answering:
    """Answers the first join that arrives, on a thread of its own."""

    def __init__(self, router: zmq.Socket[bytes], answer: Callable[[bytes, Join], None]) -> None:
        self._router, self._answer = router, answer
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        assert self._router.poll(10_000)
        identity, *frames = self._router.recv_multipart()
        join = decode_from_member(frames)
        assert isinstance(join, Join)
        self._answer(identity, join)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def test_a_subscriber_with_another_layout_is_refused_when_it_joins(publish_to, subscribe):
    publish_to(TENSORS)
    with pytest.raises(dcs.LayoutMismatch, match="subscriber 'engine-0'") as caught:
        subscribe(OTHER)
    error = caught.value
    assert (error.tensor, error.got, error.expected) == ("w", "float32[2, 2]", "bfloat16[2, 2]")


def test_a_subscriber_that_was_there_first_is_refused_when_a_publisher_with_another_layout_joins(
    publish_to, subscribe
):
    subscriber = subscribe(OTHER)
    publisher = publish_to(TENSORS)
    assert publisher.publish(0, TENSORS).wait(5).acked == {}
    with pytest.raises(dcs.LayoutMismatch) as caught:
        subscriber.next(timeout=10)
    assert caught.value.tensor == "w"
    assert isinstance(subscriber.health().error, dcs.LayoutMismatch)


def test_publishing_other_tensors_than_the_layout_has_is_refused_before_anything_moves(publish_to, subscribe):
    publisher, subscriber = publish_to(TENSORS), subscribe(TENSORS)
    with pytest.raises(dcs.LayoutMismatch, match="'w'"):
        publisher.publish(0, {"a": torch.zeros(3), "w": torch.zeros(2, 3)})
    assert subscriber.health().announced is None
    publisher.publish(0, TENSORS)
    assert subscriber.next(timeout=10) is not None


def test_old_and_repeated_versions_are_refused(publish_to):
    publisher = publish_to(TENSORS)
    publisher.publish(5, TENSORS)
    for version in (5, 4, 0, -1):
        with pytest.raises(dcs.StaleVersion, match=f"version {version} is"):
            publisher.publish(version, TENSORS)
    assert publisher.publish(6, TENSORS).done
    assert publisher.publish(np.int64(7), TENSORS).done  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        publisher.publish("8", TENSORS)  # pyright: ignore[reportArgumentType]


def test_a_restarted_publisher_has_a_new_epoch_and_fences_the_old_one(publish_to, subscribe):
    old = publish_to(TENSORS)
    old.publish(4, TENSORS)
    subscribe(TENSORS, wires=("tcp",)).fetch(timeout=10)  # from now on versions are hashed as they are frozen
    old.publish(5, TENSORS)
    new = publish_to(TENSORS)
    assert (new.epoch, new.version) == (old.epoch + 1, 5)
    with pytest.raises(dcs.Evicted, match="replaced by a newer incarnation"):
        old.publish(6, TENSORS)
    with pytest.raises(dcs.StaleVersion, match="publish 6 or later"):
        new.publish(4, TENSORS)
    with pytest.raises(dcs.StaleVersion, match="with other weights"):
        new.publish(5, {"a": torch.ones(3), "w": torch.zeros(2, 2)})
    new.publish(5, TENSORS)
    staged = subscribe(TENSORS).next(timeout=10)
    assert staged is not None
    assert (staged.epoch, staged.version) == (new.epoch, 5)


def test_a_publish_between_the_end_of_a_membership_and_the_word_of_it_says_why(publish_to, monkeypatch):
    old = publish_to(TENSORS)
    old.publish(4, TENSORS)
    link, told, go_on = old._link, threading.Event(), threading.Event()
    receive = link._receive

    def later(message: object) -> None:
        if isinstance(message, Fenced):
            told.set()
            go_on.wait(20)
        receive(message)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(link, "_receive", later)
    publish_to(TENSORS)
    assert told.wait(10)
    try:
        with pytest.raises(dcs.Evicted, match="replaced by a newer incarnation"):
            old.publish(5, TENSORS)
    finally:
        go_on.set()


@pytest.mark.parametrize("other", [False, True])
def test_a_version_that_was_never_hashed_is_delivered_again_by_a_restarted_publisher(
    publish_to, subscribe, other
):
    old = publish_to(TENSORS)
    old.publish(5, TENSORS)
    reader = subscribe(TENSORS)
    first = reader.next(timeout=10)
    assert first is not None
    assert first.wire == "shm"
    first.ack()
    new = publish_to(TENSORS)
    weights = {"a": torch.ones(3), "w": torch.full((2, 2), 7.0)} if other else TENSORS
    ticket = new.publish(5, weights)  # nobody can tell whether it is the same
    again = reader.next(after=5, timeout=10)
    assert again is not None
    assert (again.epoch, again.version) == (new.epoch, 5)
    assert torch.equal(again.tensors["w"], weights["w"])
    again.ack()
    assert list(ticket.wait(10).acked) == ["engine-0"]
    assert reader.next(after=5, timeout=0.2) is None
    new.publish(6, TENSORS)
    newer = reader.next(after=5, timeout=10)
    assert newer is not None
    assert newer.version == 6


def test_a_newer_subscriber_of_the_same_name_fences_the_old_one(publish_to, subscribe):
    publisher = publish_to(TENSORS)
    old = subscribe(TENSORS)
    new = subscribe(TENSORS)
    ticket = publisher.publish(0, TENSORS)
    with pytest.raises(dcs.Evicted, match="'engine-0' of run 'r' was replaced"):
        old.next(timeout=10)
    new.fetch(timeout=10)
    assert list(ticket.wait(10).acked) == ["engine-0"]


def test_runs_of_one_coordinator_do_not_mix(publish_to, subscribe):
    publish_to(TENSORS, run="one").publish(1, TENSORS)
    publish_to(OTHER, run="two").publish(2, OTHER)
    one, two = subscribe(TENSORS, run="one"), subscribe(OTHER, run="two")
    assert one.fetch(timeout=10)["w"].dtype == torch.float32
    assert two.fetch(timeout=10)["w"].dtype == torch.bfloat16


def test_wrong_and_missing_tokens_are_refused():
    layout = dcs.layout.of(TENSORS)
    with dcs.Coordinator(token="secret") as guarded:
        for token in (None, "guess"):
            with pytest.raises(dcs.Unauthorized, match="token"):
                dcs.Subscriber(guarded.address, name="e", layout=layout, token=token)
            with pytest.raises(dcs.Unauthorized, match="token"):
                dcs.Publisher(guarded.address, layout=layout, token=token)
        with (
            dcs.Publisher(guarded.address, layout=layout, token="secret") as publisher,
            dcs.Subscriber(guarded.address, name="e", layout=layout, token="secret") as subscriber,
        ):
            publisher.publish(0, TENSORS)
            assert subscriber.fetch(timeout=10).keys() == TENSORS.keys()


def test_a_bind_off_loopback_demands_a_token(coordinator):
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(dcs.Unauthorized, match="not loopback"):
            dcs.Coordinator(host=host)
        with pytest.raises(dcs.Unauthorized, match="not loopback"):
            dcs.Publisher(coordinator.address, layout=dcs.layout.of(TENSORS), host=host)
    with pytest.raises(dcs.Unauthorized, match="empty token"):
        dcs.Coordinator(token="")
    with dcs.Coordinator(host="0.0.0.0", token="secret") as wide:
        assert wide.alive


def test_a_port_in_use_is_named(coordinator):
    port = int(coordinator.address.rpartition(":")[2])
    with pytest.raises(dcs.DcsError, match=f"127.0.0.1:{port}.*choose another port"):
        dcs.Coordinator(port=port)
    with pytest.raises(dcs.DcsError, match=f"127.0.0.1:{port}.*choose another port"):
        dcs.Publisher(coordinator.address, layout=dcs.layout.of(TENSORS), port=port)


def test_an_address_without_a_coordinator_is_named():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(dcs.CoordinatorLost, match=address):
            dcs.Subscriber(address, name="e", layout=dcs.layout.of(TENSORS), timeout=0.3)
    with pytest.raises(dcs.DcsError, match="no coordinator's address"):
        dcs.Subscriber("nonsense", name="e", layout=dcs.layout.of(TENSORS))


def test_a_member_of_another_protocol_version_is_refused_with_both_numbers(coordinator):
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(coordinator.address)
        dealer.send_multipart([struct.pack("<3sxH", b"dcs", PROTOCOL + 6), b"whatever it says"])
        assert dealer.poll(10_000)
        refused = decode_from_coordinator(dealer.recv_multipart())
        assert isinstance(refused, Refused)
        assert refused.code == "protocol"
        assert f"protocol {PROTOCOL + 6}, this coordinator speaks {PROTOCOL}" in refused.message


def test_a_coordinator_of_another_protocol_version_is_refused_with_both_numbers(fake_coordinator):
    address, router = fake_coordinator

    def answer(identity: bytes, join: Join) -> None:
        router.send_multipart([identity, struct.pack("<3sxH", b"dcs", PROTOCOL + 1), b"whatever it says"])

    words = f"protocol {PROTOCOL + 1}, this member speaks {PROTOCOL}"
    with Answering(router, answer), pytest.raises(dcs.ProtocolMismatch, match=words):
        dcs.Subscriber(address, name="e", layout=dcs.layout.of(TENSORS))


def test_random_bytes_at_the_coordinator_do_no_harm(coordinator, publish_to, subscribe):
    host, _, port = coordinator.address.removeprefix("tcp://").rpartition(":")
    publisher, subscriber = publish_to(TENSORS), subscribe(TENSORS)
    generator = torch.Generator().manual_seed(5)

    def noise(length: int) -> bytes:
        return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator).numpy().tobytes()

    for length in (1, 10, 64, 65, 5000):
        with socket.create_connection((host, int(port)), 10) as sock:
            sock.sendall(noise(length))
    header = encode(RunState("absent", None))[0]
    good = encode(Join(1, "subscriber", "r", "x", dcs.layout.of(TENSORS), None, None))[1]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(coordinator.address)
        for index in range(200):
            damaged = bytearray(good)
            damaged[index % len(good)] ^= 1 << (index % 8)
            dealer.send_multipart([header, bytes(damaged)])
            dealer.send_multipart([noise(1 + index % 40) for _ in range(1 + index % 4)])
            dealer.send_multipart([header, noise(index)])
        answers = 0
        while answers < 400 and dealer.poll(10_000):
            decode_from_coordinator(dealer.recv_multipart())
            answers += 1
        assert answers == 400
    publisher.publish(0, TENSORS)
    assert subscriber.fetch(timeout=10).keys() == TENSORS.keys()
    assert coordinator.alive


def test_a_replayed_announcement_of_an_older_version_is_ignored(fake_coordinator, eventually):
    address, router = fake_coordinator
    old, new = (Announcement("r", 2, version, (bytes(16),)) for version in (3, 5))

    def answer(identity: bytes, join: Join) -> None:
        joined = Joined(join.request, 7, 2, 60.0, 5, bytes(16), RunState("alive", new), Roster({}, {}))
        router.send_multipart([identity, *encode(joined)])
        router.send_multipart([identity, *encode(RunState("lost", old))])

    layout = dcs.layout.of(TENSORS)
    with Answering(router, answer), dcs.Subscriber(address, name="e", layout=layout) as subscriber:
        eventually(lambda: subscriber.health().publisher == "lost")
        assert subscriber.health().announced == 5


def test_a_closing_coordinator_is_noticed_at_once(stack):
    coordinator = stack.enter_context(dcs.Coordinator())
    layout = dcs.layout.of(TENSORS)
    publisher = stack.enter_context(dcs.Publisher(coordinator.address, layout=layout, timeout=1.0))
    subscriber = stack.enter_context(dcs.Subscriber(coordinator.address, name="e", layout=layout))
    ticket = publisher.publish(0, TENSORS)
    assert subscriber.next(timeout=10) is not None
    coordinator.close()
    coordinator.close()
    with pytest.raises(dcs.CoordinatorLost, match="has closed"):
        ticket.wait(4)
    with pytest.raises(dcs.CoordinatorLost):
        publisher.publish(1, TENSORS)


def test_a_lost_coordinator_is_no_error_for_next_but_for_health(stack, eventually):
    coordinator = stack.enter_context(dcs.Coordinator(lease_seconds=0.4))
    layout = dcs.layout.of(TENSORS)
    subscriber = stack.enter_context(dcs.Subscriber(coordinator.address, name="e", layout=layout))
    coordinator.close()
    eventually(lambda: subscriber.health().coordinator == "lost")
    assert subscriber.next(timeout=0.05) is None
    assert isinstance(subscriber.health().error, dcs.CoordinatorLost)
    port = int(coordinator.address.rpartition(":")[2])
    with dcs.Coordinator(port=port, lease_seconds=0.4) as again:  # members join it by themselves
        eventually(lambda: subscriber.health().coordinator == "connected", 20)
        with dcs.Publisher(again.address, layout=layout) as publisher:
            publisher.publish(0, TENSORS)
            assert subscriber.fetch(timeout=10).keys() == TENSORS.keys()


@pytest.mark.parametrize("name", ["", "x" * 300, 7, object()])
def test_a_name_that_cannot_be_one_fails_its_caller_at_once(coordinator, name):
    with pytest.raises(dcs.DcsError, match=r"name is .* 1 to 256 characters"):
        dcs.Subscriber(coordinator.address, name=name, layout=dcs.layout.of(TENSORS))


def test_ranks_that_name_no_session_are_refused(coordinator):
    with pytest.raises(dcs.DcsError, match="rank 0 of 2 needs a session"):
        dcs.Publisher(coordinator.address, layout=dcs.layout.of(TENSORS), world_size=2)


@pytest.mark.usefixtures("no_leak")
def test_50_cycles_leave_no_thread_and_no_descriptor():
    layout = dcs.layout.of(TENSORS)
    for cycle in range(50):
        with dcs.Coordinator() as coordinator:
            publisher = dcs.Publisher(coordinator.address, layout=layout)
            subscriber = dcs.Subscriber(coordinator.address, name="e", layout=layout)
            follower = subscriber.follow(lambda staged: None)
            publisher.publish(cycle, TENSORS).wait(10)
            with pytest.raises(dcs.DcsError):
                dcs.Subscriber(coordinator.address, name="e", layout=dcs.layout.of(OTHER))
            for member in (subscriber, publisher) if cycle % 2 else (publisher, subscriber):
                member.close()
                member.close()
            assert follower.version == cycle
        with pytest.raises(dcs.Closed):
            subscriber.next(timeout=1)
        with pytest.raises(dcs.Closed):
            publisher.publish(cycle + 1, TENSORS)


def test_an_idle_run_takes_next_to_no_cpu(publish_to, subscribe):
    publisher = publish_to(TENSORS)
    subscribers = [subscribe(TENSORS, name) for name in ("e", "f")]
    publisher.publish(0, TENSORS)
    for subscriber in subscribers:
        subscriber.fetch(timeout=10)
    before = os.times()
    assert subscribers[0].next(after=0, timeout=1.0) is None
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.1
