"""Bits that flip and connections that break between a publisher and a subscriber."""

import socket
import time

import dcs
import msgspec
import pytest
import torch
from dcs.control.messages import PROTOCOL
from dcs.wire import frames

FLOATS = 300_000
TENSORS = {"w": torch.randn(FLOATS, generator=torch.Generator().manual_seed(1))}
NBYTES = 4 * FLOATS


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
    subscriber = subscribe(TENSORS)
    publisher.publish(0, TENSORS)
    take(subscriber, 0)
    assert between.connections == 1
    assert NBYTES + (128 << 10) <= between.passed < NBYTES + (256 << 10)


def test_a_flipped_bit_in_the_manifest_is_noticed_and_it_is_asked_for_again(publish_to, subscribe, proxy):
    publisher = publish_to(TENSORS, advertise="127.0.0.2")
    between = proxy(publisher, flip=[80])
    subscriber = subscribe(TENSORS)
    publisher.publish(0, TENSORS)
    take(subscriber, 0)
    assert between.connections == 2


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
    subscriber = subscribe(TENSORS)
    publisher.publish(0, TENSORS)
    take(subscriber, 0)
    assert between.connections == 5
    assert between.passed < NBYTES + 4 * (64 << 10) + 5000
    publisher.publish(1, TENSORS)
    take(subscriber, 1)
    assert between.connections == 5


def hello(publisher: dcs.Publisher, **changes) -> frames.Hello:
    found = frames.Hello("r", "raw", 99, publisher.layout.fingerprint, None)
    return msgspec.structs.replace(found, **changes)


def connect(publisher: dcs.Publisher) -> socket.socket:
    sock = socket.create_connection((publisher.endpoint.host, publisher.endpoint.port), 10)
    frames.set_deadlines(sock, 10)
    return sock


def test_a_reader_that_does_not_read_is_superseded_and_cut_and_stalls_no_publish(publish_to, subscribe):
    tensors = {"w": torch.zeros(4 << 20)}
    publisher = publish_to(tensors, supersede_after=0.2)
    publisher.publish(0, tensors)
    with connect(publisher) as stalled:
        frames.send_hello(stalled, hello(publisher))
        assert isinstance(frames.receive_hello(stalled, "the publisher"), frames.Welcome)
        stalled.sendall(
            frames.REQUEST.pack(frames.MANIFEST, 1, 0, 0, 0)
            + frames.REQUEST.pack(frames.CHUNKS, 1, 0, 0, frames.TO_THE_END)
        )
        frames.receive(stalled, frames.REPLY.size)  # the transfer has begun; nothing more is read
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
            frames.receive(stalled, 64 << 20)


def test_the_wire_refuses_in_words_and_serves_on(publish_to, subscribe):
    publisher = publish_to(TENSORS, token="secret")
    publisher.publish(0, TENSORS)
    cases = [
        (hello(publisher), "unauthorized", "no token"),
        (hello(publisher, token="guess"), "unauthorized", "wrong token"),
        (hello(publisher, token="secret", run="other"), "error", "'other'"),
        (hello(publisher, token="secret", fingerprint="0"), "error", "layout 0"),
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
    requests = [
        (frames.CHUNKS, 1, 0, 0, 1, frames.SUPERSEDED),  # before its manifest
        (frames.MANIFEST, 1, 7, 0, 0, frames.SUPERSEDED),
        (frames.MANIFEST, 2, 0, 0, 0, frames.SUPERSEDED),
        (9, 1, 0, 0, 0, frames.REFUSED),
    ]
    for *request, status in requests:
        with connect(publisher) as sock:
            frames.send_hello(sock, hello(publisher))
            frames.receive_hello(sock, "the publisher")
            sock.sendall(frames.REQUEST.pack(*request))
            assert frames.REPLY.unpack(frames.receive(sock, frames.REPLY.size)) == (status, 0, 0)
    with connect(publisher) as sock:
        frames.send_hello(sock, hello(publisher))
        frames.receive_hello(sock, "the publisher")
        sock.sendall(frames.REQUEST.pack(frames.MANIFEST, 1, 0, 0, 0))
        _, _, length = frames.REPLY.unpack(frames.receive(sock, frames.REPLY.size))
        frames.receive(sock, length)
        sock.sendall(frames.REQUEST.pack(frames.CHUNKS, 1, 0, 1, 1))
        assert frames.REPLY.unpack(frames.receive(sock, frames.REPLY.size)) == (frames.REFUSED, 1, 0)
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
