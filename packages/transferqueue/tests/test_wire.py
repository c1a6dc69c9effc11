"""What a server does with ZeroMQ peers that are wrong, old, or repeat themselves."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import transferqueue as tq
from msgspec.structs import replace
from transferqueue.samplers import Groups
from transferqueue.scheduling.wanted import Wanted
from transferqueue.wire.messages import (
    CHUNK,
    PROTOCOL,
    Ack,
    Cancel,
    Committed,
    CommitUpdate,
    Done,
    Fetch,
    Goodbye,
    Granted,
    Hello,
    Leased,
    Locate,
    Located,
    Places,
    Range,
    Read,
    ReadStats,
    Release,
    Reply,
    Request,
    Reserve,
    Stats,
    TakeSlab,
    Values,
    Welcome,
    Write,
    encoder,
)

Speak = Callable[[str], Any]
Kind = Callable[[Reply], str]


def unit_address(queue: tq.Client, unit: int = 0) -> str:
    return queue.stats().units[unit].address


def fetch_of(part: tq.Partition, count: int) -> Fetch:
    return Fetch(part._calls.number, Wanted("t", count), None, False, 60.0)


@pytest.mark.parametrize("which", ["controller", "unit"])
def test_bytes_that_are_no_message_are_refused_and_disturb_nobody(
    which: str, speak: Speak, kind_of: Kind, capfd: pytest.CaptureFixture[str]
) -> None:
    with tq.serve(1) as store, tq.connect(store, transport="zmq") as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        address = store.address if which == "controller" else unit_address(queue)
        good = encoder.encode(Request(1, 0, 1.0, ReadStats()))
        peer = speak(address)
        for junk in (
            [b""],
            [b"\xc1"],
            [b"junk " * 1000],
            [good[:-1]],
            [good, b"", b""],
            [b"", good],
            [msgspec.msgpack.encode([1, 0, 1.0, ["NoSuchRequest"]])],
            [msgspec.msgpack.encode([1, 0, 1.0, ["Read", ["a"], None]])],
            [msgspec.msgpack.encode([1, 0, 1e300, ["ReadStats"]])],
            [msgspec.msgpack.encode([1, 0, -1.0, ["ReadStats"]])],
            [msgspec.msgpack.encode([1, 0, float("nan"), ["ReadStats"]])],
            [b"\x91" * 100_000],
            [b"\x94\x01\x00\xcb" + bytes(8) + b"\x93\xa7Release\x01\xdd\xff\xff\xff\xff"],
            [b"\x94\x01\x00\xcb" + bytes(8) + b"\x93\xa7Release\x01\xdd\x0f\xff\xff\xff"],
        ):
            assert kind_of(peer.say(*junk)) == "Malformed", junk
        assert kind_of(peer.ask(1, ReadStats())) == "HelloRequired"
        assert isinstance(peer.hello().body, Welcome)
        wrong = Ack(0, 1) if which == "unit" else Read(Places(0, [], []), None)
        assert kind_of(peer.ask(2, wrong)) == "Malformed"
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
        part.put({"x": np.arange(3)})
        assert part.fetch("t", 3)["x"].values.tolist() == [0, 1, 2]
    said = capfd.readouterr().err
    assert said.count("refused a message") == 1
    assert "Traceback" not in said


def test_requests_with_senseless_numbers_are_refused(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak, kind_of: Kind, block: Any
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": np.arange(2)}).tolist()
    number, spec = part._calls.number, block.spec
    peer = speak(store.address)
    peer.hello()
    granted = peer.ask(1, TakeSlab(False)).body
    assert isinstance(granted, Granted)
    fetch = fetch_of(part, 1)
    wanted = fetch.wanted
    reserve = Reserve(number, 1, 64, 8, spec, None, {}, None, False)
    here = block.place(granted.range)
    commit = block.commit(number, here, remote=False)
    update = CommitUpdate(number, here, False, ids, 16, spec, None)
    for at, (body, kind) in enumerate(
        [
            (replace(reserve, partition=99), "UnknownName"),
            (replace(reserve, partition=-1), "UnknownName"),
            (replace(reserve, rows=-1), "InvalidArgument"),
            (replace(reserve, rows=1 << 40), "TooLarge"),
            (replace(reserve, span=-1), "InvalidArgument"),
            (replace(reserve, span=0), "InvalidArgument"),
            (replace(reserve, span=1 << 60), "InvalidArgument"),
            (replace(reserve, nbytes=-1), "InvalidArgument"),
            (replace(commit, partition=99), "UnknownName"),
            (replace(commit, rows=0), "InvalidArgument"),
            (replace(commit, rows=1 << 38), "TooLarge"),
            (replace(commit, nbytes=-1), "InvalidArgument"),
            (replace(commit, versions=[1, 2]), "InvalidArgument"),
            (replace(commit, versions=1 << 63), "InvalidArgument"),
            (replace(commit, priorities=[1, 2, (1 << 64) - 1]), "InvalidArgument"),
            (replace(commit, lengths=[]), "InvalidArgument"),
            (replace(commit, lengths=-1), "InvalidArgument"),
            (replace(commit, lengths=[0, 1, 1 << 40]), "InvalidArgument"),  # they are added up
            (replace(commit, nbytes=block.nbytes + 1), "InvalidArgument"),
            (replace(commit, group_sizes={"g": 1 << 31}), "InvalidArgument"),
            (replace(commit, groups=["g"]), "InvalidArgument"),
            (replace(commit, range=Range(12345, 0, 0, 64)), "InvalidArgument"),
            (replace(update, nbytes=-1), "InvalidArgument"),
            (replace(update, ids=[1]), "UnknownSample"),
            (replace(update, ids=[], nbytes=0), "InvalidArgument"),
            (replace(update, lengths=[1]), "InvalidArgument"),
            (replace(fetch, wanted=replace(wanted, count=0)), "InvalidArgument"),
            (replace(fetch, wanted=replace(wanted, sampler=Groups(0))), "InvalidArgument"),
            (replace(fetch, wanted=replace(wanted, task="nobody")), "UnknownName"),
            (replace(fetch, lease_seconds=-1.0), "InvalidArgument"),
            (replace(fetch, lease_seconds=float("nan")), "InvalidArgument"),
            (Locate(number, [-1], None), "UnknownSample"),
            (Locate(number, [ids[0], ids[0]], None), "InvalidArgument"),
        ],
        start=10,
    ):
        assert kind_of(peer.ask(at, body)) == kind, body
    assert queue.stats().partitions[name].samples == 2
    assert part.ledger("t").pending == ids


def test_a_commit_may_name_only_memory_that_is_its_own(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak, kind_of: Kind, block: Any
) -> None:
    """Exactly: nothing outside the grant, nothing twice, nothing of another client."""
    number = queue.partition(name, tasks={"t": ["x"]})._calls.number
    peer, other = speak(store.address), speak(store.address)
    peer.hello(client=21)
    other.hello(client=22)
    granted, theirs = peer.ask(1, TakeSlab(False)).body, other.ask(1, TakeSlab(False)).body
    assert isinstance(granted, Granted)
    assert isinstance(theirs, Granted)
    where = granted.range
    for at in range(200):
        reply = peer.ask(10 + at, block.commit(number, block.place(where, at * block.nbytes), remote=False))
        assert isinstance(reply.body, Committed)
    for at, wrong in enumerate(
        [
            block.place(where),  # the first, long before
            block.place(where, 100 * block.nbytes + 64),
            block.place(where, 300 * block.nbytes + 1),
            replace(block.place(where, 300 * block.nbytes), stop=where.stop + 64),
            replace(where, start=where.start - 64),
            replace(where, start=where.stop, stop=where.stop),
            replace(where, start=where.stop - 64, stop=where.start),
            replace(where, arena=where.arena + 1),
            replace(where, start=-64, stop=0),
            where,
            block.place(theirs.range),
            replace(theirs.range, grant=where.grant),
            replace(where, grant=theirs.range.grant),
        ],
        start=1000,
    ):
        assert kind_of(peer.ask(at, block.commit(number, wrong, remote=False))) == "InvalidArgument", wrong
    last = block.place(where, 300 * block.nbytes)
    assert isinstance(peer.ask(2000, block.commit(number, last, remote=False)).body, Committed)
    assert queue.stats().partitions[name].samples == 603


def test_a_payload_that_does_not_fit_its_description_is_refused(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak, kind_of: Kind, block: Any
) -> None:
    """Nor one that would lie outside its grant: it never lands."""
    part = queue.partition(name, tasks={"t": ["x"]})
    controller = speak(store.address)
    controller.hello(client=31)
    granted = controller.ask(1, TakeSlab(True)).body
    assert isinstance(granted, Granted)
    unit = speak(unit_address(queue, granted.unit))
    unit.hello(client=31)
    where = block.place(granted.range)
    good = bytes(block.laid_out(where.grant))
    changed = bytearray(good)
    changed[-64] ^= 1
    wide = replace(where, stop=where.stop + 64)
    outside = Range(where.grant, where.arena, granted.range.stop, granted.range.stop + block.nbytes)
    before = part.put({"x": np.arange(100, 103)})
    for at, (body, payload, kind) in enumerate(
        [
            (Write(where, 0), bytes(changed), "Corrupt"),
            (Write(wide, 0), good + bytes(64), "Corrupt"),
            (Write(where, 0), b"", "Corrupt"),
            (Write(where, 0), good[:10], "Corrupt"),
            (Write(where, 0), good + b"0", "Corrupt"),
            (Write(where, 0), bytes(block.laid_out(where.grant + 1)), "UnknownSample"),
            (Write(replace(where, grant=where.grant + 1), 0), good, "InvalidArgument"),
            (Write(replace(where, arena=where.arena + 1), 0), good, "InvalidArgument"),
            (Write(outside, 0), good, "InvalidArgument"),
            (Write(replace(where, start=-64), 0), good, "InvalidArgument"),
            (Write(replace(where, start=where.stop, stop=where.start), 0), good, "InvalidArgument"),
        ],
        start=1,
    ):
        assert kind_of(unit.ask(at, body, payload)) == kind, at
    assert part.get(before)["x"].values.tolist() == [100, 101, 102]
    assert part.ledger("t").pending == before.tolist()


def test_a_read_of_places_that_are_not_there_is_refused(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak, kind_of: Kind
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": np.arange(3)}).tolist()
    controller, unit = speak(store.address), speak(unit_address(queue))
    controller.hello()
    unit.hello()
    located = controller.ask(1, Locate(part._calls.number, ids, None)).body
    assert isinstance(located, Located)
    places = located.places
    [handle] = places.blocks
    for at, (wrong, kind) in enumerate(
        [
            (replace(places, rows=1 << 60), "InvalidArgument"),
            (replace(places, rows=-1), "InvalidArgument"),
            (replace(places, runs=[(0, 3, 1, 0)]), "InvalidArgument"),
            (replace(places, runs=[(0, 3, -1, 0)]), "InvalidArgument"),
            (replace(places, runs=[(0, 3, 0, 1)]), "InvalidArgument"),
            (replace(places, runs=[(-1, 3, 0, 0)]), "InvalidArgument"),
            (replace(places, runs=[(2, 3, 0, 0)]), "InvalidArgument"),
            (replace(places, runs=[(0, -3, 0, 0)]), "InvalidArgument"),
            (replace(places, blocks=[replace(handle, grant=handle.grant + 1)]), "UnknownSample"),
            (replace(places, blocks=[replace(handle, start=handle.start + 64)]), "UnknownSample"),
            (replace(places, blocks=[replace(handle, stop=handle.stop + 64)]), "Corrupt"),
            (replace(places, blocks=[replace(handle, stop=handle.start)]), "Corrupt"),
            (replace(places, blocks=[replace(handle, arena=99)]), "Corrupt"),
            (replace(places, blocks=[replace(handle, start=-64)]), "Corrupt"),
            (replace(places, blocks=[replace(handle, stop=1 << 62)]), "Corrupt"),
        ],
        start=1,
    ):
        assert kind_of(unit.ask(at, Read(wrong, None))) == kind, wrong
    assert kind_of(unit.ask(90, Read(places, ["x", "y"]))) == "FieldNotReady"
    assert isinstance(unit.ask(91, Read(places, None)).body, Values)


def test_a_repeated_request_has_one_effect(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak, block: Any
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    peer = speak(store.address)
    peer.hello(client=11)
    granted = peer.ask(1, TakeSlab(True)).body
    assert isinstance(granted, Granted)
    assert peer.ask(1, TakeSlab(True)).body == granted
    where = block.place(granted.range)
    unit = speak(unit_address(queue, granted.unit))
    unit.hello(client=11)
    for _ in range(2):
        assert isinstance(unit.ask(1, Write(where, 0), block.laid_out(where.grant)).body, Done)
    commit = block.commit(part._calls.number, where, remote=True)
    first = peer.ask(2, commit).body
    assert isinstance(first, Committed)
    ids = list(range(first.first, first.first + 3))
    for _ in range(2):
        assert peer.ask(2, commit).body == first
    fetch = fetch_of(part, 2)
    leased = peer.ask(3, fetch).body
    assert isinstance(leased, Leased)
    assert leased.ids == ids[:2]
    again = speak(store.address)  # the same client by another connection
    again.hello(client=11, outstanding=[3])
    assert again.ask(3, fetch).body == leased
    for _ in range(2):
        assert isinstance(again.ask(4, Ack(part._calls.number, leased.lease)).body, Done)
    # Once the client says it has the answers, a late duplicate is dropped without one.
    assert isinstance(again.ask(5, ReadStats(), low=5).body, Stats)
    again.send(encoder.encode(Request(3, 0, 1.0, fetch)))
    assert again.hears_nothing()
    ledger = part.ledger("t")
    assert (set(ledger.acked), ledger.pending, ledger.leased) == (set(ids[:2]), ids[2:], [])


def test_while_an_old_request_waits_later_answers_are_forgotten_and_their_repeats_dropped(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak, block: Any
) -> None:
    part = queue.partition(name, tasks={"t": ["x"], "other": ["x"]})
    number = part._calls.number
    peer = speak(store.address)
    peer.hello(client=14)
    waiting = Fetch(number, Wanted("t", 1000), None, False, 60.0)
    peer.send(encoder.encode(Request(1, 1, 60.0, waiting)))
    granted = peer.ask(2, TakeSlab(False), low=1).body
    assert isinstance(granted, Granted)
    commit = block.commit(number, block.place(granted.range), remote=False)
    assert isinstance(peer.ask(3, commit, low=1).body, Committed)
    peer.send(encoder.encode(Request(4, 1, 1.0, ReadStats(), [2, 3])))
    assert isinstance(peer.hear().body, Stats)
    peer.send(encoder.encode(Request(3, 1, 1.0, commit)))
    assert peer.hears_nothing()
    assert queue.stats().partitions[name].samples == 3


def test_a_release_that_comes_twice_lets_go_once(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak, eventually: Callable
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    ids = part.put({"x": np.arange(3)}).tolist()
    peer = speak(store.address)
    peer.hello(client=15)
    for at in (1, 2):
        located = peer.ask(at, Locate(part._calls.number, ids, None)).body
        assert isinstance(located, Located)
    [handle] = located.places.blocks
    part.fetch("t", 3).ack()
    for _ in range(2):
        peer.send(encoder.encode(Request(0, 0, 1.0, Release(1, [handle.block]))))
    assert isinstance(peer.ask(3, ReadStats()).body, Stats)
    eventually(lambda: queue.stats().memory.pinned_only >= handle.stop - handle.start)
    peer.send(encoder.encode(Request(0, 0, 1.0, Hello(PROTOCOL, "", 15))))  # an old one, late
    assert isinstance(peer.hear().body, Welcome)
    assert queue.stats().memory.pinned_only >= handle.stop - handle.start
    peer.send(encoder.encode(Request(0, 0, 1.0, Release(2, [handle.block]))))
    eventually(lambda: queue.stats().memory.pinned_only == 0)


def test_a_repeated_waiting_fetch_is_answered_once_where_it_was_last_asked(
    store: tq.Server, queue: tq.Client, name: str, speak: Speak
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    fetch = encoder.encode(Request(1, 0, 20.0, fetch_of(part, 1)))
    old, new = speak(store.address), speak(store.address)
    old.hello(client=12)
    old.send(fetch)
    assert old.hears_nothing(50)
    new.hello(client=12, outstanding=[1])
    new.send(fetch)
    assert new.hears_nothing(50)
    part.put({"x": np.arange(2)})
    assert isinstance(new.hear().body, Leased)
    assert old.hears_nothing(50)
    assert len(part.ledger("t").leased) == 1


def test_a_put_that_is_never_committed_leaves_nothing(
    store: tq.Server, name: str, speak: Speak, block: Any
) -> None:
    with tq.connect(store) as queue:
        part = queue.partition(name, tasks={"t": ["x"]}, max_samples=3)
        peer = speak(store.address)
        peer.hello(client=13)
        reserve = Reserve(part._calls.number, 3, 1 << 20, 24, block.spec, None, {}, None, True)
        assert isinstance(peer.ask(1, reserve, timeout=0.0).body, Granted)
        with pytest.raises(tq.Full):
            part.put({"x": np.arange(1)}, timeout=0)
        part.put({"x": np.arange(3)}, timeout=20)  # once the reservation has lapsed


@pytest.mark.parametrize("step", ["waits for room", "waits for its bytes"])
def test_a_waiting_put_that_is_given_up_leaves_nothing(
    step: str,
    store: tq.Server,
    queue: tq.Client,
    name: str,
    speak: Speak,
    kind_of: Kind,
    block: Any,
    eventually: Callable,
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]}, max_samples=3)
    part.put({"x": np.arange(3)})
    before = queue.stats().memory
    room = step == "waits for room"
    peer = speak(store.address)
    peer.hello()
    granted = peer.ask(1, TakeSlab(not room)).body
    assert isinstance(granted, Granted)
    for at in range(10, 30, 2):
        commit = block.commit(part._calls.number, block.place(granted.range), remote=not room)
        peer.send(encoder.encode(Request(at, at, 20.0, commit)))
        assert peer.hears_nothing(20)
        answers = {reply.id: reply for reply in (peer.ask(at + 1, Cancel(at), low=at), peer.hear())}
        assert kind_of(answers[at]) == "Timeout"
        granted = peer.ask(1000 + at, TakeSlab(not room)).body
        assert isinstance(granted, Granted)
    assert queue.stats().waiting_puts == 0
    peer.ask(3000, Goodbye())
    eventually(lambda: queue.stats().memory == before)
    part.fetch("t", 3).ack()
    assert len(part.put({"x": np.arange(3)}, timeout=5)) == 3


@pytest.fixture(scope="module")
def guarded() -> Iterator[tq.Server]:
    with tq.serve(1, token="secret") as server:
        yield server


def test_a_token_is_demanded_on_every_connection(guarded: tq.Server, speak: Speak, kind_of: Kind) -> None:
    for token in (None, "", "wrong", "secret "):
        with pytest.raises(tq.Unauthorized, match="token"):
            tq.connect(guarded.address, token)
    with tq.connect(guarded.address, "secret", transport="zmq") as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(3)})
        for address in (guarded.address, unit_address(queue)):
            peer = speak(address)
            assert kind_of(peer.ask(1, ReadStats())) == "HelloRequired"
            assert kind_of(peer.hello("wrong")) == "Unauthorized"
            assert kind_of(peer.ask(2, ReadStats())) == "HelloRequired"
        assert part.get(ids)["x"].values.tolist() == [0, 1, 2]


async def test_the_async_client_is_refused_alike(guarded: tq.Server) -> None:
    for transport in ("zmq", "shm"):
        with pytest.raises(tq.Unauthorized):
            await tq.connect_async(guarded.address, "wrong", transport=transport)
        await (await tq.connect_async(guarded, transport=transport)).close()


@pytest.mark.parametrize("protocol", [0, PROTOCOL - 1, PROTOCOL + 1, -1, 1 << 40])
def test_another_protocol_version_is_refused(
    protocol: int, store: tq.Server, speak: Speak, kind_of: Kind
) -> None:
    peer = speak(store.address)
    reply = peer.hello(protocol=protocol)
    assert kind_of(reply) == "ProtocolMismatch"
    assert reply.id == 0
    assert kind_of(peer.ask(1, ReadStats())) == "HelloRequired"


@pytest.mark.parametrize(("transport", "module"), [("zmq", "link"), ("shm", "local_session")])
def test_a_client_of_another_version_is_told_the_way_out(
    transport: str, module: str, store: tq.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"transferqueue.wire.{module}.PROTOCOL", PROTOCOL + 1)
    with pytest.raises(tq.ProtocolMismatch, match="install the same transferqueue") as caught:
        tq.connect(store, transport=transport)
    assert (caught.value.got, caught.value.expected) == (PROTOCOL + 1, PROTOCOL)


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_messages_beyond_the_frame_limit_are_refused(transport: str, speak: Speak) -> None:
    with tq.serve(1, max_frame_bytes="64KiB") as store, tq.connect(store, transport=transport) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        with pytest.raises(tq.TooLarge) as caught:
            part.put({"x": [b"0" * 70_000]})
        assert caught.value.limit == 65_536
        for _ in range(2):
            part.put({"x": [b"0" * 40_000]})
        if transport == "zmq":
            with pytest.raises(tq.TooLarge, match="fewer"):
                part.fetch("t", 2)
        peer = speak(unit_address(queue))
        peer.hello()
        peer.send(bytes(1 << 27))  # the connection is cut; nobody else notices
        assert peer.hears_nothing()
        assert len(part.fetch("t", 1, timeout=20)) == 1


def test_large_payload_goes_in_parts_and_comes_back_whole(store: tq.Server, name: str) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 62, (3, CHUNK // 8 + 5))
    with tq.connect(store, transport="zmq") as queue:
        part = queue.partition(name, tasks={"t": ["x"]})
        ids = part.put({"x": list(values)})
        for row, value in zip(part.get(ids)["x"], values, strict=True):
            np.testing.assert_array_equal(row, value)


def test_off_loopback_demands_a_token() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "example.org", "::"):
        with pytest.raises(tq.InvalidArgument, match="token"):
            tq.serve(1, host=host)
    with tq.serve(1, host="0.0.0.0", token="secret") as store:
        address = store.address.replace("0.0.0.0", "127.0.0.1")
        with tq.connect(address, "secret", transport="zmq") as queue:
            part = queue.partition("p", tasks={"t": ["x"]})
            assert len(part.put({"x": np.arange(3)})) == 3
            assert len(part.fetch("t", 3)) == 3
