"""Where versions come from: relays, peers that have them, memory of this machine, differences."""

import threading
import time

import dcs
import pytest
import torch


def model(version: int, floats: int = 500_000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "a": torch.randn(floats // 2, generator=generator),
        "b": torch.randn(floats // 2, generator=generator),
    }


PAYLOAD = sum(tensor.nbytes for tensor in model(0).values())


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def take(subscriber: dcs.Subscriber, version: int, seconds: float = 20) -> dcs.Staged:
    staged = subscriber.next(after=version - 1, timeout=seconds)
    assert staged is not None, subscriber.health()
    assert_same(staged.tensors, model(version))
    staged.ack()
    return staged


TCP = {"wires": ("tcp",), "chunk_bytes": 64 << 10}


@pytest.mark.parametrize("count", [2, 4, 10])
def test_relays_keep_what_the_trainer_sends_at_one_payload(publish_to, subscribe, count):
    publisher = publish_to(model(0), **TCP)
    subscribers = [subscribe(model(0), f"engine-{index}", **TCP) for index in range(count)]
    for version in range(3):
        before = publisher.sent
        ticket = publisher.publish(version, model(version))
        staged = [take(subscriber, version) for subscriber in subscribers]
        assert publisher.sent - before <= 1.05 * PAYLOAD
        assert sum(one.from_peers for one in staged) >= (count - 1) * PAYLOAD
        assert len(ticket.wait(10).acked) == count


def test_a_late_joiner_with_two_live_peers_takes_nothing_from_the_trainer(publish_to, subscribe):
    publisher = publish_to(model(0), **TCP)
    peers = [subscribe(model(0), f"engine-{index}", **TCP) for index in range(2)]
    publisher.publish(0, model(0))
    for peer in peers:
        take(peer, 0)
    sent, given = publisher.sent, [peer._server.sent for peer in peers]
    late = [subscribe(model(0), f"late-{index}", **TCP) for index in range(2)]
    for subscriber in late:
        staged = take(subscriber, 0)
        assert (staged.from_ranks, staged.from_peers) == (0, PAYLOAD)
    assert publisher.sent == sent
    assert all(peer._server.sent > before for peer, before in zip(peers, given, strict=True))


def test_late_joiners_are_served_by_peers_when_the_publisher_has_gone(coordinator, publish_to, subscribe):
    publisher = publish_to(model(0), **TCP)
    first = subscribe(model(0), "engine-0", **TCP)
    second = subscribe(model(0), "engine-1", **TCP)
    publisher.publish(0, model(0))
    for subscriber in (first, second):
        take(subscriber, 0)
    first.close()
    late = subscribe(model(0), "late", **TCP)
    assert take(late, 0).from_ranks == 0


def test_on_one_machine_memory_is_mapped_and_nothing_is_sent(publish_to, subscribe):
    publisher = publish_to(model(0))
    subscribers = [subscribe(model(0), f"engine-{index}") for index in range(4)]
    for version in range(6):
        ticket = publisher.publish(version, model(version))
        for subscriber in subscribers:
            assert take(subscriber, version).wire == "shm"
        ticket.wait(10)
    assert publisher.sent == 0
    # Two buffers at the publisher's, none at the receivers'.
    assert publisher._shelf._owned == 2
    assert [subscriber._intake.shelf._owned for subscriber in subscribers] == [0] * 4


def test_a_mapped_version_that_is_held_is_not_written_by_later_ones(publish_to, subscribe):
    publisher = publish_to(model(0), supersede_after=0.05)
    holder, other = subscribe(model(0), "holder"), subscribe(model(0), "other")
    publisher.publish(0, model(0))
    held = holder.next(timeout=10)
    assert held is not None
    assert held.wire == "shm"
    for version in range(1, 6):
        publisher.publish(version, model(version))
        take(other, version)
        assert_same(held.tensors, model(0))
    assert publisher._shelf._owned <= 3
    held.ack()
    take(holder, 5)
    for version in range(6, 9):
        publisher.publish(version, model(version))
        take(other, version)
        take(holder, version)
    assert publisher._shelf._owned <= 3


def test_one_receiver_of_a_machine_maps_what_another_one_has_fetched(publish_to, subscribe):
    publisher = publish_to(model(0), **TCP)  # does not let its memory be mapped, as one of another machine
    head, *others = [subscribe(model(0), f"engine-{index}") for index in range(4)]
    for version in range(4):
        publisher.publish(version, model(version))
        staged = [take(subscriber, version) for subscriber in (head, *others)]
        assert [one.wire for one in staged] == ["tcp", "shm", "shm", "shm"]
    assert publisher.sent == 4 * PAYLOAD


def stepped(tensors: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """The next version: one weight in a hundred moves to the next representable value."""
    generator = torch.Generator().manual_seed(step)
    result = {}
    for name, tensor in tensors.items():
        bits = tensor.clone().view(torch.int16)
        bits += (torch.rand(bits.shape, generator=generator) < 0.012).to(torch.int16)
        result[name] = bits.view(torch.bfloat16)
    return result


def test_differences_are_exact_over_many_steps_and_small(publish_to, subscribe):
    tensors = {"a": torch.randn(300_000).bfloat16(), "b": torch.randn(200_000).bfloat16()}
    payload = 2 * 500_000
    publisher = publish_to(tensors, wires=("tcp",))
    receiver = subscribe(tensors, "engine-0", wires=("tcp",), delta=True)
    relayed = subscribe(tensors, "engine-1", wires=("tcp",), delta=True)
    publisher.publish(0, tensors)
    for version in range(25):
        for subscriber in (receiver, relayed):
            staged = subscriber.next(after=version - 1, timeout=10)
            assert staged is not None
            assert_same(staged.tensors, tensors)
            if version:
                assert staged.wire == "tcp+delta"
                assert staged.from_ranks + staged.from_peers < payload / 40
            staged.ack()
        tensors = stepped(tensors, version)
        publisher.publish(version + 1, tensors)
    assert publisher.sent < 1.7 * payload


def test_a_receiver_without_the_base_gets_the_version_whole(publish_to, subscribe):
    tensors = {"a": torch.randn(300_000).bfloat16()}
    publisher = publish_to(tensors, wires=("tcp",))
    receiver = subscribe(tensors, wires=("tcp",), delta=True)
    publisher.publish(0, tensors)
    held = receiver.next(timeout=10)
    assert held is not None
    for version in (1, 2, 3, 4):  # the base, version 0, is not held by the publisher any more
        tensors = stepped(tensors, version)
        publisher.publish(version, tensors)
    held.ack()
    staged = receiver.next(after=3, timeout=10)
    assert staged is not None
    assert_same(staged.tensors, tensors)


def test_a_base_that_is_not_the_sources_is_noticed_and_the_version_sent_whole(publish_to, subscribe):
    tensors = {"a": torch.randn(300_000).bfloat16()}
    publisher = publish_to(tensors, wires=("tcp",))
    receiver = subscribe(tensors, wires=("tcp",), delta=True)
    publisher.publish(0, tensors)
    receiver.fetch(timeout=10)
    copy = receiver._intake.shelf.held[0]
    copy.hashes[0] = 12345  # as if another publisher had sent this version 0
    publisher.publish(1, stepped(tensors, 1))
    staged = receiver.next(after=0, timeout=10)
    assert staged is not None
    assert staged.wire == "tcp"
    assert_same(staged.tensors, stepped(tensors, 1))


def test_a_version_that_has_little_in_common_is_sent_whole(publish_to, subscribe):
    publisher = publish_to(model(0), **TCP)
    receiver = subscribe(model(0), delta=True, **TCP)
    for version in range(3):
        publisher.publish(version, model(version))
        assert take(receiver, version).wire == "tcp"


def test_the_ranks_of_an_engine_commit_the_same_versions(publish_to, subscribe):
    publisher = publish_to(model(0), **TCP)
    ranks = [
        subscribe(model(0), f"engine-0.{rank}", group="engine-0", group_size=2, **TCP) for rank in range(1)
    ]
    publisher.publish(0, model(0))
    assert ranks[0].next(timeout=0.3) is None  # its fellow has not joined
    ranks.append(subscribe(model(0), "engine-0.1", group="engine-0", group_size=2, **TCP))
    seen: list[list[int]] = [[], []]

    def follow(rank: int) -> None:
        version = -1
        while version < 30:
            staged = ranks[rank].next(after=version, timeout=20)
            assert staged is not None, ranks[rank].health()
            assert_same(staged.tensors, model(staged.version))
            version = staged.version
            seen[rank].append(version)
            staged.ack()

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for version in range(1, 31):
        publisher.publish(version, model(version))
    for thread in threads:
        thread.join(60)
    assert seen[0] == seen[1]
    assert seen[0][-1] == 30


def test_the_ranks_of_an_engine_meet_though_versions_come_faster_than_one_takes_them(publish_to, subscribe):
    publisher = publish_to(model(0), supersede_after=0.05, **TCP)
    fast = subscribe(model(0), "fast", group="g", group_size=2, **TCP)
    slow = subscribe(model(0), "slow", group="g", group_size=2, **TCP)
    plain = slow._intake._puller.attempt
    busy = threading.Event()

    def late(*arguments):
        busy.wait(0.15)  # as long as a transfer takes there
        return plain(*arguments)

    slow._intake._puller.attempt = late
    stop, seen = threading.Event(), [[], []]

    def follow(rank: int, subscriber: dcs.Subscriber) -> None:
        version = -1
        while not stop.is_set():
            staged = subscriber.next(after=version, timeout=0.5)
            if staged is not None:
                version = staged.version
                assert_same(staged.tensors, model(version))
                seen[rank].append(version)
                staged.ack()

    threads = [threading.Thread(target=follow, args=pair) for pair in enumerate((fast, slow))]
    for thread in threads:
        thread.start()
    version, deadline = 0, time.monotonic() + 30
    while min(map(len, seen)) < 8 and time.monotonic() < deadline:
        publisher.publish(version, model(version))
        version += 1
        busy.wait(0.05)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert min(map(len, seen)) >= 8
    assert seen[0][: len(seen[1])] == seen[1][: len(seen[0])]


def test_a_version_that_is_waited_for_is_given_out_however_fast_others_come(publish_to, subscribe):
    publisher = publish_to(model(0), **TCP)
    subscriber = subscribe(model(0), **TCP)
    stop = threading.Event()

    def publish() -> None:
        version = 0
        while not stop.is_set():
            publisher.publish(version, model(0))
            version += 1

    thread = threading.Thread(target=publish)
    thread.start()
    version = -1
    for _ in range(20):
        staged = subscriber.next(after=version, timeout=10)
        assert staged is not None
        version = staged.version
        staged.ack()
    stop.set()
    thread.join(10)


def test_what_is_about_to_be_overwritten_is_given_to_nobody(publish_to, subscribe, monkeypatch):
    publisher = publish_to(model(0), **TCP)
    subscriber = subscribe(model(0), **TCP)
    publisher.publish(0, model(0))
    held = subscriber.next(timeout=10)
    assert held is not None
    publisher.publish(1, model(1))
    asked, go_on = threading.Event(), threading.Event()
    plain = subscriber._intake.shelf.reserve

    def slow(*arguments):
        asked.set()
        go_on.wait(10)
        return plain(*arguments)

    while subscriber.health().staged != 1:
        go_on.wait(0.01)
    monkeypatch.setattr(subscriber._intake.shelf, "reserve", slow)
    publisher.publish(2, model(2))
    assert asked.wait(10)  # version 1 is being taken for version 2
    held.ack()
    assert subscriber.next(after=0, timeout=0.1) is None
    go_on.set()
    take(subscriber, 2)


def test_a_group_is_of_one_size_and_says_whom_it_waits_for(publish_to, subscribe, eventually):
    publisher = publish_to(model(0))
    first = subscribe(model(0), "g0", group="g", group_size=2)
    with pytest.raises(dcs.DcsError, match=r"group 'g' the size 3, and 1 others are in it, with sizes \[2\]"):
        subscribe(model(0), "g1", group="g", group_size=3)
    publisher.publish(0, model(0))
    eventually(lambda: "waits until all ranks of group 'g'" in str(first.health().error))
    subscribe(model(0), "g1", group="g", group_size=2)
    with pytest.raises(dcs.DcsError, match="2 others are in it"):
        subscribe(model(0), "g2", group="g", group_size=2)
    take(first, 0)
    assert first.health().error is None


def test_a_peer_that_has_let_go_of_a_version_says_so_at_once(publish_to, subscribe):
    publisher = publish_to(model(0))
    maps, pulls = subscribe(model(0), "maps"), subscribe(model(0), "pulls", **TCP)
    maps._server.patience = 100.0  # what it does not say would be waited for so long
    maps.follow(lambda staged: None)
    for version in range(6):
        ticket = publisher.publish(version, model(version))
        take(pulls, version)
        assert len(ticket.wait(10).acked) == 2


def test_progress_is_told(publish_to, subscribe):
    told: list[tuple[int, int, int]] = []
    publisher = publish_to(model(0), **TCP)
    subscriber = subscribe(
        model(0), progress=lambda done, total, version: told.append((done, total, version)), **TCP
    )
    publisher.publish(4, model(4))
    take(subscriber, 4)
    assert told[-1] == (PAYLOAD, PAYLOAD, 4)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wires": ("rdma",)}, "rdma.*name one or more of shm, tcp"),
        ({"wires": ()}, "name one or more"),
        ({"wires": "tcp"}, "in a list"),
        ({"streams": 0}, "streams is 0"),
        ({"run": ""}, "run is ''"),
        ({"collective": "mpi"}, "collective is 'mpi'"),
        ({"collective": "gloo", "collective_seconds": 0}, "collective_seconds is 0"),
        ({"group_size": 2}, "group_size is 2"),
        ({"group": "g"}, "group_size is 1"),
        ({"port": 80000}, "port 80000"),
        ({"device": "gpu:0"}, "device is 'gpu:0'"),
        ({"layout": torch.nn.Linear(2, 2)}, "layout is a Linear"),
        ({"chunk_bytes": 1}, "chunk_bytes is 1"),
        ({"host": "0.0.0.0"}, "without a token"),
        ({"host": "0.0.0.0", "token": "t"}, "give advertise="),
    ],
)
def test_options_that_make_no_sense_are_refused(coordinator, options, words):
    with pytest.raises(dcs.DcsError, match=words):
        dcs.Subscriber(
            coordinator.address, **({"run": "r", "name": "e", "layout": dcs.layout.of(model(0))} | options)
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wires": ("rdma",)}, "name one or more of shm, tcp"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"rank": 0, "world_size": 2}, "needs a session"),
        ({"rank": 0, "world_size": 2, "session": "s", "collective": "gloo"}, "for a single rank"),
        ({"chunk_bytes": 1}, "chunk_bytes is 1"),
    ],
)
def test_options_of_a_publisher_that_make_no_sense_are_refused(publish_to, options, words):
    with pytest.raises(dcs.DcsError, match=words):
        publish_to(model(0), **options)
