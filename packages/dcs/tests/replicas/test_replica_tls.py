"""Replicas over TLS. Certificates are made by the `openssl` command."""

import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import dcs.replicas
import pytest
import torch
from dcs.errors import DcsError, ProtocolError
from dcs.wire.tls import Tls


def run_openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """One certificate for all, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificates of these tests, is not installed")
    folder: Path = tmp_path_factory.mktemp("certificates")
    run_openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-keyout", folder / "key.pem", "-out", folder / "own.pem", "-days", 2, "-subj", "/CN=keeper",
                "-addext", "subjectAltName=IP:127.0.0.1")  # fmt: skip
    return Tls(folder / "own.pem", folder / "key.pem", folder / "own.pem")


@pytest.mark.parametrize("share_memory", [True, False], ids=["handed over", "sent"])
def test_what_is_sent_encrypted_is_what_was_frozen(keeper, replicas, tls, share_memory):
    holder = keeper(tls=tls, token="secret", share_memory=share_memory)
    rank = replicas([holder], tls=tls, token="secret")
    tree = {"w": torch.randn(3_000_000)}
    for step in range(4):
        rank.save(step, tree).wait(20)
    step, restored = rank.restore()
    assert step == 3
    assert torch.equal(restored["w"], tree["w"])
    assert dcs.replicas.status(holder.address, token="secret", tls=tls).names[0].nbytes > 0


def test_a_side_without_tls_is_told_so(keeper, replicas, tls):
    with pytest.raises(ProtocolError, match=r"give tls=\.\.\."):
        replicas([keeper()], tls=tls)
    with pytest.raises(DcsError):
        replicas([keeper(tls=tls)], connect_seconds=3.0)


def test_those_who_hang_up_at_once_do_no_harm(keeper, replicas, tls):
    holder = keeper(tls=tls)
    host, _, port = holder.address.removeprefix("tcp://").rpartition(":")
    for data in (b"", b"x", b"\x16\x03\x01"):
        for _ in range(5):
            with socket.create_connection((host, int(port)), timeout=10) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets it
                sock.sendall(data)
    assert replicas([holder], tls=tls).save(1, {"w": torch.ones(3)}).wait(20).step == 1


def test_a_keeper_process_takes_certificates(tls):
    with dcs.replicas.serve_keeper(tls=tls, parent=os.getpid()) as process:
        assert dcs.replicas.status(process.address, tls=tls).names == ()
    with pytest.raises(DcsError, match="cannot read"):
        dcs.replicas.serve_keeper(tls=Tls("/nowhere/own.pem", tls.key))
