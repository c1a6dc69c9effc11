"""Peers that know the protocol and mean ill: typed refusals, one line in the log, nobody else disturbed."""

import random
import threading
import time
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import hypothesis.strategies as st
import msgspec
import numpy as np
import psutil
import pytest
import transferqueue as tq
from hypothesis import HealthCheck, given, settings
from transferqueue import errors
from transferqueue.wire import messages
from transferqueue.wire.messages import (
    PROTOCOL,
    Ack,
    Announce,
    ClosePartition,
    Extend,
    Failure,
    Fetch,
    Goodbye,
    Granted,
    Hello,
    Leased,
    Locate,
    Nack,
    Opened,
    OpenPartition,
    ReadStats,
    Reply,
    Report,
    Request,
    Restore,
    Snapshot,
    TakeSlab,
    UnitAddress,
    Welcome,
    Write,
    Written,
    encoder,
)
from transferqueue.wire.steps import Exchange, run

Speak = Callable[[str], Any]
Kind = Callable[[Reply], str]
REFUSALS = {name for name, kind in vars(errors).items() if isinstance(kind, type)} | {"HelloRequired"}


class Healthy:
    """A client on each transport that streams the whole time and has to get exactly what it puts."""

    def __init__(self, store: tq.Server) -> None:
        self.queues = [tq.connect(store, transport=transport) for transport in ("shm", "zmq")]
        self.part = self.queues[0].partition("healthy", tasks={"t": ["x"]})
        self.number = self.part._calls.number
        self.rounds = 0
        self.failed: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for queue in self.queues:
                    part = queue.partition("healthy")
                    ids = part.put({"x": np.arange(self.rounds, self.rounds + 3)}, timeout=20)
                    batch = part.fetch("t", 3, timeout=20)
                    assert batch.ids.tolist() == ids.tolist()
                    assert batch["x"].values.tolist() == list(range(self.rounds, self.rounds + 3))
                    batch.ack()
                self.rounds += 1
                self._stop.wait(0.005)
        except (tq.QueueError, AssertionError) as error:
            self.failed.append(error)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert not self.failed, self.failed
        assert self.rounds > 0
        ledger = self.part.ledger("t")
        assert (ledger.pending, ledger.leased, ledger.dropped) == ([], [], {})
        for queue in self.queues:
            queue.close()


@pytest.fixture(scope="module")
def healthy(store: tq.Server) -> Iterator[Healthy]:
    streaming = Healthy(store)
    try:
        yield streaming
    finally:
        streaming.close()


@pytest.fixture(autouse=True)
def undisturbed(store: tq.Server, healthy: Healthy) -> Iterator[None]:
    """After every test the processes are the same, and the healthy client has gone on."""
    pids, rounds = [process.pid for process in store.processes], healthy.rounds
    yield
    deadline = time.monotonic() + 20
    while healthy.rounds <= rounds + 1:
        assert not healthy.failed, healthy.failed
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [process.pid for process in store.processes] == pids
    assert all(process.poll() is None for process in store.processes)


# -- what is not a client's to say ---------------------------------------------------------------------------


@pytest.mark.parametrize("local", [True, False])
def test_only_units_may_say_what_units_say(
    local: bool, store: tq.Server, queue: tq.Client, name: str, speak: Speak, speak_locally: Speak,
    kind_of: Kind, block: Any,
) -> None:  # fmt: skip
    """Else a client could take a unit's place, or have a put seen that was never written."""
    number = queue.partition(name, tasks={"t": ["x"]})._calls.number
    peer = speak_locally(store.local) if local else speak(store.address)
    peer.hello()
    units = queue.stats().units
    for at, secret in enumerate(["", "0" * 64, "secret"], start=1):
        announce = Announce(0, UnitAddress(0, "127.0.0.1", 1), secret)
        assert kind_of(peer.ask(at, announce)) == "Unauthorized"
    granted = peer.ask(10, TakeSlab(True)).body
    assert isinstance(granted, Granted)
    where = block.place(granted.range)
    assert kind_of(peer.ask(11, Written(where))) == "Unauthorized"
    assert kind_of(peer.ask(12, Fuzzer(0, number, number).value(Report))) == "Unauthorized"
    assert kind_of(peer.ask(13, block.commit(number, where, remote=True), timeout=0.0)) == "Timeout"
    assert queue.stats().partitions[name].samples == 0
    assert [(unit.unit, unit.address, unit.alive) for unit in queue.stats().units] == [
        (unit.unit, unit.address, True) for unit in units
    ]


