import os
import secrets
import select
import socket
import time
import urllib.request
from collections.abc import Buffer, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import transferqueue as tq
import zmq
from msgspec.structs import replace
from transferqueue.introspection.endpoint import serve_metrics
from transferqueue.values import frame
from transferqueue.values.block import block_nbytes, write_block
from transferqueue.values.encode import plan_fields
from transferqueue.wire.messages import (
    PROTOCOL,
    Commit,
    Done,
    Failure,
    Hello,
    Range,
    Reply,
    Request,
    RequestBody,
    decode_reply,
    encoder,
)


@pytest.fixture(scope="module")
def store() -> Iterator[tq.Server]:
    """One store with two units for a module; every test uses partitions of its own."""
    with tq.serve(storage_units=2) as server:
        yield server


@pytest.fixture
def queue(store: tq.Server) -> Iterator[tq.Client]:
    with tq.connect(store) as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A partition name of the test's own."""
    return request.node.name


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Asks again for up to 20 s until the claim holds: between processes there is no event to wait for."""

    def wait(claim: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not claim():
            assert time.monotonic() < deadline, "the claim never came true"
            time.sleep(0.01)

    return wait


class RemotePeer:
    """A ZeroMQ peer of a server that says exactly what a test tells it to."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._heard: list[Reply] = []

    def hello(
        self, token: str = "", client: int | None = None, protocol: int = PROTOCOL, **said: Any
    ) -> Reply:
        client = secrets.randbits(62) if client is None else client
        return self.ask(0, Hello(protocol, token, client, **said))

    def ask(
        self, number: int, body: RequestBody, *payload: Buffer, low: int = 0, timeout: float = 20.0
    ) -> Reply:
        return self.say(encoder.encode(Request(number, low, timeout, body)), *payload)

    def say(self, *frames: Buffer) -> Reply:
        self.send(*frames)
        return self.hear()

    def send(self, *frames: Buffer) -> None:
        self.socket.send_multipart(frames)

    def hear(self) -> Reply:
        """The next reply; what the controller says to find out whether one is there is left out."""
        assert not self.hears_nothing(20_000), "no reply"
        return self.hear_any()

    def hear_any(self) -> Reply:
        """The next reply, which is there already."""
        return self._heard.pop(0) if self._heard else decode_reply(self.socket.recv_multipart(zmq.NOBLOCK)[0])

    def hears_nothing(self, milliseconds: int = 200) -> bool:
        """Whether no reply comes for so long; what the controller asks by itself is none."""
        deadline = time.monotonic() + milliseconds / 1000
        while not self._heard and self.socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            reply = self.hear_any()
            if reply.id or not isinstance(reply.body, Done):
                self._heard.append(reply)
        return not self._heard

    def close(self) -> None:
        self.context.destroy(linger=0)


class LocalPeer:
    """A peer of the controller's Unix socket that says exactly what a test tells it to."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect("\0" + name)
        self.descriptors: list[int] = []
        self._inbox = b""

    def hello(
        self, token: str = "", client: int | None = None, protocol: int = PROTOCOL, **said: Any
    ) -> Reply:
        client = secrets.randbits(62) if client is None else client
        return self.ask(0, Hello(protocol, token, client, **said))

    def ask(self, number: int, body: RequestBody, *, low: int = 0, timeout: float = 20.0) -> Reply:
        return self.say(encoder.encode(Request(number, low, timeout, body)))

    def say(self, message: bytes) -> Reply:
        self.send(message)
        return self.hear()

    def send(self, message: bytes) -> None:
        self.socket.sendall(len(message).to_bytes(4, "little") + message)

    def hear(self) -> Reply:
        message = self._take(int.from_bytes(self._take(4), "little"))
        return decode_reply(message)

    hear_any = hear

    def _take(self, nbytes: int) -> bytes:
        while len(self._inbox) < nbytes:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 253)
            self.descriptors += descriptors
            assert data, "the controller hung up"
            self._inbox += data
        taken, self._inbox = self._inbox[:nbytes], self._inbox[nbytes:]
        return taken

    def hears_nothing(self, milliseconds: int = 200) -> bool:
        return not self._inbox and not select.select([self.socket], [], [], milliseconds / 1000)[0]

    def hung_up(self) -> bool:
        """Whether the controller ends the connection within 20 s, whatever it says before."""
        try:
            while socket.recv_fds(self.socket, 1 << 16, 253)[0]:
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


@pytest.fixture
def speak() -> Iterator[Callable[[str], RemotePeer]]:
    """Connects a `RemotePeer` to an address."""
    peers: list[RemotePeer] = []

    def connect(address: str) -> RemotePeer:
        peers.append(RemotePeer(address))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


@pytest.fixture
def speak_locally() -> Iterator[Callable[[str], LocalPeer]]:
    """Connects a `LocalPeer` to a store's local listener."""
    peers: list[LocalPeer] = []

    def connect(name: str) -> LocalPeer:
        peers.append(LocalPeer(name))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


@pytest.fixture
def kind_of() -> Callable[[Reply], str]:
    """The class name of the error that a reply brings."""

    def kind(reply: Reply) -> str:
        assert isinstance(reply.body, Failure), reply
        return reply.body.kind

    return kind


class Block:
    """Three samples of a field "x", int64, as one block.

    Attributes:
        spec: of the field.
        nbytes: of the block.
    """

    spec = {"x": tq.FieldSpec("int64", (), True)}  # noqa: RUF012

    def __init__(self) -> None:
        _, self._plans = plan_fields({"x": np.arange(3)})
        self._layout = block_nbytes(frame.layout(3, self._plans))
        self.nbytes = self._layout.nbytes

    def laid_out(self, grant: int) -> np.ndarray:
        """Its bytes under a grant, checked."""
        room = np.empty(self.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        out = room[start : start + self.nbytes]
        write_block(out, grant, self._layout, self._plans, checksum=True)
        return out

    def place(self, granted: Range, at: int = 0) -> Range:
        """Where it lies in a grant."""
        return replace(granted, start=granted.start + at, stop=granted.start + at + self.nbytes)

    def commit(self, partition: int, where: Range, *, remote: bool) -> Commit:
        return Commit(partition, where, remote, 3, 24, self.spec, None, {}, 0, 0, 0, None)


@pytest.fixture
def block() -> Block:
    return Block()


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A port that nobody listens on."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


@pytest.fixture
def endpoint(store: tq.Server) -> Iterator[str]:
    """Where the metrics of the module's store are served."""
    pytest.importorskip("prometheus_client")
    with serve_metrics(store, port=0) as server:
        yield server.url


@pytest.fixture
def scraped() -> Callable[[str], dict[tuple[str, frozenset[tuple[str, str]]], float]]:
    """Scrapes a URL: all samples, by name and labels, as prometheus_client reads them."""
    parser = pytest.importorskip("prometheus_client.parser")

    def scrape(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        with urllib.request.urlopen(url, timeout=20) as answer:
            text = answer.read().decode()
        found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in parser.text_string_to_metric_families(text):
            assert family.documentation
            for sample in family.samples:
                key = (sample.name.removeprefix("transferqueue_"), frozenset(sample.labels.items()))
                assert key not in found
                found[key] = sample.value
        return found

    return scrape
