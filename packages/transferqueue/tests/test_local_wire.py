"""What the controller does with peers of its Unix socket that are wrong, hostile, or no longer there."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import transferqueue as tq
from msgspec.structs import replace
from transferqueue.scheduling.wanted import Wanted
from transferqueue.wire.messages import (
    PROTOCOL,
    ArenaHere,
    Committed,
    Done,
    Fetch,
    Goodbye,
    Granted,
    Leased,
    Locate,
    Located,
    OpenPartition,
    ReadStats,
    Reply,
    Request,
    Stats,
    TakeSlab,
    Welcome,
    decode_reply,
    encoder,
)
from transferqueue.wire.node import Answered, Node, Session

Speak = Callable[[str], Any]
Kind = Callable[[Reply], str]
Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def part(queue: tq.Client, name: str) -> tq.Partition:
    return queue.partition(name, tasks={"t": ["x"]})


@pytest.fixture
def healthy(part: tq.Partition) -> Iterator[None]:
    """Whatever a test does meanwhile, another client puts, fetches and acks as if nothing were."""
    yield
    part.put({"x": np.arange(3)})
    batch = part.fetch("t", 3, timeout=20)
    assert batch["x"].values.tolist() == [0, 1, 2]
    batch.ack()


def descriptors(store: tq.Server) -> int:
    return psutil.Process(store.processes[0].pid).num_fds()


@pytest.mark.usefixtures("healthy")
def test_junk_is_refused_and_logged_once(
    capfd: pytest.CaptureFixture[str], speak_locally: Speak, kind_of: Kind
) -> None:
    with tq.serve(1) as store:
        peer = speak_locally(store.local)
        for junk in (
            b"",
            b"\xc1",
            b"junk" * 10_000,
            b"\x91" * 100_000,
            msgspec.msgpack.encode([1, 0, 1.0, ["NoSuchRequest"]]),
            msgspec.msgpack.encode([1, 0, float("nan"), ["ReadStats"]]),
            b"\x94\x01\x00\xcb" + bytes(8) + b"\x93\xa7Release\x01\xdd\xff\xff\xff\xff",
        ):
            assert kind_of(peer.say(junk)) == "Malformed"
        assert kind_of(peer.ask(1, ReadStats())) == "HelloRequired"
        assert isinstance(peer.hello().body, Welcome)
        assert isinstance(peer.ask(1, ReadStats()).body, Stats)
    said = capfd.readouterr().err
    assert said.count("refused a message") == 1
    assert "Traceback" not in said


@pytest.mark.usefixtures("healthy")
def test_a_message_of_4_gib_is_not_waited_for(store: tq.Server, speak_locally: Speak, kind_of: Kind) -> None:
    greeted, stranger = speak_locally(store.local), speak_locally(store.local)
    greeted.hello()
    for peer, length in ((greeted, 0xFFFF_FFFF), (stranger, 1 << 27)):
        peer.socket.sendall(length.to_bytes(4, "little") + b"0" * 1000)
        assert kind_of(peer.hear()) == "Malformed"
        assert peer.hung_up()


def test_messages_may_come_in_any_pieces(store: tq.Server, speak_locally: Speak) -> None:
    peer = speak_locally(store.local)
    peer.hello()
    message = encoder.encode(Request(1, 0, 1.0, ReadStats()))
    stream = len(message).to_bytes(4, "little") + message
    for at in range(len(stream)):
        peer.socket.sendall(stream[at : at + 1])
    assert isinstance(peer.hear().body, Stats)
    several = [encoder.encode(Request(number, 0, 1.0, ReadStats())) for number in (2, 3)]
    peer.socket.sendall(b"".join(len(one).to_bytes(4, "little") + one for one in several))
    assert [peer.hear().id, peer.hear().id] == [2, 3]


@pytest.mark.usefixtures("healthy")
def test_half_a_message_and_the_end_is_no_message(
    store: tq.Server, queue: tq.Client, part: tq.Partition, speak_locally: Speak, block: Any
) -> None:
    peer = speak_locally(store.local)
    peer.hello()
    granted = peer.ask(1, TakeSlab(False)).body
    assert isinstance(granted, Granted)
    where = block.place(granted.range)
    commit = block.commit(part._calls.number, where, remote=False)
    message = encoder.encode(Request(2, 0, 1.0, commit))
    peer.socket.sendall(len(message).to_bytes(4, "little") + message[:-1])
    peer.socket.close()
    assert queue.stats().partitions[part.name].samples == 0


@pytest.mark.usefixtures("healthy")
def test_another_protocol_and_a_wrong_token_are_refused(speak_locally: Speak, kind_of: Kind) -> None:
    with tq.serve(1, token="secret") as store:
        peer = speak_locally(store.local)
        for protocol in (PROTOCOL - 1, PROTOCOL + 1, -1):
            assert kind_of(peer.hello("secret", protocol=protocol)) == "ProtocolMismatch"
        for token in ("", "secre", "secret "):
            assert kind_of(peer.hello(token)) == "Unauthorized"
            assert kind_of(peer.ask(1, ReadStats())) == "HelloRequired"
        assert isinstance(peer.hello("secret").body, Welcome)


@pytest.mark.usefixtures("healthy")
def test_silent_connections_do_not_add_up(store: tq.Server, speak_locally: Speak) -> None:
    """The longest silent one makes room; who has said hello stays."""
    before = descriptors(store)
    greeted = speak_locally(store.local)
    greeted.hello()
    silent = [socket.socket(socket.AF_UNIX) for _ in range(1500)]
    try:
        for one in silent:
            one.connect("\0" + store.local)
        assert isinstance(greeted.ask(1, ReadStats()).body, Stats)
        assert descriptors(store) - before < 2_100
        assert select.select(silent[:1], [], [], 20)[0]
        assert silent[0].recv(1) == b""
    finally:
        for one in silent:
            one.close()


@pytest.mark.usefixtures("healthy")
def test_a_client_that_never_reads_is_not_heard_until_it_does(
    store: tq.Server, part: tq.Partition, speak_locally: Speak
) -> None:
    controller = psutil.Process(store.processes[0].pid)
    peer = speak_locally(store.local)
    peer.hello()
    fields = {f"f{number}": [f"g{number}"] * 3 for number in range(3_000)}
    asked = OpenPartition(part.name + " wide", fields, None, None, None, None)
    before = controller.memory_info().rss
    stream = b"".join(
        len(message).to_bytes(4, "little") + message
        for number in range(1, 301)
        for message in [encoder.encode(Request(number, 0, 60.0, asked))]
    )
    sender = threading.Thread(target=peer.socket.sendall, args=(stream,))
    sender.start()
    sender.join(1.0)
    assert sender.is_alive()  # held up
    assert controller.memory_info().rss - before < 50e6  # of answers of 100 KB each
    part.put({"x": np.arange(3)})
    part.fetch("t", 3).ack()
    assert [peer.hear().id for _ in range(300)] == list(range(1, 301))
    sender.join(20)


@pytest.mark.usefixtures("healthy")
def test_descriptors_that_a_client_sends_are_closed(
    store: tq.Server, speak_locally: Speak, eventually: Eventually
) -> None:
    peer = speak_locally(store.local)
    peer.hello()
    before = descriptors(store)
    ours, theirs = os.pipe()
    for number in range(1, 50):
        message = encoder.encode(Request(number, 0, 1.0, ReadStats()))
        socket.send_fds(peer.socket, [len(message).to_bytes(4, "little") + message], [theirs] * 100)
        assert isinstance(peer.hear().body, Stats)
    eventually(lambda: descriptors(store) <= before)
    os.close(theirs)
    assert os.read(ours, 1) == b""  # nobody else has the writing end
    os.close(ours)


STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
peer = socket.socket(socket.AF_UNIX)
peer.settimeout(20)
try:
    peer.connect("\\0" + sys.argv[1])
    peer.sendall(b"\\x05\\0\\0\\0hello")
    print(peer.recv(100) == b"")
except (ConnectionError, PermissionError):
    print(True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
@pytest.mark.usefixtures("healthy")
def test_a_process_of_another_user_is_not_heard(store: tq.Server) -> None:
    said = subprocess.run(
        [sys.executable, "-I", "-c", STRANGER, store.local],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout == "True\n"


@pytest.mark.usefixtures("healthy")
def test_one_connection_that_speaks_for_another_client_ends_the_first(
    store: tq.Server, queue: tq.Client, part: tq.Partition, speak_locally: Speak
) -> None:
    part.put({"x": np.arange(2)})
    clients = queue.stats().clients
    peer = speak_locally(store.local)
    peer.hello(client=1)
    fetch = Fetch(part._calls.number, Wanted("t", 2), None, False, 600.0)
    assert isinstance(peer.ask(1, fetch).body, Leased)
    peer.hello(client=2)
    assert queue.stats().clients == clients + 1
    part.fetch("t", 2, timeout=20).ack()


@pytest.mark.usefixtures("healthy")
def test_what_a_goodbye_leaves_is_released_with_the_connection(
    store: tq.Server, queue: tq.Client, part: tq.Partition, speak_locally: Speak, eventually: Eventually
) -> None:
    ids = part.put({"x": np.arange(3)}).tolist()
    before = queue.stats()
    peer = speak_locally(store.local)
    peer.hello()
    located = peer.ask(1, Locate(part._calls.number, ids, None)).body
    assert isinstance(located, Located)
    assert isinstance(peer.ask(2, TakeSlab(False)).body, Granted)
    fetch = Fetch(part._calls.number, Wanted("t", 3), None, False, 600.0)
    assert isinstance(peer.ask(3, fetch).body, Leased)
    peer.send(encoder.encode(Request(4, 0, 60.0, fetch)))  # waits
    peer.ask(5, Goodbye())
    part.fetch("t", 3, timeout=20).ack()  # the lease is back at once
    held = queue.stats()
    assert held.clients == before.clients
    assert held.waiting_fetches == 0
    assert held.memory.pinned_only > 0  # but it may still look, and write
    assert held.memory.granted > before.memory.granted
    peer.socket.close()
    eventually(lambda: queue.stats().memory.pinned_only == 0)
    assert queue.stats().memory.granted == before.memory.granted


FORKING = """
import os, signal, sys, threading, numpy as np, transferqueue as tq
queue = tq.connect(sys.argv[1], transport="shm")
part = queue.partition("forked")
batch = part.fetch("t", 3, lease_seconds=600)
read, write = os.pipe()
child = os.fork()
if child == 0:
    said = []
    for call in (lambda: part.put({"x": np.arange(1)}), lambda: batch.ack(), lambda: queue.stats()):
        try:
            call()
        except tq.QueueError as error:
            said.append("fork" in str(error))
    assert said == [True] * 3, said
    queue.close()
    os.write(write, b"done")
    threading.Event().wait()
