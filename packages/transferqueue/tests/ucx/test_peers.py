"""Peers over UCX that are wrong, hostile or slow. It needs ucxx (the extra `ucx`)."""

import importlib.util
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transferqueue.errors import (
    ProtocolMismatch,
    Unauthorized,
)
from transferqueue.errors import Timeout as DeadlinePassed
from transferqueue.transport import ucx, ucx_connection

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="ucxx is not installed; pip install relax-transferqueue[ucx]",
)
MIB = 1 << 20
TOKEN = "the token of these tests"


def test_a_wrong_token_is_refused_and_others_are_not_disturbed(
    unit: Any, transport: ucx.UcxTransport
) -> None:
    for wrong in ("", "another", TOKEN + "x"):
        stranger = ucx.UcxTransport("127.0.0.1", unit.port, token=wrong)
        with pytest.raises(Unauthorized, match="token"):
            stranger.ping(timeout=30).result(40)
        stranger.close()
    transport.ping(timeout=30).result(40)


def test_a_server_that_does_not_know_the_token_gets_no_bytes(
    monkeypatch: pytest.MonkeyPatch, arenas: Any
) -> None:
    """It lets everyone in and sends the client's own proof back."""

    async def impostor(self: Any, token: str, until: float) -> None:
        mine, _ = self._hello()
        await self._stream_send(mine, until)
        theirs = await self._stream_receive(len(mine) + 32, until)
        await self._stream_send(theirs[-32:], until)

    monkeypatch.setattr(ucx_connection.Connection, "welcome", impostor)
    server = ucx.UcxServer(arenas, token="not the token")
    transport = ucx.UcxTransport("127.0.0.1", server.port, token=TOKEN)
    try:
        with pytest.raises(Unauthorized, match="did not prove"):
            transport.write(1, 7, 0, 100, np.zeros(100, np.uint8), timeout=20).result(40)
    finally:
        transport.close()
        server.close()


def test_a_client_that_skips_the_proof_gets_no_bytes(
    unit: Any, monkeypatch: pytest.MonkeyPatch, writer_to: Callable[[int], Any]
) -> None:
    """It does as if all were well, and asks."""

    async def intrude(self: Any, token: str, until: float) -> None:
        theirs = await self._stream_receive(len(self._hello()[0]), until)
        mine, tag = self._hello()
        await self._stream_send(mine + b"?" * 32, until)
        self._set_tags(tag, int.from_bytes(theirs[-8:], "little"))

    monkeypatch.setattr(ucx_connection.Connection, "introduce", intrude)
    intruder = writer_to(unit.port)
    try:
        with pytest.raises((ucx_connection.Broken, DeadlinePassed)):
            _ask(intruder)
    finally:
        intruder.transport.close()


def _ask(intruder: Any) -> None:
    intruder.tell(ucx_connection.ReadRequest([(7, 0, 100)], 5.0))
    intruder.hear(5)


def test_another_version_of_the_protocol_is_refused(unit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_connection, "PROTOCOL", 2)
    transport = ucx.UcxTransport("127.0.0.1", unit.port, token=TOKEN)
    try:
        with pytest.raises(ProtocolMismatch, match="version 1") as refused:
            transport.ping(timeout=20).result(40)
        assert (refused.value.got, refused.value.expected) == (1, 2)
    finally:
        transport.close()


def test_bytes_that_are_no_ucx_disturb_nobody(own_unit: Any) -> None:
    transport = ucx.UcxTransport("127.0.0.1", own_unit.port, token=TOKEN)
    rng = np.random.default_rng(1)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", rng.bytes(100), bytes(1000), b"\xff" * 5000):
        with socket.create_connection(("127.0.0.1", own_unit.port), timeout=10) as stranger:
            stranger.sendall(data)
    transport.ping(timeout=30).result(40)
    transport.close()
    assert "threads ['MainThread']" in own_unit.end()


def _finish_the_write(writer: Any, nbytes: int) -> None:
    writer.send(bytes(nbytes))
    writer.tell(ucx_connection.Checksum(0))
    writer.hear()


def test_bytes_that_do_not_match_their_checksum_are_not_reported_written(
    served: tuple[ucx.UcxServer, Any, Any],
) -> None:
    _, arenas, writer = served
    writer.tell(ucx_connection.WriteRequest(1, 7, 0, 3 * MIB, 20.0))
    assert isinstance(writer.hear(), ucx_connection.Go)
    writer.send(bytes(3 * MIB))
    writer.tell(ucx_connection.Checksum(1))
    refused = writer.hear()
    assert (refused.kind, arenas.seen) == ("Corrupt", [])


def test_a_writer_that_stalls_is_cut_off_when_its_grant_ends(
    served: tuple[ucx.UcxServer, Any, Any],
) -> None:
    server, arenas, writer = served
    writer.tell(ucx_connection.WriteRequest(1, 7, 0, 3 * MIB, 300.0))
    assert isinstance(writer.hear(), ucx_connection.Go)
    arenas.refused.add(1)
    server.revoke(1, timeout=20)
    server.revoke(1, timeout=20)
    held = arenas.bytes[: 3 * MIB].copy()
    with pytest.raises((ucx_connection.Broken, DeadlinePassed)):
        _finish_the_write(writer, 3 * MIB)
    assert np.array_equal(arenas.bytes[: 3 * MIB], held)
    assert not arenas.seen


def test_a_writer_that_stalls_is_cut_off_at_its_own_deadline(
    served: tuple[ucx.UcxServer, Any, Any],
) -> None:
    server, arenas, writer = served
    writer.tell(ucx_connection.WriteRequest(1, 7, 0, 3 * MIB, 0.2))
    assert isinstance(writer.hear(), ucx_connection.Go)
    with pytest.raises(ucx_connection.Broken):
        writer.hear()
    assert not server._writing
    assert not arenas.seen


@pytest.mark.parametrize("size", [0, ucx_connection.MAX_BODY + 1, 1 << 63, 3])
def test_a_message_that_is_none_ends_its_connection_only(
    served: tuple[ucx.UcxServer, Any, Any], size: int, caplog: pytest.LogCaptureFixture
) -> None:
    server, _, writer = served
    writer.send(size.to_bytes(8, "little") + b"\xc1" * 504)
    with pytest.raises(ucx_connection.Broken):
        writer.hear()
    assert f"Malformed: a message of {size} bytes" in caplog.text or size == 3
    other = ucx.UcxTransport("127.0.0.1", server.port, token=TOKEN)
    other.ping(timeout=30).result(40)
    other.close()
