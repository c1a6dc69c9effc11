"""Links and coordinators over real sockets: answers, leases, restarts, keys."""

import os
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack

import dcs
import psutil
import pytest
import zmq
from dcs.control import curve
from dcs.control.coordinator import Coordinator
from dcs.control.link import Link, Rejoining
from dcs.control.messages import (
    Acked,
    Announced,
    Complete,
    Fenced,
    Heartbeat,
    Join,
    Joined,
    Receipt,
    Refused,
    Roster,
    RunState,
    decode_from_member,
    encode,
)
from dcs.errors import Closed, CoordinatorLost, Evicted, LayoutMismatch, StaleVersion, Unauthorized
from dcs.layout import Layout, TensorSpec

LEASE = 0.4
LAYOUT = Layout((TensorSpec("w", (2,), "float32"),))
OTHER = Layout((TensorSpec("w", (3,), "float32"),))


def root_of(value: int) -> bytes:
    return bytes([value]) * 16


def state_of(version: int):
    """A test for the messages that offer this version."""
    return lambda m: (
        isinstance(m, RunState) and m.announcement is not None and m.announcement.version == version
    )


@pytest.fixture
def hub(stack: ExitStack) -> Coordinator:
    return stack.enter_context(Coordinator(lease_seconds=LEASE))


def test_a_version_is_announced_completed_told_and_acknowledged(hub, ear):
    rank, subscriber = ear(hub.address), ear(hub.address)
    epoch = rank.join("publisher", "p").epoch
    member = subscriber.join("subscriber", "e").member
    assert rank.link.announce(epoch, 3, root_of(3), 100, 0.5, timeout=5) == Announced(2, 3)
    (complete,) = [m for m in rank.heard if isinstance(m, Complete)][:1]  # it comes before the answer
    assert (complete.epoch, complete.version, list(complete.roster.live)) == (epoch, 3, [member])
    state = subscriber.await_message(state_of(3))
    assert [source.rank for source in state.sources] == [0]
    assert subscriber.link.layouts([state.sources[0].layout], 5) == {LAYOUT.fingerprint: LAYOUT}
    subscriber.link.report(staged=Receipt(epoch, 3, "tcp", 100, 0))
    subscriber.link.report(acked=Acked(epoch, 3, 0.5, 0.25))
    rank.await_message(
        lambda m: (
            isinstance(m, Roster | Complete)
            and [s.acked for s in (m.roster if isinstance(m, Complete) else m).live.values()]
            == [Acked(epoch, 3, 0.5, 0.25)]
        )
    )
    (run,) = hub.snapshot().runs
    (delivery,) = run.versions[0].deliveries
    assert (delivery.transfer_seconds, delivery.pause_seconds) == (0.5, 0.25)
    assert (run.subscribers[0].staged, run.subscribers[0].acked, run.subscribers[0].lag) == (3, 3, 0)
    assert abs(run.versions[0].announced_at - time.time()) < 60


def test_what_is_refused_is_raised_where_it_was_asked(hub, ear):
    rank = ear(hub.address)
    epoch = rank.join("publisher", "p").epoch
    rank.link.announce(epoch, 3, root_of(3), timeout=5)
    with pytest.raises(StaleVersion, match="publish 4 or later"):
        rank.link.announce(epoch, 2, root_of(2), timeout=5)
    late = ear(hub.address)
    with pytest.raises(LayoutMismatch, match="subscriber 'late'"):
        late.join("subscriber", "late", OTHER)
    assert late.heard == []


def test_a_link_that_lost_its_lease_joins_again_and_says_so(hub, ear, eventually):
    rank = ear(hub.address)
    first = rank.join("publisher", "p", session="job")
    rank.listening.clear()  # its thread hangs, as if the process had been stopped
    eventually(lambda: bool(hub.snapshot().runs[0].departed))
    assert hub.snapshot().runs[0].publisher == "lost"
    rank.listening.set()
    assert rank.await_message(lambda m: isinstance(m, Fenced)).rejoin
    again = rank.await_message(lambda m: isinstance(m, Joined) and m.member != first.member)
    assert again.epoch == first.epoch
    assert rank.link.await_membership(5)


