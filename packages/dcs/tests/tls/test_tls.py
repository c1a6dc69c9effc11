"""Chunk connections over TLS: what passes, who is refused, and in which words."""

import dataclasses
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import dcs
import pytest
from dcs.wire import frames, streams
from dcs.wire.tls import Tls, client_context, handshake, refuse_plain, server_context, wrap

Ends = tuple[socket.socket, socket.socket]
PEER = "the publisher at 10.0.0.1:7000"
OTHER = "a subscriber at 10.0.0.2:41000"


def connect(
    ends: Ends,
    beside: ThreadPoolExecutor,
    stack: ExitStack,
    client: Tls,
    server: Tls,
    host: str = "127.0.0.1",
) -> tuple[ssl.SSLSocket | Exception, ssl.SSLSocket | Exception]:
    """Both sides of a connection after the handshake, or what each of them raised."""
    near, far = ends

    def accept() -> ssl.SSLSocket | Exception:
        try:
            refuse_plain(far, OTHER)
            stream = stack.enter_context(wrap(far, server_context(server)))
            handshake(stream, OTHER)
        except (dcs.DcsError, OSError) as error:
            return error
        return stream

    accepting = beside.submit(accept)
    stream = stack.enter_context(wrap(near, client_context(client), host))
    try:
        handshake(stream, PEER)
    except (dcs.DcsError, OSError) as error:
        stream.close()
        return error, accepting.result(20)
    return stream, accepting.result(20)


@pytest.fixture
def secured(
    ends: Ends, beside: ThreadPoolExecutor, stack: ExitStack, trainer: Tls, engine: Tls
) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    near, far = connect(ends, beside, stack, engine, trainer)
    assert isinstance(near, ssl.SSLSocket)
    assert isinstance(far, ssl.SSLSocket)
    assert near.version() == far.version() == "TLSv1.3"
    for stream in (near, far):
        streams.set_deadlines(stream, 20)
    return near, far


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("size", [0, 1, 16_000, 16_384, 4 << 20, (4 << 20) + 3])
def test_headers_and_payloads_pass_whole(secure, size, request, beside, ends):
    near, far = request.getfixturevalue("secured") if secure else ends
    payload = random.Random(size).randbytes(size)
    header = b"HEADER"

    def echo() -> None:
        got = streams.receive(far, len(header) + size)
        streams.send(far, bytes(got[: len(header)]), memoryview(got)[len(header) :])

    echoing = beside.submit(echo)
    streams.send(near, header, memoryview(payload))
    back = bytearray(size)
    assert streams.receive(near, len(header)) == header
    streams.receive_into(near, memoryview(back))
    assert back == payload
    echoing.result(20)


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("sizes", [[3], [0, 5, 0], [700] * 255, [9000, 20_000, 1, 16_384, 8 << 20, 2], []])
def test_parts_are_gathered_and_scattered(secure, sizes, request, beside, ends):
    near, far = request.getfixturevalue("secured") if secure else ends
    generator = random.Random(sum(sizes))
    parts = [memoryview(generator.randbytes(size)) for size in sizes]
    sending = beside.submit(streams.send, far, b"HEADER", *parts)
    assert streams.receive(near, 6) == b"HEADER"
    places = [memoryview(bytearray(size)) for size in reversed(sizes)]  # cut differently
    streams.receive_parts(near, places)
    assert b"".join(places) == b"".join(parts)
    sending.result(20)


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_parts_that_do_not_come_are_a_lost_connection(secure, request, ends):
    near, far = request.getfixturevalue("secured") if secure else ends
    streams.send(far, b"ab", b"cd")
    far.close()
    with pytest.raises(ConnectionError):
        streams.receive_parts(near, [memoryview(bytearray(3)), memoryview(bytearray(3))])
    with pytest.raises(ConnectionError):
        streams.receive_parts(near, [memoryview(bytearray(3))])


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_silence_ends_a_read_at_its_deadline_and_the_connection_goes_on(secure, request, ends):
    near, far = request.getfixturevalue("secured") if secure else ends
    streams.set_deadlines(near, 0.2)
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        streams.receive(near, 5)
    assert time.monotonic() - began < 5
    streams.send(far, b"hello")
    assert streams.receive(near, 5) == b"hello"


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_a_byte_now_and_then_does_not_extend_a_deadline(secure, request, ends, beside):
    near, far = request.getfixturevalue("secured") if secure else ends
    streams.set_deadlines(near, 0.2)
    deadline = time.monotonic() + 0.3

    def dribble() -> int:
        sent = 0
        while time.monotonic() < deadline + 0.2:
            streams.send(far, b"x")
            sent += 1
            try:
                streams.set_deadlines(far, 0.05)
                streams.receive(far, 1)  # nothing comes: this is only the pause between two bytes
            except BlockingIOError:
                continue
        return sent

    dribbling = beside.submit(dribble)
    with pytest.raises(BlockingIOError):
        streams.receive(near, 1000, deadline)
    assert dribbling.result(20) > 1


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_a_peer_that_takes_nothing_ends_a_send_at_its_deadline(secure, request, ends):
    near, _ = request.getfixturevalue("secured") if secure else ends
    streams.set_deadlines(near, 0.2)
    with pytest.raises(BlockingIOError):
        streams.send(near, b"header", bytes(64 << 20))


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_the_end_of_a_stream_is_a_lost_connection(secure, request, ends):
    near, far = request.getfixturevalue("secured") if secure else ends
    streams.send(far, b"abc")
    far.close()
    with pytest.raises(ConnectionError):
        streams.receive(near, 5)