def test_a_lease_is_ended_only_by_who_fetched(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak, kind_of: Kind
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    part.put({"x": np.arange(3)})
    batch = part.fetch("t", 3, lease_seconds=60)
    peer = speak(store.address)
    peer.hello()
    number, lease = part._calls.number, batch._lease
    for at, body in enumerate(
        [Ack(number, lease), Nack(number, lease), Extend(number, lease, 0.001)]
        + [Ack(number, wrong) for wrong in (-1, 0, lease + 1, 1 << 63)],
        start=1,
    ):
        assert kind_of(peer.ask(at, body)) == "StaleLease", body
    batch.ack()
    assert len(part.ledger("t").acked) == 3


def test_a_block_is_never_taken_outside_its_grant(
    store: tq.Server, queue: tq.Client, healthy: Healthy, name: str, speak: Speak, kind_of: Kind, block: Any
) -> None:
    """Writes at every 64 bytes around a grant that is not the writer's, under every number it may guess."""
    part = queue.partition(name, tasks={"t": ["x"]})
    controller, stranger = speak(store.address), speak(store.address)
    controller.hello(client=41)
    stranger.hello(client=42)
    granted, theirs = controller.ask(1, TakeSlab(True)).body, stranger.ask(1, TakeSlab(True)).body
    assert isinstance(granted, Granted)
    assert isinstance(theirs, Granted)
    units = [speak(unit.address) for unit in queue.stats().units]
    for unit in units:
        unit.hello(client=42)
    own, other = theirs.range, granted.range
    at = 0
    for grant in (own.grant, other.grant - 1, other.grant + 1, other.grant + 2, 0, 1):
        payload = block.laid_out(grant)
        for start in (other.start, other.start + 64, other.start - 64, other.stop - block.nbytes, 0):
            where = messages.Range(grant, other.arena, start, start + block.nbytes)
            if grant == own.grant and own.start <= start and where.stop <= own.stop:
                continue
            at += 1
            for unit in units:
                assert kind_of(unit.ask(at, Write(where, 0), payload)) == "InvalidArgument"
            assert kind_of(stranger.ask(at + 1, block.commit(part._calls.number, where, remote=True))) in (
                "InvalidArgument",
                "Timeout",
            )
    assert queue.stats().partitions[name].samples == 0


# -- another version -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_clients_of_another_version_are_refused_however_their_hello_goes_on(
    protocol: int, store: tq.Server, speak: Speak, speak_locally: Speak, kind_of: Kind
) -> None:
    """The first fields are the same in every version; what follows may be anything, or not be there."""
    for tail in ([], [[], []], [{"compression": "zstd"}, [1, 2], "more"]):
        hello = msgspec.msgpack.encode([0, 0, 0.0, ["Hello", protocol, "", 1, *tail]])
        for peer in (speak(store.address), speak_locally(store.local), speak(unit_address(store))):
            reply = peer.say(hello)
            assert kind_of(reply) in ("ProtocolMismatch", "Malformed")
            if not tail:
                assert kind_of(reply) == "ProtocolMismatch"
                assert (reply.body.details["got"], reply.body.details["expected"]) == (protocol, PROTOCOL)
            assert kind_of(peer.ask(1, ReadStats())) == "HelloRequired"