def test_a_replaced_link_is_fenced_for_good(hub, ear):
    old, new = ear(hub.address), ear(hub.address)
    old.join("subscriber", "e")
    new.join("subscriber", "e")
    fenced = old.await_message(lambda m: isinstance(m, Fenced))
    assert not fenced.rejoin
    with pytest.raises(Evicted, match="replaced by a newer incarnation"):
        old.link.layouts([], 0.2)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_members_go_on_with_a_coordinator_that_was_restarted(stack, ear, host):
    hub = stack.enter_context(Coordinator(lease_seconds=LEASE))
    port = int(hub.address.rpartition(":")[2])
    address = f"tcp://{host}:{port}"
    rank, subscriber = ear(address), ear(address)
    held = {"version": -1}
    rank.on_joined = lambda joined: (
        held["version"] >= 0 and rank.link.offer(joined.epoch, held["version"], root_of(held["version"]))
    )
    epoch = rank.join("publisher", "p", session="s").epoch
    subscriber.join("subscriber", "e")
    for version in range(3):  # killed without a word each time, before anybody has staged the version
        rank.link.announce(epoch, version, root_of(version), timeout=5)
        held["version"] = version
        subscriber.await_message(state_of(version))
        kill(hub)
        rank.heard.clear()
        subscriber.heard.clear()
        hub = stack.enter_context(Coordinator(port=port, lease_seconds=LEASE))
        joined = rank.await_message(lambda m: isinstance(m, Joined))
        assert joined.epoch > epoch
        assert joined.version == version
        epoch = rank.await_message(lambda m: isinstance(m, Complete) and m.version == held["version"]).epoch
        subscriber.await_message(state_of(version))
        subscriber.link.report(staged=Receipt(epoch, version, "tcp"), acked=Acked(epoch, version, 0.1))
        kill(hub)  # after the commit
        rank.heard.clear()
        subscriber.heard.clear()
        hub = stack.enter_context(Coordinator(port=port, lease_seconds=LEASE))
        acked = rank.await_message(
            lambda m: (
                isinstance(m, Complete)
                and [s.acked.version for s in m.roster.live.values() if s.acked] == [held["version"]]
            )
        )
        epoch = acked.epoch
    with pytest.raises(StaleVersion):
        rank.link.announce(epoch, 1, root_of(1), timeout=5)
    assert not any(isinstance(m, Fenced) and not m.rejoin for m in rank.heard + subscriber.heard)


def kill(hub: Coordinator) -> None:
    """End a coordinator as SIGKILL would: nobody is told."""
    hub._registry._members.clear()
    hub.close()


def test_an_announcement_in_flight_survives_a_restart(stack, ear):
    hub = stack.enter_context(Coordinator(lease_seconds=LEASE))
    port = int(hub.address.rpartition(":")[2])
    rank = ear(hub.address)
    epoch = rank.join("publisher", "p", session="s").epoch
    kill(hub)
    hub = stack.enter_context(Coordinator(port=port, lease_seconds=LEASE))
    for _ in range(3):
        try:
            rank.link.announce(epoch, 4, root_of(4), timeout=10)
            break
        except Rejoining:
            assert rank.link.await_membership(10)
            epoch = [m for m in rank.heard if isinstance(m, Joined)][-1].epoch
    rank.await_message(lambda m: isinstance(m, Complete) and m.version == 4)


