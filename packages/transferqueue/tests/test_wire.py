"""What a server does with peers that are wrong, hostile, old, or repeat themselves."""

import socket
import threading
from collections.abc import Buffer, Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import transferqueue as tq
import zmq
from transferqueue.samplers import InOrder
from transferqueue.values import frame
from transferqueue.values.encode import plan_fields
from transferqueue.wire.messages import (
    PROTOCOL,
    Ack,
    Commit,
    CommitUpdate,
    Done,
    Failure,
    Fetch,
    Hello,
    Leased,
    Read,
    ReadStats,
    Reply,
    Request,
    RequestBody,
    Reserve,
    Reserved,
    Stats,
    Store,
    Welcome,
    decode_reply,
    encoder,
)


class Raw:
    """A peer that says exactly what a test tells it to."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(address)

    def hello(self, token: str = "", client: int = 7, protocol: int = PROTOCOL) -> Reply:
        return self.ask(0, Hello(protocol, token, client))

    def ask(
        self, number: int, body: RequestBody, *payload: Buffer, low: int = 0, timeout: float = 20.0
    ) -> Reply:
        return self.say(encoder.encode(Request(number, low, timeout, body)), *payload)

    def say(self, *frames: Buffer) -> Reply:
        self.socket.send_multipart(frames)
        return self.hear()

    def hear(self) -> Reply:
        return decode_reply(self.socket.recv_multipart()[0])

    def hears_nothing(self, milliseconds: int = 200) -> bool:
        return not self.socket.poll(milliseconds)

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def raw(address: str) -> Iterator[Raw]:
    peer = Raw(address)
    try:
        yield peer
    finally:
        peer.close()


def unit_address(queue: tq.Client, unit: int = 0) -> str:
    return f"tcp://127.0.0.1:{queue._servers.addresses[unit].port}"


def failure(reply: Reply) -> str:
    assert isinstance(reply.body, Failure), reply
    return reply.body.kind


@pytest.mark.parametrize("which", ["controller", "unit"])
def test_bytes_that_are_no_message_are_refused_and_disturb_nobody(
    which: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with tq.serve(1) as store, tq.connect(store) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        address = store.address if which == "controller" else unit_address(queue)
        good = encoder.encode(Request(1, 0, 1.0, ReadStats()))
        with raw(address) as peer:
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
                [msgspec.msgpack.encode([1, 0, float("nan"), ["ReadStats"]])],
                [b"\x91" * 100_000],
                [b"\x94\x01\x00\xcb" + bytes(8) + b"\x93\xa4Read\xdd\xff\xff\xff\xff"],
            ):
                assert failure(peer.say(*junk)) == "Malformed", junk
            assert failure(peer.ask(1, ReadStats())) == "HelloRequired"
            assert isinstance(peer.hello().body, Welcome)
            wrong = Ack(0, 1) if which == "unit" else Read([], None)
            assert failure(peer.ask(2, wrong)) == "Malformed"
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
        part.put({"x": np.arange(3)})
        assert part.fetch("t", 3)["x"].values.tolist() == [0, 1, 2]
    said = capfd.readouterr().err
    assert said.count("refused a message") == 1
    assert "Traceback" not in said


def test_requests_with_senseless_numbers_are_refused(store: tq.Server, queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    number = part._calls.number
    spec = {"x": tq.FieldSpec("int64", (), True)}
    with raw(store.address) as peer:
        peer.hello()
        fetch = Fetch(number, "t", 1, InOrder(), None, None, None, False, 60.0)
        for at, (body, kind) in enumerate(
            [
                (Reserve(99, 1, 1, spec, None, {}), "UnknownName"),
                (Reserve(-1, 1, 1, spec, None, {}), "UnknownName"),
                (Reserve(number, -1, 1, spec, None, {}), "InvalidArgument"),
                (Reserve(number, 1, -1, spec, None, {}), "InvalidArgument"),
                (Commit(12345, spec, None, {}, 0, 0), "Timeout"),
                (CommitUpdate(number, [1], spec, 1), "UnknownSample"),
                (msgspec.structs.replace(fetch, count=0), "InvalidArgument"),
                (msgspec.structs.replace(fetch, lease_seconds=-1.0), "InvalidArgument"),
                (msgspec.structs.replace(fetch, lease_seconds=float("nan")), "InvalidArgument"),
                (msgspec.structs.replace(fetch, sampler=tq.samplers.Groups(0)), "InvalidArgument"),
                (msgspec.structs.replace(fetch, task="nobody"), "UnknownName"),
            ],
            start=1,
        ):
            assert failure(peer.ask(at, body)) == kind, body
        reserved = peer.ask(50, Reserve(number, 2, 64, spec, None, {})).body
        assert isinstance(reserved, Reserved)
        assert failure(peer.ask(51, Commit(reserved.reservation, spec, ["g"], {}, 0, 0))) == "InvalidArgument"
    assert queue.stats()["partitions"][name]["reserved_samples"] == 0
    assert part.ledger("t").pending == []


def test_a_payload_that_does_not_fit_its_description_is_refused(queue: tq.Client) -> None:
    header, payload = frame.encode(*plan_fields({"x": np.arange(3)}))
    with raw(unit_address(queue)) as peer:
        peer.hello()
        samples = queue.stats()["units"][0]["samples"]
        wrong = msgspec.structs.replace(header, checksum=header.checksum ^ 1)
        assert failure(peer.ask(1, Store([1, 2, 3], wrong, True), payload)) == "Corrupt"
        assert failure(peer.ask(2, Store([1, 2, 3], header, True), payload[:-1])) == "Corrupt"
        assert failure(peer.ask(3, Store([1, 2, 3], header, True))) == "Corrupt"
        assert failure(peer.ask(4, Store([1, 2], header, True), payload)) == "InvalidArgument"
        assert queue.stats()["units"][0]["samples"] == samples


def test_a_repeated_request_has_one_effect(store: tq.Server, queue: tq.Client, name: str) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    number = part._calls.number
    header, payload = frame.encode(*plan_fields({"x": np.arange(3)}))
    spec = {"x": tq.FieldSpec("int64", (), True)}
    with raw(store.address) as peer:
        peer.hello(client=11)
        reserve = Reserve(number, 3, len(payload), spec, None, {})
        reserved = peer.ask(1, reserve).body
        assert isinstance(reserved, Reserved)
        assert peer.ask(1, reserve).body == reserved
        ids = list(range(reserved.first, reserved.first + 3))
        with raw(unit_address(queue, reserved.unit)) as unit:
            unit.hello(client=11)
            for _ in range(2):
                assert isinstance(unit.ask(1, Store(ids, header, True), payload).body, Done)
        for _ in range(3):
            assert isinstance(peer.ask(2, Commit(reserved.reservation, spec, None, {}, 0, 0)).body, Done)
        fetch = Fetch(number, "t", 2, InOrder(), None, None, None, False, 60.0)
        leased = peer.ask(3, fetch).body
        assert isinstance(leased, Leased)
        assert leased.ids == ids[:2]
        with raw(store.address) as reconnected:  # the same client by another connection
            reconnected.hello(client=11)
            assert reconnected.ask(3, fetch).body == leased
            for _ in range(2):
                assert isinstance(reconnected.ask(4, Ack(number, leased.lease)).body, Done)
            # Once the client says it has the answers, a late duplicate is dropped without one.
            assert isinstance(reconnected.ask(5, ReadStats(), low=5).body, Stats)
            reconnected.socket.send(encoder.encode(Request(3, 0, 1.0, fetch)))
            assert reconnected.hears_nothing()
        ledger = part.ledger("t")
        assert (set(ledger.acked), ledger.pending, ledger.leased) == (set(ids[:2]), ids[2:], [])


def test_a_repeated_waiting_fetch_is_answered_once_where_it_was_last_asked(
    store: tq.Server, queue: tq.Client, name: str
) -> None:
    part = queue.partition(name, tasks={"t": ["x"]})
    fetch = Fetch(part._calls.number, "t", 1, InOrder(), None, None, None, False, 60.0)
    with raw(store.address) as old, raw(store.address) as new:
        old.hello(client=12)
        old.socket.send(encoder.encode(Request(1, 0, 20.0, fetch)))
        assert old.hears_nothing(50)
        new.hello(client=12)
        new.socket.send(encoder.encode(Request(1, 0, 20.0, fetch)))
        assert new.hears_nothing(50)
        part.put({"x": np.arange(2)})
        assert isinstance(new.hear().body, Leased)
        assert old.hears_nothing(50)
    assert len(part.ledger("t").leased) == 1


def test_a_put_that_is_never_committed_leaves_nothing(
    store: tq.Server, name: str, eventually: Callable
) -> None:
    with tq.connect(store) as queue:
        part = queue.partition(name, tasks={"t": ["x"]}, max_samples=3)
        with raw(store.address) as peer:
            peer.hello(client=13)
            spec = {"x": tq.FieldSpec("int64", (), True)}
            peer.ask(1, Reserve(part._calls.number, 3, 64, spec, None, {}), timeout=0.0)
        with pytest.raises(tq.Full):
            part.put({"x": np.arange(1)}, timeout=0)
        part.put({"x": np.arange(3)}, timeout=20)  # once the reservation has lapsed


@pytest.fixture(scope="module")
def guarded() -> Iterator[tq.Server]:
    with tq.serve(1, token="secret") as server:
        yield server


def test_a_token_is_demanded_on_every_connection(guarded: tq.Server) -> None:
    for token in (None, "", "wrong", "secret "):
        with pytest.raises(tq.Unauthorized, match="token"):
            tq.connect(guarded.address, token)
    with tq.connect(guarded.address, "secret") as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        ids = part.put({"x": np.arange(3)})
        for address in (guarded.address, unit_address(queue)):
            with raw(address) as peer:
                assert failure(peer.ask(1, Read(ids.tolist(), None))) == "HelloRequired"
                assert failure(peer.hello("wrong")) == "Unauthorized"
                assert failure(peer.ask(2, Read(ids.tolist(), None))) == "HelloRequired"
        assert part.get(ids)["x"].values.tolist() == [0, 1, 2]


async def test_the_async_client_is_refused_alike(guarded: tq.Server) -> None:
    with pytest.raises(tq.Unauthorized):
        await tq.connect_async(guarded.address, "wrong")
    await (await tq.connect_async(guarded)).close()


def test_another_protocol_version_is_refused_with_the_way_out(
    store: tq.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raw(store.address) as peer:
        reply = peer.hello(protocol=PROTOCOL + 1)
        assert failure(reply) == "ProtocolMismatch"
    monkeypatch.setattr("transferqueue.wire.link.PROTOCOL", PROTOCOL + 1)
    with pytest.raises(tq.ProtocolMismatch, match="install the same transferqueue") as caught:
        tq.connect(store)
    assert (caught.value.got, caught.value.expected) == (PROTOCOL + 1, PROTOCOL)


def test_messages_beyond_the_frame_limit_are_refused() -> None:
    with tq.serve(1, max_frame_bytes="64KiB") as store, tq.connect(store) as queue:
        part = queue.partition("p", tasks={"t": ["x"]})
        with pytest.raises(tq.TooLarge) as caught:
            part.put({"x": [b"0" * 70_000]})
        assert caught.value.limit == 65_536
        for _ in range(2):
            part.put({"x": [b"0" * 40_000]})
        with pytest.raises(tq.TooLarge, match="fewer"):
            part.fetch("t", 2)
        with raw(store.address) as peer:
            peer.hello()
            peer.socket.send(b"0" * 100_000)  # the connection is cut; nobody else notices
            assert peer.hears_nothing()
        assert len(part.fetch("t", 1, timeout=20)) == 1


def test_off_loopback_demands_a_token() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "example.org", "::"):
        with pytest.raises(tq.InvalidArgument, match="token"):
            tq.serve(1, host=host)
    with tq.serve(1, host="0.0.0.0", token="secret") as store:
        address = store.address.replace("0.0.0.0", "127.0.0.1")
        with tq.connect(address, "secret") as queue:
            part = queue.partition("p", tasks={"t": ["x"]})
            assert len(part.put({"x": np.arange(3)})) == 3
            assert len(part.fetch("t", 3)) == 3


class Proxy:
    """A TCP relay whose connections a test can cut."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.accepted = 0
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self.target)
            self.pairs.append((near, far))
            self.accepted += 1
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pump, args=(source, sink))
                self.threads.append(thread)
                thread.start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # cut

    def cut(self) -> None:
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the other side was faster

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


def test_cut_connections_lose_and_repeat_nothing(store: tq.Server, name: str) -> None:
    proxy = Proxy(store.address)
    try:
        with tq.connect(proxy.address) as queue, tq.connect(store) as direct:
            part = queue.partition(name, tasks={"t": ["x"]})
            seen: list[int] = []

            def consume() -> None:
                for batch in part.stream("t", 3):
                    seen.extend(batch["x"].values.tolist())
                    batch.ack()

            consumer = threading.Thread(target=consume)
            consumer.start()
            for start in range(0, 60, 2):
                if start % 6 == 0:
                    proxy.cut()
                part.put({"x": np.arange(start, start + 2)})
            part.close()
            consumer.join(60)
            assert seen == list(range(60))
            assert proxy.accepted >= 5
            ledger = direct.partition(name).ledger("t")
            assert (len(ledger.acked), ledger.dropped, ledger.leased, ledger.pending) == (60, {}, [], [])
    finally:
        proxy.close()
