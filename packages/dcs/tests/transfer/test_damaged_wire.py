"""Bits that flip and connections that break between a publisher and a subscriber."""

import socket
import time

import dcs
import msgspec
import numpy as np
import pytest
import torch
from dcs.control.messages import PROTOCOL
from dcs.wire import frames, streams

FLOATS = 300_000
TENSORS = {"w": torch.randn(FLOATS, generator=torch.Generator().manual_seed(1))}
NBYTES = 4 * FLOATS


@pytest.fixture
def subscribe(subscribe):
    """Damage is done to TCP."""
    return lambda tensors, name="engine-0", **more: subscribe(tensors, name, **({"wires": ("tcp",)} | more))


def take(subscriber: dcs.Subscriber, version: int) -> None:
    staged = subscriber.next(after=version - 1, timeout=20)
    assert staged is not None, subscriber.health()
    assert staged.version == version
    assert torch.equal(staged.tensors["w"], TENSORS["w"])
    staged.ack()


def test_a_flipped_bit_in_a_chunk_is_noticed_and_only_that_chunk_asked_for_again(
    publish_to, subscribe, proxy
):
    publisher = publish_to(TENSORS, advertise="127.0.0.2", chunk_bytes=128 << 10)
    between = proxy(publisher, flip=[NBYTES // 2])
    subscriber = subscribe(TENSORS, chunk_bytes=128 << 10)
    publisher.publish(0, TENSORS)
    take(subscriber, 0)
    assert between.connections == 1
    assert NBYTES + (128 << 10) <= between.passed < NBYTES + (256 << 10)


@pytest.mark.parametrize("offset", range(28))
def test_a_flipped_bit_in_the_header_of_a_chunk_is_noticed(publish_to, subscribe, proxy, offset):
    publisher = publish_to(TENSORS, advertise="127.0.0.2", chunk_bytes=128 << 10)
    welcome = len(frames.encode_hello(frames.Welcome(publisher.layout.fingerprint, 128 << 10)))
    proxy(publisher, flip=[welcome + frames.REPLY.size + (128 << 10) + offset])
    subscriber = subscribe(TENSORS, chunk_bytes=128 << 10)
    publisher.publish(0, TENSORS)
    take(subscriber, 0)


def test_an_announced_root_that_the_chunks_do_not_have_is_no_version(publish_to, subscribe, monkeypatch):
    publisher = publish_to(TENSORS)
    subscriber = subscribe(TENSORS)
    publisher.publish(0, TENSORS)
    take(subscriber, 0)  # now there is one who takes bytes, and versions are hashed as they are frozen
    freeze = publisher._freeze  # the publisher's alone: the subscriber shares this process's functions
    monkeypatch.setattr(publisher, "_freeze", lambda *given: (bytes(16), freeze(*given)[1]))
    publisher.publish(1, TENSORS)
    with pytest.raises(dcs.CorruptChunk, match=r"has root .*, announced was 0000"):
        subscriber.next(after=0, timeout=20)


def test_a_path_that_always_damages_ends_in_a_typed_error_and_never_in_a_version(
    publish_to, subscribe, proxy
):
    publisher = publish_to(TENSORS, advertise="127.0.0.2")
    proxy(publisher, always_flip=100_000 + 7)
    subscriber = subscribe(TENSORS)
    publisher.publish(0, TENSORS)
    with pytest.raises(dcs.CorruptChunk, match=r"chunk 0 of version 0 .* 4 times"):
        subscriber.next(timeout=20)
    assert isinstance(subscriber.health().error, dcs.CorruptChunk)
    follower = subscribe(TENSORS, "following").follow(lambda staged: None)
    with pytest.raises(dcs.CorruptChunk):
        follower.wait_for(0, 20)
    subscriber.close()
    gone = publisher.publish(1, TENSORS).wait(10).gone
    assert gone == {}


def test_a_connection_cut_in_the_middle_is_resumed_with_what_is_missing(publish_to, subscribe, proxy):
    publisher = publish_to(TENSORS, advertise="127.0.0.2", chunk_bytes=64 << 10)
    between = proxy(publisher, cut=[400_000, 300_000, 10, 350_000])
    subscriber = subscribe(TENSORS, chunk_bytes=64 << 10)
    publisher.publish(0, TENSORS)
    take(subscriber, 0)
    assert between.connections == 5
    assert between.passed < NBYTES + 4 * (64 << 10) + 5000
    publisher.publish(1, TENSORS)
    take(subscriber, 1)
    assert between.connections == 5


def hello(publisher: dcs.Publisher, **changes) -> frames.Hello:
    found = frames.Hello("r", "raw", 99, publisher.layout.fingerprint, None, 4 << 20)
    return msgspec.structs.replace(found, **changes)


def request(publisher: dcs.Publisher, operation: int, version: int, **changes) -> bytes:
    fields = {
        "selection": 0,
        "base": frames.NO_BASE,
        "mark": root(publisher, version),
        "first": 0,
        "count": 0,
    }
    fields |= changes
    return frames.REQUEST.pack(
        operation,
        fields["selection"],
        version,
        fields["base"],
        fields["mark"],
        fields["first"],
        fields["count"],
    )


def root(publisher: dcs.Publisher, version: int) -> bytes:
    found = [copy.mark for copy in publisher._shelf.held if copy.version == version]
    return found[0] if found else bytes(16)


def connect(publisher: dcs.Publisher) -> socket.socket:
    sock = socket.create_connection((publisher.endpoint.host, publisher.endpoint.port), 10)
    streams.set_deadlines(sock, 10)
    return sock


def test_a_reader_that_does_not_read_is_superseded_and_cut_and_stalls_no_publish(publish_to, subscribe):
    tensors = {"w": torch.zeros(4 << 20)}
    publisher = publish_to(tensors, supersede_after=0.2)
    publisher.publish(0, tensors)
    with connect(publisher) as stalled:
        frames.send_hello(stalled, hello(publisher))
        assert isinstance(frames.receive_hello(stalled, "the publisher"), frames.Welcome)
        stalled.sendall(request(publisher, frames.CHUNKS, 0, count=4))
        streams.receive(stalled, frames.REPLY.size)  # the transfer has begun; nothing more is read
        subscriber = subscribe(tensors)
        for version in (1, 2, 3):
            tensors["w"].fill_(version)
            began = time.monotonic()
            ticket = publisher.publish(version, tensors)
            assert time.monotonic() - began < 5
            staged = subscriber.next(after=version - 1, timeout=10)
            assert staged is not None
            assert staged.tensors["w"].aminmax() == (version, version)
            staged.ack()
            assert list(ticket.wait(10).acked) == ["engine-0"]
        with pytest.raises(OSError, match=r"closed|reset"):
            streams.receive(stalled, 64 << 20)


def test_the_wire_refuses_in_words_and_serves_on(publish_to, subscribe):
    publisher = publish_to(TENSORS, token="secret")
    publisher.publish(0, TENSORS)
    cases = [
        (hello(publisher), "unauthorized", "no token"),
        (hello(publisher, token="guess"), "unauthorized", "wrong token"),
        (hello(publisher, token="secret", run="other"), "error", "'other'"),
    ]
    for said, code, words in cases:
        with connect(publisher) as sock:
            frames.send_hello(sock, said)
            answer = frames.receive_hello(sock, "the publisher")
            assert isinstance(answer, frames.Refusal)
            assert answer.code == code
            assert words in answer.message
            assert sock.recv(1) == b""
    with connect(publisher) as sock:
        sock.sendall(frames.HELLO.pack(b"dcsw", PROTOCOL + 1, 0))
        answer = frames.receive_hello(sock, "the publisher")
        assert isinstance(answer, frames.Refusal)
        assert f"protocol {PROTOCOL + 1}, this side speaks {PROTOCOL}" in answer.message
    with connect(publisher) as sock:
        sock.sendall(frames.HELLO.pack(b"dcsw", PROTOCOL, 1 << 30))
        answer = frames.receive_hello(sock, "the publisher")
        assert isinstance(answer, frames.Refusal)
        assert "at most" in answer.message
    take(subscribe(TENSORS, token="secret"), 0)


def test_a_subscriber_with_the_wrong_token_for_the_publisher_is_told_so(publish_to, subscribe):
    publisher = publish_to(TENSORS, token="secret")
    subscriber = subscribe(TENSORS, token="guess")
    publisher.publish(0, TENSORS)
    with pytest.raises(dcs.Unauthorized, match="wrong token"):
        subscriber.next(timeout=10)


def test_requests_out_of_range_or_order_get_no_byte(publish_to, subscribe):
    publisher = publish_to(TENSORS)
    publisher.publish(0, TENSORS)
    rows = np.array([[0, 8, 8, 1], [NBYTES - 8, 8, 16, 1]], dtype="<i8")
    requests = [
        (request(publisher, frames.CHUNKS, 7, count=1), frames.SUPERSEDED),
        (request(publisher, frames.CHUNKS, 0, mark=b"x" * 16, count=1), frames.SUPERSEDED),
        (request(publisher, frames.CHUNKS, 0, first=0, count=2), frames.REFUSED),
        (request(publisher, frames.CHUNKS, 0, selection=5, count=1), frames.REFUSED),
        (request(publisher, frames.MAP, 0), frames.REFUSED),  # not over TCP
        (request(publisher, frames.SELECT, 0, selection=1, count=2) + rows.tobytes(), frames.REFUSED),
        (request(publisher, frames.SELECT, 0, selection=1, count=1 << 31), frames.REFUSED),
        (request(publisher, 9, 0), frames.REFUSED),
    ]
    for said, status in requests:
        with connect(publisher) as sock:
            frames.send_hello(sock, hello(publisher))
            frames.receive_hello(sock, "the publisher")
            sock.sendall(said)
            assert frames.REPLY.unpack(streams.receive(sock, frames.REPLY.size)) == (status, 0, 0, 0, 0, 0)
    take(subscribe(TENSORS), 0)


def test_a_reader_that_never_stops_selecting_is_refused(publish_to, subscribe):
    publisher = publish_to(TENSORS)
    publisher.publish(0, TENSORS)
    rows = np.array([[0, 8, 8, 1]], dtype="<i8")
    with connect(publisher) as sock:
        frames.send_hello(sock, hello(publisher))
        frames.receive_hello(sock, "the publisher")
        said = request(publisher, frames.SELECT, 0, selection=1, count=1) + rows.tobytes()
        for number in range(1, 34):
            sock.sendall(said.replace(b"\x01\0\0\0\x01", bytes([1, 0, 0, 0, number]), 1))
        assert streams.receive(sock, 1)[0] == frames.REFUSED
    take(subscribe(TENSORS), 0)


def test_random_bytes_at_the_publisher_do_no_harm(publish_to, subscribe):
    publisher = publish_to(TENSORS)
    publisher.publish(0, TENSORS)
    generator = torch.Generator().manual_seed(3)
    for length in (1, 11, 12, 13, 4000, 100_000):
        noise = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator).numpy().tobytes()
        for prefix in (b"", frames.HELLO.pack(b"dcsw", PROTOCOL, 400)):
            with connect(publisher) as sock:
                try:
                    sock.sendall(prefix + noise)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
                except OSError:
                    continue  # it has hung up already, which is as good
    take(subscribe(TENSORS), 0)