def unit_address(store: tq.Server) -> str:
    with tq.connect(store) as queue:
        return queue.stats().units[0].address


# -- bombs ---------------------------------------------------------------------------------------------------


def bombs() -> list[bytes]:
    """Small messages that announce or nest much."""
    begin = b"\x94\x01\x00\xcb" + bytes(8)
    return [
        b"\x91" * 200_000,
        b"\x81\xa0" * 100_000,
        begin + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        *(
            begin + head + announced
            for head in (b"\x93\xa7Release\x01", b"\x94\xa6Locate\x00", b"\x94\xa4Drop\x00")
            for announced in (
                b"\xdd\xff\xff\xff\xff",
                b"\xdd\x7f\xff\xff\xff",
                b"\xdd\x0f\xff\xff\xff",
                b"\xdd\x03\xff\xff\xff\x01",
            )
        ),
        begin + b"\x95\xa5Hello\x02\xa0\x01\xdd\x0f\xff\xff\xff",
        begin + b"\x97\xa0OpenPartition"[:2] + b"\xadOpenPartition\xa1p\xdf\x0f\xff\xff\xff",
        begin + b"\x94\xa6Report\x01\xa0\x81\xa1x" + b"\x91" * 50_000,
    ]


@pytest.mark.parametrize("which", ["controller", "unit", "local"])
def test_bombs_are_malformed_and_cost_nothing(
    which: str, store: tq.Server, speak: Speak, speak_locally: Speak, kind_of: Kind
) -> None:
    processes = [psutil.Process(process.pid) for process in store.processes]
    before = [process.memory_info().rss for process in processes]
    address = store.address if which == "controller" else unit_address(store)
    peer = speak_locally(store.local) if which == "local" else speak(address)
    for greeted in (False, True):
        if greeted:
            assert isinstance(peer.hello().body, Welcome)
        for bomb in bombs():
            assert kind_of(peer.say(bomb)) == "Malformed", bomb[:40]
    grown = [process.memory_info().rss - then for process, then in zip(processes, before, strict=True)]
    assert max(grown) < 10e6, grown


def test_oversized_frames_end_their_connection_only(store: tq.Server, speak: Speak, queue: tq.Client) -> None:
    """Of a size that a length field can say, sent or only announced."""
    import socket

    for address in (store.address, unit_address(store)):
        host, port = address.removeprefix("tcp://").split(":")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
        with socket.create_connection((host, int(port))) as peer:
            peer.settimeout(20)
            peer.sendall(greeting)
            ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
            peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
            peer.sendall(b"\x02" + (1 << 40).to_bytes(8, "big") + b"0" * 1000)
            while peer.recv(4096):  # until it is cut off
                pass
    assert queue.stats().units


# -- whatever fits the types ---------------------------------------------------------------------------------

_NUMBERS = (-(1 << 63), -(1 << 31), -1, 0, 1, 2, 3, 63, 64, 4096, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1)
_NUMBERS += (1 << 63, (1 << 64) - 1)


