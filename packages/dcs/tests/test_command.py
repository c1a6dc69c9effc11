"""The `dcs` command, and `dcs.serve`."""

import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dcs
import msgspec
import psutil
import pytest
import torch
import zmq
from dcs import keyfile
from dcs.cli import main
from dcs.control.curve import MemberKeys
from dcs.control.messages import Refused, decode_from_coordinator
from dcs.control.views import Topology
from dcs.introspection import IntrospectionServer

DCS = [sys.executable, "-m", "dcs.cli"]
SERVE = [*DCS, "serve"]


@contextmanager
def serving(*arguments: str, token: str | None = None) -> Iterator[dict[str, Any]]:
    """What a `dcs serve` printed; it is ended, and has to end well."""
    environment = {key: value for key, value in os.environ.items() if key != "DCS_TOKEN"}
    if token is not None:
        environment["DCS_TOKEN"] = token
    with subprocess.Popen(
        [*SERVE, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
            process.terminate()
            assert process.wait(10) == 0
        finally:
            process.kill()


@pytest.fixture
def failed(capsys, monkeypatch) -> Callable[..., str]:
    """`failed(*arguments)` is the one line that the command says when it cannot do what it was told."""

    def run(*arguments: str) -> str:
        monkeypatch.delenv("DCS_TOKEN", raising=False)
        capsys.readouterr()
        assert main(arguments) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == 1
        return said.err

    return run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_its_address_and_ends_on_a_signal(number):
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["pid"], ready["http"]) == (process.pid, "")
        layout = dcs.layout.of({"w": torch.zeros(1)})
        dcs.Subscriber(ready["address"], name="e", layout=layout).close()
        process.send_signal(number)
        assert process.wait(10) == 0


def test_the_command_says_what_is_wrong_in_one_line(failed):
    with dcs.Coordinator() as coordinator:
        port = coordinator.address.rpartition(":")[2]
        done = subprocess.run([*SERVE, "--port", port], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr == failed("serve", "--port", port)
        assert f"127.0.0.1:{port}" in done.stderr


def test_a_coordinator_process_needs_no_torch():
    code = "import sys, dcs.cli; print({'torch', 'numpy', 'rich', 'prometheus_client'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_serve_raises_what_the_process_could_not_do():
    with dcs.serve(token="secret", http_port=0) as coordinator:
        assert coordinator.alive
        with urllib.request.urlopen(f"{coordinator.http}/healthz", timeout=20) as response:
            assert response.status == 200
        layout = dcs.layout.of({"w": torch.zeros(1)})
        with pytest.raises(dcs.Unauthorized):
            dcs.Subscriber(coordinator.address, name="e", layout=layout)
        dcs.Subscriber(coordinator.address, name="e", layout=layout, token="secret").close()
        assert "secret" not in " ".join(psutil.Process(coordinator.pid).cmdline())
        port = int(coordinator.address.rpartition(":")[2])
        with pytest.raises(dcs.DcsError, match=f"127.0.0.1:{port}"):
            dcs.serve(port=port)
        with pytest.raises(dcs.Unauthorized, match="not loopback"):
            dcs.serve(host="0.0.0.0")
    assert not coordinator.alive
    coordinator.close()


def test_the_coordinator_process_ends_when_its_parent_is_killed():
    code = "import dcs, sys; c = dcs.serve(); print(c.pid, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watched = os.pidfd_open(pid)
        parent.kill()
        readable, _, _ = select.select([watched], [], [], 10)
        os.close(watched)
        assert readable


def test_the_command_serves_http_to_who_shows_its_token(capsys, monkeypatch):
    options = ["--lease-seconds", "2.5", "--transfer-seconds", "9", "--no-relay", "--http-port", "0"]
    with serving(*options, token="secret") as ready:
        with urllib.request.urlopen(f"{ready['http']}/healthz", timeout=20) as response:
            assert response.status == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{ready['http']}/topology", timeout=20)
        assert refused.value.code == 401
        refused.value.close()
        asked = urllib.request.Request(
            f"{ready['http']}/topology", headers={"Authorization": "Bearer secret"}
        )
        with urllib.request.urlopen(asked, timeout=20) as response:
            topology = msgspec.json.decode(response.read(), type=Topology)
        assert (topology.runs, topology.lease_seconds) == ((), 2.5)
        monkeypatch.setenv("DCS_TOKEN", "secret")
        assert main(["top", ready["http"], "--once"]) == 0
        assert "no runs yet" in capsys.readouterr().out


def test_http_that_cannot_be_served_ends_the_command(failed, no_leak):
    with dcs.Coordinator() as coordinator, IntrospectionServer(coordinator) as http:
        assert f"127.0.0.1:{http.port}" in failed("serve", "--http-port", str(http.port))
    assert "without a token" in failed("serve", "--http-port", "0", "--http-host", "0.0.0.0")


def test_options_that_cannot_be_meant_are_named(failed):
    assert "transfer_seconds is -1.0" in failed("serve", "--transfer-seconds", "-1")
    assert "lease_seconds is 0.0" in failed("serve", "--lease-seconds", "0")
    assert "cannot read the secret key nowhere" in failed("serve", "--curve-secret-file", "nowhere")


def test_keys_are_written_once_and_for_their_user_only(tmp_path, capsys):
    secret, public = tmp_path / "key", tmp_path / "key.pub"
    before = os.umask(0)
    try:
        assert main(["keygen", str(secret)]) == 0
    finally:
        os.umask(before)
    assert capsys.readouterr().out == public.read_text()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    keys = keyfile.read(secret)
    assert keys.public == public.read_bytes().strip()
    assert main(["keygen", str(secret)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert keyfile.read(secret) == keys
    secret.unlink()
    assert main(["keygen", str(secret)]) == 1  # its public key is there still
    assert not secret.exists()
    assert main(["keygen", str(tmp_path / "no" / "folder")]) == 1
    assert "cannot write the key" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"too short", b"\xff" * 40, b"a" * 5000], ids=str)
def test_a_file_without_a_key_is_named(tmp_path: Path, content: bytes | None):
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(dcs.DcsError, match=r"key.*dcs keygen FILE"):
        keyfile.read(file)


def test_a_coordinator_with_keys_speaks_to_members_with_its_public_key(tmp_path):
    public = keyfile.write(tmp_path / "key")
    with serving("--curve-secret-file", str(tmp_path / "key")) as ready, zmq.Context() as context:
        answers: dict[str, list[bytes] | None] = {}
        for name, keys in {"right": MemberKeys.of(public), "wrong": MemberKeys.of(_other(tmp_path))}.items():
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                keys.guard(socket)
                socket.connect(ready["address"])
                socket.send_multipart([b"no header", b""])
                answers[name] = (
                    socket.recv_multipart() if socket.poll(20_000 if name == "right" else 300) else None
                )
        assert answers["right"] is not None
        assert isinstance(decode_from_coordinator(answers["right"]), Refused)
        assert answers["wrong"] is None


def _other(folder: Path) -> bytes:
    return keyfile.write(folder / "other")


def test_a_keeper_runs_until_it_is_told_to_end():
    with subprocess.Popen(
        [*DCS, "keeper", "--max-bytes", "1MiB"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["pid"] == process.pid
        process.terminate()
        assert process.wait(10) == 0


def test_the_command_says_of_which_version_it_is(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"dcs \d+\.\d+\.\d+\n", capsys.readouterr().out)
