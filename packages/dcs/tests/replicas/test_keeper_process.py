"""`serve_keeper` and `dcs keeper`."""

import argparse
import json
import os
import select
import signal
import subprocess
import sys

import dcs.replicas
import psutil
import pytest
import torch
from dcs.errors import DcsError, Unauthorized
from dcs.replicas.command import add_parser

KEEPER = [sys.executable, "-m", "dcs.replicas.command"]


def ended(pid: int, seconds: float = 20.0) -> bool:
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    readable, _, _ = select.select([watched], [], [], seconds)
    os.close(watched)
    return bool(readable)


def test_a_keeper_process_keeps_what_its_ranks_leave():
    with dcs.replicas.serve_keeper(token="secret", max_bytes=1 << 30) as keeper:
        assert keeper.alive
        assert "secret" not in " ".join(psutil.Process(keeper.pid).cmdline())
        with dcs.replicas.Replicas([keeper.address], "actor", copies=1, token="secret") as rank:
            rank.save(3, {"w": torch.arange(10)}).wait(20)
        with pytest.raises(Unauthorized):
            dcs.replicas.status(keeper.address)
        status = dcs.replicas.status(keeper.address, token="secret")
        assert status.max_bytes == 1 << 30
        assert [(s.step, s.ranks) for a in status.names[0].attempts for s in a.steps] == [(3, (0,))]
        restored = dcs.replicas.restore([keeper.address], "actor", token="secret")
        assert restored is not None
        step, tree = restored
        assert step == 3
        assert torch.equal(tree["w"], torch.arange(10))
        port = int(keeper.address.rpartition(":")[2])
        with pytest.raises(DcsError, match=f"127.0.0.1:{port}"):
            dcs.replicas.serve_keeper(port=port)
    assert not keeper.alive
    keeper.close()


def test_a_keeper_off_loopback_needs_a_token():
    with pytest.raises(Unauthorized, match="not loopback"):
        dcs.replicas.serve_keeper(host="0.0.0.0")


@pytest.mark.parametrize("bound", [False, True], ids=["outlives its parent", "ends with its parent"])
def test_whether_a_keeper_outlives_who_started_it(bound):
    parent = "os.getpid()" if bound else "None"
    code = (
        "import os, sys, dcs.replicas.process as p;"
        f"k = p.serve_keeper(parent={parent}); print(k.pid, k.address, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pid, address = starter.stdout.readline().split()
        starter.kill()
        starter.wait(20)
        try:
            if bound:
                assert ended(int(pid))
            else:
                assert dcs.replicas.status(address).names == ()
        finally:
            if not ended(int(pid), 0.0):
                os.kill(int(pid), signal.SIGTERM)
    assert ended(int(pid))


def test_a_keeper_that_nobody_needs_ends_by_itself():
    with dcs.replicas.serve_keeper(idle_seconds=0.3) as keeper:
        assert ended(keeper.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_its_address_and_ends_on_a_signal(number):
    command = [*KEEPER, "--max-bytes", "2GiB", "--no-shared-memory", "--domain", "rack 1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["pid"] == process.pid
        assert dcs.replicas.status(ready["address"]).max_bytes == 2 << 30
        process.send_signal(number)
        assert process.wait(20) == 0


def test_the_command_says_what_is_wrong_in_one_line():
    done = subprocess.run([*KEEPER, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "token" in done.stderr


def test_a_keeper_needs_no_torch():
    code = "import sys, dcs.replicas.command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_it_is_a_sub_command():
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    options = parser.parse_args(["keeper", "--max-bytes", "1.5GiB", "--idle-seconds", "9"])
    assert (options.max_bytes, options.idle_seconds, options.port) == (3 << 29, 9.0, 0)
    with pytest.raises(SystemExit):
        parser.parse_args(["keeper", "--max-bytes", "much"])