@pytest.mark.parametrize("secure", [True, False], ids=["tls", "plain"])
def test_a_cut_ends_the_thread_that_reads(secure, request, ends, beside):
    near, _ = request.getfixturevalue("secured") if secure else ends
    streams.set_deadlines(near, 60)
    reading = beside.submit(streams.receive, near, 5)
    assert not reading.done()
    streams.cut(near)
    with pytest.raises(ConnectionError):
        reading.result(10)
    streams.cut(near)


def refused(outcome: object, kind: type[Exception], *words: str) -> None:
    assert type(outcome) is kind, outcome
    for word in words:
        assert word in str(outcome)


def test_a_server_of_another_authority_is_refused_by_name(ends, beside, stack, engine, stranger):
    near, far = connect(ends, beside, stack, engine, stranger.member("impostor"))
    refused(near, dcs.Unauthorized, PEER, "not accepted here")
    refused(far, dcs.Unauthorized, OTHER, "does not accept the certificate of this side")


def test_a_client_of_another_authority_is_refused_and_told(ends, beside, stack, authority, trainer, stranger):
    impostor = dataclasses.replace(stranger.member("impostor2"), authority=authority.certificate)
    near, far = connect(ends, beside, stack, impostor, trainer)
    refused(far, dcs.Unauthorized, OTHER, "not accepted here")
    refused(near, dcs.Unauthorized, PEER, "does not accept the certificate of this side")


def test_an_expired_certificate_is_refused(ends, beside, stack, engine, authority):
    near, _ = connect(ends, beside, stack, engine, authority.member("old", days=-1))
    refused(near, dcs.Unauthorized, PEER, "expired")


def test_the_host_counts_when_it_is_to_be_checked(ends, beside, stack, authority, trainer):
    elsewhere = authority.member("elsewhere", address="10.9.9.9")
    near, _ = connect(ends, beside, stack, authority.member("strict", check_host=True), elsewhere)
    refused(near, dcs.Unauthorized, PEER, "IP address mismatch")


def test_the_host_does_not_count_otherwise(ends, beside, stack, authority, engine):
    near, far = connect(ends, beside, stack, engine, authority.member("moved", address="10.9.9.9"))
    assert isinstance(near, ssl.SSLSocket)
    assert isinstance(far, ssl.SSLSocket)


def test_without_an_authority_the_machine_decides_whom_to_trust(ends, beside, stack, engine, trainer):
    alone = dataclasses.replace(engine, authority=None)
    near, _ = connect(ends, beside, stack, alone, dataclasses.replace(trainer, authority=None))
    refused(near, dcs.Unauthorized, PEER)


def test_nobody_needs_to_be_verified(ends, beside, stack, engine, trainer):
    blind = dataclasses.replace(engine, authority=None, verify_peer=False)
    near, far = connect(ends, beside, stack, blind, dataclasses.replace(trainer, authority=None))
    assert isinstance(near, ssl.SSLSocket)
    assert isinstance(far, ssl.SSLSocket)


def test_a_plain_client_is_told_that_it_needs_tls(ends, beside):
    near, far = ends
    serving = beside.submit(refuse_plain, far, OTHER)
    began = time.monotonic()
    streams.set_deadlines(near, 10)
    frames.send_hello(near, frames.Hello("r", "engine-0", 1, "", None, 4 << 20))
    answer = frames.receive_hello(near, PEER)
    assert isinstance(answer, frames.Refusal)
    assert answer.code == dcs.ProtocolError.code
    assert "serves with TLS only" in answer.message
    with pytest.raises(dcs.ProtocolError, match="without TLS"):
        serving.result(10)
    assert time.monotonic() - began < 8


def test_a_stranger_to_both_protocols_is_refused(ends, beside):
    near, far = ends
    near.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    with pytest.raises(dcs.ProtocolError, match="no dcs hello"):
        refuse_plain(far, OTHER)


def test_a_plain_server_is_named_by_a_client_that_wants_tls(ends, beside, stack, engine):
    near, far = ends

    def serve() -> None:
        streams.set_deadlines(far, 10)
        try:
            frames.receive_hello(far, OTHER)
        except dcs.ProtocolError as error:
            frames.send_hello(far, frames.Refusal(error.code, str(error)))

    serving = beside.submit(serve)
    stream = stack.enter_context(wrap(near, client_context(engine), "127.0.0.1"))
    began = time.monotonic()
    with pytest.raises(dcs.ProtocolError, match=rf"{PEER} answered without TLS; give tls"):
        handshake(stream, PEER)
    assert time.monotonic() - began < 8
    serving.result(10)