def test_a_stopped_coordinator_evicts_nobody_when_it_goes_on(stack, ear):
    process = stack.enter_context(dcs.serve(lease_seconds=3.0))
    rank, subscriber = ear(process.address), ear(process.address)
    rank.join("publisher", "p", session="s")
    subscriber.join("subscriber", "e")
    os.kill(process.pid, signal.SIGSTOP)
    try:
        rank.await_silence()
        subscriber.await_silence()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    for member in (rank, subscriber):
        member.heard.clear()
        member.await_message(lambda m: isinstance(m, RunState | Roster))
    rank.link.announce(1, 0, root_of(0), timeout=5)
    subscriber.await_message(state_of(0))
    assert not any(isinstance(m, Fenced) for m in rank.heard + subscriber.heard)


@pytest.fixture
def fake(stack: ExitStack):
    """The ROUTER socket of a coordinator that a test plays, and its address."""
    context = stack.enter_context(zmq.Context())
    router = stack.enter_context(context.socket(zmq.ROUTER))
    router.setsockopt(zmq.LINGER, 0)
    return router, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


def hear(router):
    assert router.poll(10_000)
    identity, *frames = router.recv_multipart()
    return identity, decode_from_member(frames)


def in_background(stack: ExitStack, call):
    """Runs `call` on a thread; the list that will hold what it returned."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    stack.callback(thread.join)
    return thread, results


def joined_with(identity, join, member=7, lease=60.0):
    state = RunState("absent", None)
    return [identity, *encode(Joined(join.request, member, 1, lease, -1, b"", state, Roster({}, {})))]


def test_a_request_whose_answer_was_lost_is_repeated(stack, fake, ear):
    router, address = fake
    member = ear(address)
    thread, results = in_background(stack, lambda: member.join("subscriber", "e"))
    _, first = hear(router)
    identity, second = hear(router)
    assert second == first
    router.send_multipart(joined_with(identity, second))
    thread.join(10)
    assert len(results) == 1


def test_reports_are_sent_at_once_and_again_with_every_heartbeat(stack, fake, ear):
    router, address = fake
    member = ear(address)
    thread, _ = in_background(stack, lambda: member.join("subscriber", "e"))
    identity, join = hear(router)
    router.send_multipart(joined_with(identity, join, lease=0.8))
    thread.join(10)
    staged, acked = Receipt(1, 4, "tcp"), Acked(1, 4, 0.1)
    member.link.report(staged=staged, slow=[3])
    member.link.report(acked=acked, slow=[5, 3])
    said = [message for _, message in (hear(router) for _ in range(4))]
    assert said[0] == Heartbeat(7, None, staged, (3,))
    assert set(said[1:]) == {Heartbeat(7, acked, staged, (3, 5))}


def test_a_refused_rejoin_is_the_end(stack, fake, ear):
    router, address = fake
    member = ear(address)
    thread, _ = in_background(stack, lambda: member.join("subscriber", "e"))
    identity, join = hear(router)
    assert isinstance(join, Join)
    router.send_multipart(joined_with(identity, join))
    thread.join(10)
    router.send_multipart([identity, *encode(Fenced(7, "evicted", "lapsed", {}, True))])
    _, again = hear(router)
    assert isinstance(again, Join)
    assert again.known is not None
    assert (again.request > join.request, again.known.epoch) == (True, 1)
    router.send_multipart([identity, *encode(Refused(again.request, "evicted", "replaced", {}))])
    end = member.await_message(lambda m: isinstance(m, Fenced) and not m.rejoin)
    assert (end.member, end.message) == (7, "replaced")


def test_a_coordinator_that_is_silent_is_connected_to_anew(stack, fake, ear):
    router, address = fake
    member = ear(address)
    thread, _ = in_background(stack, lambda: member.join("subscriber", "e"))
    identity, join = hear(router)
    router.send_multipart(joined_with(identity, join, lease=0.2))
    thread.join(10)
    monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
    member.await_silence()
    assert isinstance(member.silences[0], CoordinatorLost)
    assert monitor.poll(10_000)
    router.disable_monitor()
    deadline = time.monotonic() + 10
    while None not in member.silences:
        assert time.monotonic() < deadline
        identity, message = hear(router)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if isinstance(message, Heartbeat):
            router.send_multipart([identity, *encode(RunState("absent", None))])


def test_closing_wakes_who_waits_and_leaves_nothing(no_leak):
    with socket.create_server(("127.0.0.1", 0)) as nobody, ExitStack() as opened:
        link = Link(f"tcp://127.0.0.1:{nobody.getsockname()[1]}", lambda m: None, lambda e: None)
        failures: list[BaseException] = []

        def join() -> None:
            try:
                link.join(Join(0, "subscriber", "r", "e", LAYOUT, None, None), 30)
            except Closed as error:
                failures.append(error)

        thread, _ = in_background(opened, join)
        nobody.settimeout(10)
        nobody.accept()[0].close()
        link.close()
        link.close()
        thread.join(10)
        assert len(failures) == 1


def test_keys_encrypt_and_prove_the_coordinator(stack, ear):
    keys = curve.generate()
    hub = stack.enter_context(Coordinator(curve=keys, token="secret"))
    member = ear(hub.address, curve=curve.MemberKeys.of(keys.public))
    with pytest.raises(Unauthorized):
        member.join("subscriber", "e")
    assert member.join("subscriber", "e", token="secret").member
    other = curve.generate().public
    for wrong, why in (
        (None, "demands CURVE keys and this member was given none; give curve=dcs.MemberKeys.of"),
        (curve.MemberKeys.of(other), f"key {other.decode()!r}; is that the public key"),
    ):
        stranger = ear(hub.address, curve=wrong)
        with pytest.raises(CoordinatorLost, match=re.escape(why)):
            stranger.join("subscriber", "x", token="secret", timeout=1.5)
    plain = stack.enter_context(Coordinator())
    with pytest.raises(
        CoordinatorLost, match="has no CURVE keys and this member was given some; start it with"
    ):
        ear(plain.address, curve=curve.MemberKeys.of(keys.public)).join("subscriber", "x", timeout=1.5)
    assert keys.secret.decode() not in repr(keys)
    with pytest.raises(dcs.DcsError, match="CURVE key of 40 characters"):
        curve.CoordinatorKeys(b"short", keys.secret)


def test_a_coordinator_that_dies_is_started_again_at_its_address(stack, ear):
    process = stack.enter_context(dcs.serve(lease_seconds=LEASE))
    rank = ear(process.address)
    first = rank.join("publisher", "p", session="s")
    pid = process.pid
    os.kill(pid, signal.SIGKILL)
    joined = rank.await_message(lambda m: isinstance(m, Joined) and m.member != first.member, 20)
    assert joined.epoch > first.epoch
    assert process.pid != pid
    assert (process.alive, process.restarts, process.error) == (True, 1, None)


@pytest.mark.slow
def test_a_coordinator_that_dies_again_and_again_is_given_up_with_the_reason(stack, eventually):
    process = stack.enter_context(dcs.serve())
    for restarts in range(6):
        eventually(lambda expected=restarts: process.restarts == expected, 20)
        assert process.error is None
        os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: process.error is not None, 20)
    assert not process.alive
    assert "has been started 5 times within" in str(process.error)
    process.close()
    process.close()


@pytest.mark.usefixtures("no_leak")
def test_a_supervised_coordinator_leaves_nothing():
    with dcs.serve() as process:
        pid = process.pid
    assert not process.alive
    assert not psutil.pid_exists(pid)


def test_an_evicted_error_is_what_waiting_requests_get(hub, ear):
    rank = ear(hub.address)
    joined = rank.join("publisher", "p", session="s")
    newer = ear(hub.address)
    newer.join("publisher", "p", session="t")
    rank.await_message(lambda m: isinstance(m, Fenced))
    with pytest.raises(Evicted):
        rank.link.announce(joined.epoch, 1, root_of(1), timeout=5)
