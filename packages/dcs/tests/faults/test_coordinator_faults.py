"""A coordinator that dies around a commit; and messages lost, doubled, out of order, or said again."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import dcs
import pytest
import torch
import zmq
from dcs.control.messages import Heartbeat, decode_from_member

LEASE_SECONDS = 1.0


class Post:
    """Stands between members and the coordinator, and delivers what they say to each other as it likes.

    Args:
        address: the coordinator's.
        upward, downward: get the frames of each message from a member, or to one, and return those to deliver
            now: none, or one or more messages.

    Attributes:
        address: for members.
    """

    def __init__(self, address: str, upward: Callable, downward: Callable) -> None:
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._upstream = address
        self._rules = upward, downward
        self._backs: dict[bytes, zmq.Socket] = {}
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._context.destroy(linger=0)
        os.close(self._stop)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        upward, downward = self._rules
        while True:
            ready = [socket for socket, _ in poller.poll()]
            if self._stop in ready:
                return
            if self._front in ready:
                identity, *frames = self._front.recv_multipart()
                back = self._backs.get(identity)
                if back is None:
                    back = self._backs[identity] = self._context.socket(zmq.DEALER)
                    back.identity = identity
                    back.connect(self._upstream)
                    poller.register(back, zmq.POLLIN)
                for message in upward(identity, frames):
                    back.send_multipart(message)
            for identity, back in list(self._backs.items()):
                if back in ready:
                    for message in downward(identity, back.recv_multipart()):
                        self._front.send_multipart([identity, *message])


@pytest.fixture
def post(coordinator: dcs.Coordinator) -> Iterator[Callable[..., Post]]:
    opened: list[Post] = []

    def make(upward: Callable = lambda _, frames: [frames], downward: Callable = lambda _, frames: [frames]):
        opened.append(Post(coordinator.address, upward, downward))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def members(stack, address: str, model) -> tuple[dcs.Publisher, dcs.Subscriber]:
    layout = dcs.layout.of(model(0))
    subscriber = dcs.Subscriber(address, "r", name="e", layout=layout)
    publisher = dcs.Publisher(address, "r", layout=layout)
    return stack.enter_context(publisher), stack.enter_context(subscriber)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_messages_twice_out_of_order_and_told_again_change_nothing(post, stack, model, digest, seed):
    """Each message may be doubled, held back until after the next one, or be followed by an old one."""
    dice = random.Random(seed)
    kept: dict[tuple[bytes, bool], list] = {}
    counts = {"doubled": 0, "late": 0, "again": 0}

    def unruly(up: bool) -> Callable:
        held: dict[bytes, list] = {}

        def deliver(identity: bytes, frames: list) -> list:
            past = kept.setdefault((identity, up), [])
            out = [frames, *held.pop(identity, [])]
            match dice.randrange(5):
                case 0:
                    counts["doubled"] += 1
                    out.append(frames)
                case 1 if len(out) == 1 and len(past) > 3:  # the first ones are not held back for ever
                    counts["late"] += 1
                    held[identity] = out
                    out = []
                case 2 if past:
                    counts["again"] += 1
                    out.append(dice.choice(past))
            past.append(frames)
            return out

        return deliver

    publisher, subscriber = members(stack, post(unruly(True), unruly(False)).address, model)
    seen, last = [], -1
    for version in range(25):
        publisher.publish(version, model(version))
        if version % 5 == 4:
            while last < version:
                staged = subscriber.next(after=last, timeout=20)
                assert staged is not None, subscriber.health()
                assert digest(staged.tensors) == digest(staged.version)
                last = staged.version
                seen.append(last)
                staged.ack()
    assert seen == sorted(set(seen))
    assert seen[-1] == 24
    assert min(counts.values()) > 0, counts
    ticket = publisher.publish(25, model(25))
    assert digest(subscriber.fetch(25)) == digest(25)
    assert list(ticket.wait(20).acked) == ["e"]


def test_a_lost_ack_is_said_again(post, stack, model, digest):
    lost: list[int] = []

    def forgetful(_: bytes, frames: list) -> list:
        message = decode_from_member(frames)
        if isinstance(message, Heartbeat) and message.acked is not None and len(lost) < 3:
            lost.append(message.acked.version)
            return []
        return [frames]

    publisher, subscriber = members(stack, post(forgetful).address, model)
    ticket = publisher.publish(0, model(0))
    assert digest(subscriber.fetch(0)) == digest(0)
    stats = ticket.wait(10)
    assert list(stats.acked) == ["e"]
    assert lost == [0, 0, 0]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_coordinator_killed_before_or_after_a_commit_is_back_at_its_address(
    engine, trainer, digest, eventually, moment
):
    """Before: the version is announced and not acknowledged. After: it is, and the next one is on its way."""
    with dcs.serve(lease_seconds=LEASE_SECONDS) as running:
        engines = [engine(running.address, name, {"hold": True}) for name in ("a", "b")]
        sender = trainer(running.address)
        sender.ask("publish", 0)
        for member in engines:
            assert member.takes(0)[0] == digest(0)
        if moment == "after":
            for member in engines:
                member.say("ack")
        os.kill(running.pid, signal.SIGKILL)
        for member in engines:
            if moment == "before":
                assert member.ask("check") == [digest(0)]  # served on
                member.say("ack")
        published = sender.ask("publish", 1)
        assert published[0] == "1"
        for member in engines:
            assert member.takes(1)[0] == digest(1)
            member.say("ack")
        eventually(lambda: running.restarts == 1)
        late = engine(running.address, "late", {"hold": True})
        taken = late.takes(1)
        assert taken[0] == digest(1)
        late.say("ack")
        before = int(sender.ask("sent")[0])
        assert int(sender.ask("publish", 2)[1]) >= int(published[1])  # epochs do not go back
        for member in (*engines, late):
            assert member.takes(2)[0] == digest(2)
            member.say("ack")
        assert int(sender.ask("sent")[0]) > before


@pytest.mark.parametrize(("returns", "lease"), [(True, 10.0), (False, 1.5)], ids=["late", "never"])
def test_a_subscriber_that_joins_a_restarted_coordinator_late_is_waited_for(
    stack, model, digest, returns, lease
):
    """The publisher is there first, and its version complete: who was live before is not forgotten for that.
    One that does not come back at all is held for gone after two leases.
    """
    gone = threading.Event()

    def deliver(_: bytes, frames: list) -> list:
        return [] if gone.is_set() else [frames]

    running = stack.enter_context(dcs.serve(lease_seconds=lease))
    post = Post(running.address, deliver, lambda _, frames: [frames])
    stack.callback(post.close)
    layout = dcs.layout.of(model(0))
    subscriber = stack.enter_context(dcs.Subscriber(post.address, "r", name="e", layout=layout))
    publisher = stack.enter_context(dcs.Publisher(running.address, "r", layout=layout, timeout=30.0))
    ticket = publisher.publish(0, model(0))
    assert digest(subscriber.fetch(0)) == digest(0)
    assert list(ticket.wait(10).acked) == ["e"]
    gone.set()
    os.kill(running.pid, signal.SIGKILL)
    ticket = publisher.publish(1, model(1))
    if returns:
        with pytest.raises(dcs.Timeout, match=r"not acknowledged within 2\.0 s by e"):
            ticket.wait(2.0)
        gone.clear()
        assert digest(subscriber.fetch(1, timeout=20)) == digest(1)
        assert list(ticket.wait(20).acked) == ["e"]
    else:
        assert ticket.wait(20).gone.keys() == {"e"}
    assert running.restarts == 1


@pytest.mark.parametrize("kills", [3, pytest.param(5, marks=pytest.mark.slow)])  # five a minute are mended
def test_each_version_comes_once_to_all_of_a_group_however_its_coordinator_dies(kills):
    """It is killed a moment after the announcement: before the ranks of an engine have the version, when only
    one has, when it has told them to commit it, or before it has heard of that.
    """
    weights = {"w": torch.zeros(200_000)}
    layout, seen = dcs.layout.of(weights), {"g0": [], "g1": [], "alone": []}
    ended = threading.Event()

    def serve(subscriber: dcs.Subscriber) -> None:
        taken = seen[subscriber.name]
        while not ended.is_set():
            staged = subscriber.next(after=taken[-1] if taken else -1, timeout=0.2)
            if staged is not None:
                weights = staged.tensors["w"]
                assert float(weights.min()) == float(weights.max()) == staged.version
                taken.append(staged.version)
                staged.ack()

    with dcs.serve(lease_seconds=20.0) as running:  # longer than it is away: `wait` says that else
        grouped = {"group": "g", "group_size": 2, "wires": ["tcp"]}
        with (
            dcs.Subscriber(running.address, "r", name="g0", layout=layout, **grouped) as first,
            dcs.Subscriber(running.address, "r", name="g1", layout=layout, **grouped) as second,
            dcs.Subscriber(running.address, "r", name="alone", layout=layout) as third,
            dcs.Publisher(running.address, "r", layout=layout, timeout=30.0) as publisher,
            ThreadPoolExecutor(3) as pool,
        ):
            serving = [pool.submit(serve, each) for each in (first, second, third)]
            try:
                for kill in range(kills):
                    for version in (2 * kill, 2 * kill + 1):
                        doomed = version % 2 == 1
                        ticket = publisher.publish(version, {"w": torch.full((200_000,), float(version))})
                        if doomed:
                            ended.wait(0.004 * kill)
                            os.kill(running.pid, signal.SIGKILL)
                        stats = ticket.wait(30)
                        assert not stats.gone
            finally:
                ended.set()
            for each in serving:
                each.result(20)
        assert running.restarts == kills
    assert list(seen.values()) == 3 * [list(range(2 * kills))]


def test_a_coordinator_killed_in_a_transfer_does_not_end_it(engine, trainer, digest, payload, eventually):
    with dcs.serve(lease_seconds=LEASE_SECONDS) as running:
        receiver = engine(running.address, "e", {"halt": [1, 0.5]})
        sender = trainer(running.address)
        sender.ask("publish", 0)
        assert receiver.takes(0)[0] == digest(0)
        sender.ask("publish", 1)
        receiver.until("halted")
        os.kill(running.pid, signal.SIGKILL)
        eventually(lambda: running.restarts == 1, 30)
        receiver.go_on()
        assert receiver.takes(1)[0] == digest(1)
        sent = int(sender.ask("sent")[0]) / payload - 1
        print(f"coordinator killed at 50% of a transfer: {sent:.2f} payloads sent for it in all")
        assert sent <= 1.8  # two requests that were in flight are made again


def test_an_incarnation_that_comes_back_from_a_partition_does_not_oust_its_successor(
    coordinator, post, stack, model, digest
):
    """The first one is cut off, a second one takes its name, and then the first one is heard again."""
    through, cut = post(), threading.Event()
    silent = post(lambda _, frames: [] if cut.is_set() else [frames])
    layout = dcs.layout.of(model(0))
    first = stack.enter_context(dcs.Subscriber(silent.address, "r", name="e", layout=layout))
    publisher = stack.enter_context(dcs.Publisher(through.address, "r", layout=layout))
    publisher.publish(0, model(0))
    first.fetch(0)
    cut.set()
    assert "no heartbeat" in publisher.publish(1, model(1)).wait(20).gone["e"]
    second = stack.enter_context(dcs.Subscriber(coordinator.address, "r", name="e", layout=layout))
    assert digest(second.fetch(1)) == digest(1)
    cut.clear()
    with pytest.raises(dcs.Evicted):
        first.next(after=1, timeout=20)
    ticket = publisher.publish(2, model(2))
    assert digest(second.fetch(2)) == digest(2)
    assert list(ticket.wait(10).acked) == ["e"]