assert os.read(read, 4) == b"done"
queue.stats()  # the parent goes on, whatever the child did
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_inherited_the_socket_keeps_nothing_alive(eventually: Eventually) -> None:
    """Nor can it use the client, or end it for its parent."""
    with tq.serve(1) as store, tq.connect(store) as queue:
        part = queue.partition("forked", tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(3)})
        with subprocess.Popen(
            [sys.executable, "-c", FORKING, store.address], stdout=subprocess.PIPE
        ) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            try:
                assert parent.wait(20) == -signal.SIGKILL
                assert part.fetch("t", 3, timeout=20).ids.tolist() == ids.tolist()
                eventually(lambda: queue.stats().clients == 1)
            finally:
                os.kill(child, signal.SIGKILL)


def test_more_arenas_than_fit_beside_one_message_are_passed_with_several() -> None:
    """The system takes 253 descriptors at once; a store of 64 GiB has more arenas."""
    here, there = socket.socketpair(socket.AF_UNIX)
    there.setblocking(False)

    class Connection:
        local = True
        greeted = True
        pid = 0

        def send(self, header: bytes, payload: Any = None, descriptors: Any = ()) -> bool:
            socket.send_fds(here, [header], list(descriptors))
            return True

        def hang_up(self) -> None:
            raise AssertionError

    connection, session = Connection(), Session(1)
    arenas = [(ArenaHere(number, 1), here.fileno()) for number in range(700)]
    answered = Answered(7, Done(), None, False, (), arenas)
    passed: list[int] = []
    for expected in (250, 250, 200, 0):
        if expected in (0, 250) and len(passed) % 700 == 0:
            assert Node._put_on(connection, session, answered, None)
        data, descriptors, _, _ = socket.recv_fds(there, 100_000, 253)
        reply = decode_reply(data)
        assert (len(descriptors), len(reply.arenas)) == (expected, expected)
        assert reply.id == (0 if expected == 250 else 7)
        passed += [arena.arena for arena in reply.arenas]
        for descriptor in descriptors:
            os.close(descriptor)
    assert passed == list(range(700))
    here.close()
    there.close()