class Fuzzer:
    """Makes messages that fit the types of the protocol, and worse ones.

    Partitions of others are left alone, as a client with the token may do there what it likes.
    """

    def __init__(self, seed: int, partition: int, others: int) -> None:
        self.rng = random.Random(seed)
        self.partition = partition
        self.others = others
        self.seen: list[int] = [partition]
        self.number = 1
        self.kinds = [kind for kind in get_args(messages.RequestBody) if kind is not Hello]
        self.unit_kinds = list(get_args(messages.StorageRequest))
        self.controller_kinds = list(get_args(messages.ControllerRequest))

    def body(self, unit: bool) -> Any:
        rng = self.rng
        if rng.random() < 0.1:
            return self.value(rng.choice(self.kinds))
        kind = rng.choice(self.unit_kinds if unit else self.controller_kinds)
        if kind in (ClosePartition, Goodbye) and rng.random() < 0.95:
            kind = Fetch  # after those there is little left to do
        return self.value(kind)

    def request(self, unit: bool) -> bytes:
        self.number += self.rng.choice([0, 1, 1, 1, 2])
        timeout = self.rng.choice([0.0, 0.0, 0.001, 0.05])
        low = self.rng.choice([0, 0, self.number - 20])
        return encoder.encode(Request(self.number, low, timeout, self.body(unit)))

    def broken(self, unit: bool) -> bytes:
        """A message with bits turned, cut short, or with a part of another inside."""
        message = bytearray(self.request(unit))
        while b"Snapshot" in message:  # it could be written anywhere
            message = bytearray(self.request(unit))
        match self.rng.randrange(4):
            case 0:
                for _ in range(self.rng.randrange(1, 4)):
                    message[self.rng.randrange(len(message))] ^= 1 << self.rng.randrange(8)
            case 1:
                del message[self.rng.randrange(len(message)) :]
            case 2:
                at = self.rng.randrange(len(message))
                message[at:at] = self.rng.randbytes(self.rng.randrange(1, 20))
            case _:
                other = self.request(unit)
                message[self.rng.randrange(len(message)) :] = other[self.rng.randrange(len(other)) :]
        return bytes(message)

    def value(self, kind: Any, name: str = "") -> Any:
        rng = self.rng
        if name == "partition":
            return rng.choice([self.partition] * 6 + [-1, 1 << 20, 1 << 63])
        if name == "folder":
            return rng.choice(
                ["", "\0", "a" * 300, "/dev/null", "/dev/null/x", "/proc/self", "/proc/self/mem"]
            )
        if name == "span":
            return rng.choice([-1, 0, 64, 4096, 1 << 20, (1 << 20) + 1, 1 << 24])
        origin = get_origin(kind)
        if origin is Literal:
            return rng.choice(get_args(kind))
        if origin in (types.UnionType, typing.Union):
            return self.value(rng.choice(get_args(kind)), name)
        if origin is list:
            return [self.value(get_args(kind)[0]) for _ in range(rng.choice([0, 1, 1, 2, 3, 50]))]
        if origin is dict:
            key, item = get_args(kind)
            return {self.value(key): self.value(item) for _ in range(rng.choice([0, 1, 1, 2]))}
        if origin is tuple:
            parts = get_args(kind)
            if parts[-1] is Ellipsis:
                return tuple(self.value(parts[0]) for _ in range(rng.randrange(3)))
            return tuple(self.value(part) for part in parts)
        if kind is int:
            return rng.choice([*_NUMBERS, *self.seen[-30:], rng.randrange(1 << 40)])
        if kind is float:
            return rng.choice([-1.0, 0.0, 0.01, 1.0, 60.0, 1e300, float("inf"), float("nan")])
        if kind is bool:
            return rng.random() < 0.5
        if kind is str:
            return rng.choice(["x", "t", "", "int64", "fuzz", "group", "\0", "x/y", "𝄞" * 20, "a" * 300])
        if kind is type(None):
            return None
        if kind is Any:
            return rng.choice([0, None, "x", [1, [2]], {"a": 1}])
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            hints = typing.get_type_hints(kind)
            names = kind.__struct_fields__
            if kind is OpenPartition:
                return OpenPartition(
                    rng.choice(["fuzz", ""]), self.value(hints["tasks"]), None, None, None, None
                )
            return kind(*(self.value(hints[field], field) for field in names))
        return rng.choice([0, None, "x"])

    def learn(self, reply: Reply) -> None:
        """Remembers numbers that the server gave, as what is nearly right gets further."""
        body = reply.body
        if isinstance(body, Granted):
            self.seen += [body.range.grant, body.range.arena, body.range.start, body.range.stop]
        elif isinstance(body, Leased):
            self.seen += [body.lease, *body.ids[:3], *(h.block for h in body.places.blocks)]
        elif isinstance(body, Opened) and body.partition != self.others:
            self.partition = body.partition


