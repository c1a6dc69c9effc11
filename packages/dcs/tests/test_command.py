"""`dcs serve` and `dcs.serve`."""

import json
import os
import select
import signal
import subprocess
import sys

import dcs
import psutil
import pytest
import torch

SERVE = [sys.executable, "-m", "dcs.cli", "serve"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_prints_its_address_and_ends_on_a_signal(number):
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["pid"] == process.pid
        layout = dcs.layout.of({"w": torch.zeros(1)})
        dcs.Subscriber(ready["address"], name="e", layout=layout).close()
        process.send_signal(number)
        assert process.wait(10) == 0


def test_the_command_says_what_is_wrong_in_one_line():
    with dcs.Coordinator() as coordinator:
        port = coordinator.address.rpartition(":")[2]
        done = subprocess.run([*SERVE, "--port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"127.0.0.1:{port}" in done.stderr


def test_a_coordinator_process_needs_no_torch():
    code = "import sys, dcs.cli, dcs.control.coordinator; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_serve_raises_what_the_process_could_not_do():
    with dcs.serve(token="secret") as coordinator:
        assert coordinator.alive
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