def test_a_client_out_of_files_is_told_so(store: tq.Server, name: str) -> None:
    program = """
import os, resource, sys, numpy as np, numpy.ma, transferqueue as tq
queue = tq.connect(sys.argv[1], transport="shm")
part = queue.partition(sys.argv[2], tasks={"t": ["x"]})
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.dup(0)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
try:
    part.put({"x": np.arange(3)}, timeout=10)
except tq.QueueError as error:
    print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", program, store.address, name],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "ulimit" in said.stdout, said


def test_a_stopped_controller_ends_no_call_late_and_repeats_nothing(
    part: tq.Partition, store: tq.Server
) -> None:
    """Also when so much is on its way that the socket takes no more: half a message would spoil the rest."""
    os.kill(store.processes[0].pid, signal.SIGSTOP)
    late: list[BaseException] = []
    ended: list[str] = []

    def put(value: int, timeout: float) -> None:
        keys = [f"group {value} {'long' * 2_000} {row}" for row in range(30)]
        try:
            part.put({"x": np.full(30, value)}, groups=keys, timeout=timeout)
            ended.append("done")
        except tq.Timeout:
            ended.append("timeout")
        except tq.QueueError as error:
            late.append(error)

    short = [threading.Thread(target=put, args=(value, 0.2)) for value in range(6)]
    long = [threading.Thread(target=put, args=(value, 30.0)) for value in range(10, 16)]
    for thread in short + long:
        thread.start()
    for thread in short:
        thread.join(10)
        assert not thread.is_alive()
    os.kill(store.processes[0].pid, signal.SIGCONT)
    for thread in long:
        thread.join(30)
        assert not thread.is_alive()
    assert (sorted(ended), late) == (["done"] * 6 + ["timeout"] * 6, [])
    got = part.fetch("t", 180, timeout=20)
    assert sorted(got["x"].values.tolist()) == sorted(list(range(10, 16)) * 30)
    got.ack()
    assert part.ledger("t").pending == []


def test_a_fetch_that_waits_ends_when_its_client_is_closed(
    store: tq.Server, name: str, eventually: Eventually
) -> None:
    with tq.connect(store) as other:
        queue = tq.connect(store, transport="shm")
        part = queue.partition(name, tasks={"t": ["x"]})
        ended: list[str] = []

        def wait() -> None:
            try:
                part.fetch("t", 1, timeout=600)
            except tq.QueueError as error:
                ended.append(type(error).__name__)

        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        eventually(lambda: other.stats().waiting_fetches == 3)
        queue.close()
        for thread in waiting:
            thread.join(10)
            assert not thread.is_alive()
        assert len(ended) == 3
        assert other.stats().waiting_fetches == 0


def test_commits_of_a_client_that_closed_are_not_taken(
    store: tq.Server, part: tq.Partition, speak_locally: Speak, kind_of: Kind, block: Any
) -> None:
    """A grant ends with its client, and another client's number does not help."""
    first, second = speak_locally(store.local), speak_locally(store.local)
    first.hello()
    second.hello()
    granted = first.ask(1, TakeSlab(False)).body
    assert isinstance(granted, Granted)
    commit = block.commit(part._calls.number, block.place(granted.range), remote=False)
    assert kind_of(second.ask(1, commit)) == "InvalidArgument"
    moved = replace(
        commit, range=replace(commit.range, start=commit.range.start + 64, stop=commit.range.stop + 64)
    )
    assert isinstance(first.ask(2, moved).body, Committed)
    first.socket.close()
    assert kind_of(second.ask(3, commit)) == "InvalidArgument"