def test_an_older_tls_is_refused(ends, beside, trainer):
    near, far = ends
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    def dial() -> None:
        with pytest.raises((ssl.SSLError, ConnectionError)), old.wrap_socket(near) as stream:
            stream.recv(1)

    dialling = beside.submit(dial)
    refuse_plain(far, OTHER)
    with wrap(far, server_context(trainer)) as stream, pytest.raises(dcs.ProtocolError, match=OTHER):
        handshake(stream, OTHER)
    dialling.result(10)


@pytest.mark.parametrize("serves", [True, False])
def test_a_silent_peer_costs_the_handshake_its_deadline(serves, ends, stack, trainer, engine):
    near, far = ends
    stream = wrap(far, server_context(trainer)) if serves else wrap(near, client_context(engine), "127.0.0.1")
    began = time.monotonic()
    with stream, pytest.raises(dcs.Timeout, match=f"{PEER} did not finish a TLS handshake within 0.2 s"):
        handshake(stream, PEER, 0.2)
    assert time.monotonic() - began < 8


def test_a_handshake_byte_by_byte_does_not_extend_its_deadline(ends, trainer, engine, beside):
    near, far = ends
    outgoing = ssl.MemoryBIO()
    opening = client_context(engine).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        opening.do_handshake()

    def dribble() -> None:
        pause = threading.Event()
        with suppress(OSError):
            for byte in outgoing.read():
                near.sendall(bytes([byte]))
                pause.wait(0.02)

    dribbling = beside.submit(dribble)
    began = time.monotonic()
    with wrap(far, server_context(trainer)) as stream, pytest.raises(dcs.Timeout, match=OTHER):
        handshake(stream, OTHER, 0.3)
    assert time.monotonic() - began < 6  # all of it takes 10
    dribbling.result(20)


def test_a_peer_that_hangs_up_in_the_handshake_is_named(ends, stack, engine):
    near, far = ends
    stream = stack.enter_context(wrap(near, client_context(engine), "127.0.0.1"))
    far.close()
    with pytest.raises(ConnectionResetError, match=PEER):
        handshake(stream, PEER)


def test_a_cut_ends_a_handshake(ends, stack, trainer, beside):
    stream = stack.enter_context(wrap(ends[1], server_context(trainer)))
    shaking = beside.submit(handshake, stream, OTHER, 60)
    streams.cut(stream)
    with pytest.raises(ConnectionResetError, match=OTHER):
        shaking.result(10)


def test_files_that_do_not_fit_are_named(tmp_path: Path, trainer: Tls, engine: Tls) -> None:
    missing, text = tmp_path / "missing.pem", tmp_path / "text.pem"
    text.write_text("no certificate\n")
    for broken, word in (
        (dataclasses.replace(trainer, certificate=missing), "missing.pem"),
        (dataclasses.replace(trainer, key=text), "text.pem"),
        (dataclasses.replace(trainer, key=engine.key), os.fspath(engine.key)),
        (dataclasses.replace(trainer, authority=missing), "missing.pem"),
        (dataclasses.replace(trainer, authority=text), "text.pem"),
    ):
        for context in (server_context, client_context):
            with pytest.raises(dcs.DcsError, match=word):
                context(broken)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_password(tmp_path, trainer, openssl):
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", trainer.key, "-out", locked, "-aes256", "-passout", "pass:secret")
    with pytest.raises(dcs.DcsError, match=r"locked\.key is encrypted"):
        server_context(dataclasses.replace(trainer, key=locked))


def test_what_cannot_have_an_effect_is_refused(trainer: Tls) -> None:
    with pytest.raises(dcs.DcsError, match="verify_peer is False"):
        dataclasses.replace(trainer, verify_peer=False)


@pytest.mark.slow
def test_the_cost_of_tls_is_printed(
    secured: tuple[ssl.SSLSocket, ssl.SSLSocket], beside: ThreadPoolExecutor, make_ends: Callable[[], Ends]
) -> None:
    chunk, chunks = memoryview(random.Random(1).randbytes(4 << 20)), 128
    seconds: dict[str, float] = {}
    for name, (near, far) in {"plain": make_ends(), "tls": secured}.items():
        view = memoryview(bytearray(len(chunk)))
        header = bytes(32)

        def serve(far: socket.socket = far, header: bytes = header) -> None:
            for _ in range(chunks):
                streams.send(far, header, chunk)

        began = time.process_time()
        serving = beside.submit(serve)
        for _ in range(chunks):
            streams.receive(near, len(header))
            streams.receive_into(near, view)
        serving.result(60)
        seconds[name] = (time.process_time() - began) / (chunks * len(chunk) / 1e9)
        assert view == chunk
    print(f"CPU-s a GB, both sides: {seconds['plain']:.2f} plain, {seconds['tls']:.2f} TLS")
    assert seconds["tls"] < 20 * seconds["plain"]
