"""Peers that mean harm, at every port: nobody else is disturbed, no thread dies, no memory is taken."""

import socket
import threading

import dcs
import msgspec
import pytest
import torch
import zmq
from dcs.control.messages import PROTOCOL
from dcs.plan.blocks import MAX_ROWS
from dcs.wire import frames, streams
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TENSORS = {"w": torch.arange(50_000, dtype=torch.float32)}
NBYTES = 200_000
TOKEN = "secret"


@pytest.fixture(scope="module")
def hub():
    """A coordinator, a publisher and a subscriber that are there for all examples."""
    layout = dcs.layout.of(TENSORS)
    options = {"run": "r", "layout": layout, "token": TOKEN, "wires": ("tcp",), "chunk_bytes": 16 << 10}
    deaths: list[object] = []
    before, threading.excepthook = threading.excepthook, deaths.append
    with (
        dcs.Coordinator(lease_seconds=5.0, token=TOKEN) as coordinator,
        dcs.Publisher(coordinator.address, **options) as publisher,
        dcs.Subscriber(coordinator.address, name="peer", **options) as subscriber,
    ):
        publisher.publish(0, TENSORS)
        subscriber.fetch(0)
        yield coordinator, publisher, subscriber
        publisher.publish(1, TENSORS)  # and all of them go on
        assert torch.equal(subscriber.fetch(1)["w"], TENSORS["w"])
        with dcs.Subscriber(coordinator.address, name="late", **options) as late:
            assert torch.equal(late.fetch(1)["w"], TENSORS["w"])
    threading.excepthook = before
    assert deaths == []


def ports(hub) -> tuple[int, int]:
    _, publisher, subscriber = hub
    return publisher.endpoint.port, subscriber._server.port


def talk(port: int, data: bytes, greeted: dcs.Layout | None = None) -> bytes:
    """What is answered to these bytes, up to the end; after a proper greeting if there is a layout."""
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.settimeout(10)
        try:
            if greeted is not None:
                hello = frames.Hello("r", "hostile", 7, greeted.fingerprint, TOKEN, 16 << 10)
                frames.send_hello(sock, hello)
                assert isinstance(frames.receive_hello(sock, "it"), frames.Welcome)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = bytearray()
            while more := sock.recv(1 << 16):
                answer += more
            return bytes(answer)
        except TimeoutError:
            raise
        except OSError:
            return b""  # it has hung up already


EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@EXAMPLES
@given(st.integers(0, 1), st.binary(max_size=300), st.booleans())
def test_any_bytes_before_a_greeting(hub, which, noise, headed):
    header = frames.HELLO.pack(b"dcsw", PROTOCOL, len(noise)) if headed else b""
    talk(ports(hub)[which], header + noise)


HELLOS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["hello", "welcome", "refusal", "else", 3, None]),
        "run": st.one_of(st.just("r"), st.text(max_size=5), st.integers()),
        "name": st.text(max_size=5),
        "member": st.integers(-(2**63), 2**64 - 1),
        "fingerprint": st.text(max_size=70),
        "token": st.one_of(st.none(), st.just(TOKEN), st.text(max_size=5), st.integers()),
        "chunk_bytes": st.integers(-1, 2**63),
    }
)


@EXAMPLES
@given(st.integers(0, 1), HELLOS)
def test_greetings_that_are_almost_right(hub, which, fields):
    body = msgspec.msgpack.encode(fields)
    talk(ports(hub)[which], frames.HELLO.pack(b"dcsw", PROTOCOL, len(body)) + body)


U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@st.composite
def requests(draw) -> bytes:
    operation = draw(st.integers(0, 7))
    small = st.one_of(st.integers(0, 40), U32)
    count = draw(small)
    rows = b""
    if operation == frames.SELECT:
        edge = st.sampled_from([0, 1, 8, NBYTES - 1, NBYTES, NBYTES + 1, 2**62, -1, -(2**63), 2**63 - 1])
        made = draw(st.lists(st.tuples(edge, edge, edge, edge), max_size=3))
        rows = b"".join(int(value).to_bytes(8, "little", signed=True) for row in made for value in row)
        count = draw(st.one_of(st.just(len(made)), small))
    mark = draw(st.binary(min_size=16, max_size=16))
    version = draw(st.one_of(st.integers(0, 2), U64))
    base = draw(st.one_of(st.just(frames.NO_BASE), st.integers(0, 2), U64))
    return frames.REQUEST.pack(operation, draw(small), version, base, mark, draw(small), count) + rows


@settings(EXAMPLES, max_examples=120)
@given(st.integers(0, 1), st.lists(requests(), max_size=6), st.booleans())
def test_requests_of_any_kind_after_a_greeting(hub, which, said, honest):
    _, publisher, subscriber = hub
    shelf = (publisher._server, subscriber._server)[which].shelf
    if honest or which:  # of a version that is really there (else a relay waits a while for it to come)
        held = shelf.held[-1]
        there = held.version.to_bytes(8, "little")
        said = [each[:8] + there + each[16:24] + held.mark + each[40:] for each in said]
    data = b"".join(said)
    sent = publisher.sent
    answer = talk(ports(hub)[which], data, publisher.layout)
    assert len(answer) <= 64 << 20
    assert publisher.sent - sent <= 64 << 20


def test_a_selection_of_more_rows_than_are_taken_moves_nothing(hub):
    _, publisher, _ = hub
    for count in (MAX_ROWS + 1, 2**32 - 1):
        said = frames.REQUEST.pack(frames.SELECT, 1, 0, frames.NO_BASE, bytes(16), 0, count)
        answer = talk(publisher.endpoint.port, said, publisher.layout)
        assert answer[0] == frames.REFUSED
        assert len(answer) == frames.REPLY.size


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"token": "guess"}, "a wrong token"),
        ({"token": None}, "no token"),
        ({"run": "other"}, "asked for run 'other'"),
    ],
)
def test_who_has_no_business_here_is_told_so_everywhere(hub, changed, words):
    coordinator, publisher, _ = hub
    for port in ports(hub):
        hello = frames.Hello("r", "hostile", 7, publisher.layout.fingerprint, TOKEN, 16 << 10)
        with socket.create_connection(("127.0.0.1", port), 10) as sock:
            streams.set_deadlines(sock, 10)
            frames.send_hello(sock, msgspec.structs.replace(hello, **changed))
            refusal = frames.receive_hello(sock, "it")
            assert isinstance(refusal, frames.Refusal)
            assert words in refusal.message
    if "token" in changed:
        with pytest.raises(dcs.Unauthorized, match=words):
            dcs.Subscriber(coordinator.address, "r", name="x", layout=publisher.layout, **changed)


@EXAMPLES
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=4), st.booleans())
def test_any_frames_at_the_coordinator(hub, said, headed):
    coordinator, _, _ = hub
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(coordinator.address)
        if headed:
            said = [b"dcs\0" + PROTOCOL.to_bytes(2, "little"), *said[:1]]
        dealer.send_multipart(said)
        assert dealer.poll(5000)
        answer = dealer.recv_multipart()
        assert answer[0][:3] == b"dcs"