def fuzz(
    store: tq.Server, healthy: Healthy, speak: Speak, speak_locally: Speak, seed: int, seconds: float
) -> int:
    """Says what a `Fuzzer` makes to each server for some time; returns how many replies came."""
    with tq.connect(store) as queue:
        number = queue.partition("fuzz", tasks={"t": ["x"]})._calls.number
        units = [unit.address for unit in queue.stats().units]
    fuzzer = Fuzzer(seed, number, healthy.number)
    rng = fuzzer.rng
    peers: list[Any] = []
    heard = 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if len(peers) < 4 or rng.random() < 0.01:
            new = [speak(store.address), speak_locally(store.local), *map(speak, units[:2])]
            for peer in peers:
                peer.close()
            peers = new
            for peer in peers:
                peer.hello()
        peer = rng.choice(peers)
        unit = peer in peers[2:]
        try:
            for _ in range(rng.randrange(1, 20)):
                message = fuzzer.request(unit) if rng.random() < 0.8 else fuzzer.broken(unit)
                with_payload = unit and rng.random() < 0.5
                peer.send(message, *([rng.randbytes(rng.choice([0, 1, 64, 4096]))] if with_payload else []))
            while not peer.hears_nothing(2):
                reply = peer.hear_any()
                heard += 1
                fuzzer.learn(reply)
                if isinstance(reply.body, Failure):
                    assert reply.body.kind in REFUSALS, reply
                    if reply.body.kind == "HelloRequired":
                        peer.hello()
        except (ConnectionError, AssertionError) as error:
            if isinstance(error, AssertionError) and "hung up" not in str(error):
                raise
            for one in peers:
                one.close()
            peers = []
        assert not healthy.failed, healthy.failed
    return heard


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [(1, 2.0), *(pytest.param(seed, 20.0, marks=pytest.mark.slow) for seed in (2, 3, 4))],
)
def test_whatever_fits_the_types_is_answered_and_disturbs_nobody(
    seed: int, seconds: float, store: tq.Server, healthy: Healthy, speak: Speak, speak_locally: Speak
) -> None:
    processes = [psutil.Process(process.pid) for process in store.processes]
    before = [process.memory_info().rss - process.memory_info().shared for process in processes]
    assert fuzz(store, healthy, speak, speak_locally, seed, seconds) > 20 * seconds
    after = [process.memory_info().rss - process.memory_info().shared for process in processes]
    grown = [now - then for now, then in zip(after, before, strict=True)]
    assert max(grown) < 10e6 + 1e6 * seconds, grown
    with tq.connect(store) as queue:
        part = queue.partition("after", tasks={"t": ["x"]})
        part.put({"x": np.arange(3)})
        part.fetch("t", 3, timeout=20).ack()


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    junk=st.binary(max_size=200) | _PLAIN.map(msgspec.msgpack.encode),
    frames=st.integers(1, 3),
)
def test_any_bytes_are_answered_with_a_refusal(
    junk: bytes, frames: int, store: tq.Server, strangers: list[Any], kind_of: Kind
) -> None:
    remote, unit, local = strangers
    for peer in (remote, unit):
        assert kind_of(peer.say(*[junk] * frames)) in ("Malformed", "HelloRequired")
    assert kind_of(local.say(junk)) in ("Malformed", "HelloRequired")


@pytest.fixture
def strangers(store: tq.Server, speak: Speak, speak_locally: Speak) -> list[Any]:
    return [speak(store.address), speak(unit_address(store)), speak_locally(store.local)]


def test_one_line_is_logged_for_each_connection(
    capfd: pytest.CaptureFixture[str], speak: Speak, speak_locally: Speak
) -> None:
    with tq.serve(1) as store:
        for peer in (speak(store.address), speak(store.address), speak_locally(store.local)):
            for _ in range(20):
                peer.say(b"junk")
    assert capfd.readouterr().err.count("refused a message") == 3


def test_what_an_id_of_elsewhere_names_is_not_found(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak, kind_of: Kind
) -> None:
    """Of another partition, another store, one that is freed, negative, beyond 64 bits."""
    part, other = queue.partition(name, tasks={"t": ["x"]}), queue.partition(name + " 2", tasks={"t": ["x"]})
    mine, theirs = part.put({"x": np.arange(2)}), other.put({"x": np.arange(2)})
    with tq.serve(1) as elsewhere, tq.connect(elsewhere) as far:
        foreign = far.partition(name, tasks={"t": ["x"]}).put({"x": np.arange(2)})
    freed = other.put({"x": np.arange(2)})
    other.drop(freed, "gone")
    for wrong in (
        [int(theirs[0])],
        foreign.tolist(),
        freed.tolist(),
        [1 << 62],
        [int(mine[0]), int(theirs[1])],
    ):
        for call in (
            lambda wrong=wrong: part.get(wrong),
            lambda wrong=wrong: part.update(wrong, {"y": np.arange(len(wrong))}),
            lambda wrong=wrong: part.drop(wrong, "no"),
        ):
            with pytest.raises(tq.UnknownSample):
                call()
    peer = speak(store.address)
    peer.hello()
    for at, wrong in enumerate((-1, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1), start=1):
        assert kind_of(peer.ask(at, Locate(part._calls.number, [wrong], None))) == "UnknownSample"
    assert part.ledger("t").pending == mine.tolist()
    assert other.ledger("t").pending == theirs.tolist()


def test_no_client_of_another_host_names_a_folder_of_this_one(
    store: tq.Server, speak: Speak, kind_of: Kind, tmp_path: Path
) -> None:
    peer = speak(store.address)
    peer.hello()
    assert kind_of(peer.ask(1, Snapshot(str(tmp_path / "there")))) == "Unauthorized"
    assert kind_of(peer.ask(2, Restore(str(tmp_path)))) == "Unauthorized"
    assert not list(tmp_path.iterdir())
    with tq.connect(store) as queue:
        calls = queue._servers
        for folder in ("relative", "\0", "a" * 300):
            with pytest.raises(tq.InvalidArgument):
                run_steps(queue, [Exchange(calls.controller, Snapshot(folder), time.monotonic() + 20)])


def test_what_is_added_up_cannot_go_beyond_64_bits(
    queue: tq.Client, name: str, store: tq.Server, speak_locally: Speak, kind_of: Kind, tmp_path: Path
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]}, length_field="n")
    for length in (-1, 1 << 40, (1 << 63) - 1):
        with pytest.raises(tq.InvalidArgument, match="length"):
            part.put({"x": np.arange(3), "n": np.full(3, length)}, groups=["g"] * 3)
    ids = part.put({"x": np.arange(3), "n": np.full(3, (1 << 40) - 1)}, groups=["g"] * 3)
    with pytest.raises(tq.InvalidArgument, match="length"):
        part.update(ids, {"n": np.full(3, -1)})
    peer = speak_locally(store.local)
    peer.hello()
    most, number = (1 << 64) - 1, part._calls.number
    wrong: list[Any] = [
        messages.CloseGroup(number, "k", *sizes) for sizes in ((most, -(1 << 63)), (3, 4), (3, -1))
    ]
    wrong += [messages.Admit(number, *said, 1.0) for said in ((most, 1), (0, most), (0, 0))]
    wrong.append(messages.Advance(number, most))
    assert {kind_of(peer.ask(at, body)) for at, body in enumerate(wrong, start=1)} == {"InvalidArgument"}
    queue.stats()
    queue.snapshot(tmp_path / "snapshot")


def run_steps(queue: tq.Client, exchanges: list[Exchange]) -> None:
    def steps() -> Any:
        yield exchanges

    run(queue._channel, steps())
