"""What is left of a run that nothing could end tidily: its command, or Ray under it, was killed."""

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax.backends.inference.sglang.guard import mapped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
Start = Callable[..., Any]
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "actor.micro_batch_size=8",
    "rollout.max_new_tokens=8",
    "ray.num_cpus=2",
)
RAYS_OWN = (44217, 44227)
"""Ports of Ray's metrics, which any Ray of the machine takes while they are free: other tests run some."""
GONE_SECONDS = 90.0
"""After the command was killed, for all that it had started: two agents of Ray look for it for a minute."""


def shared(processes: list[psutil.Process]) -> set[int]:
    """Inodes of what they have of shared memory: other tests, which may run beside, have some too."""
    return set().union(*(mapped(process.pid) for process in processes))


def there(inodes: set[int]) -> list[str]:
    """The files of /dev/shm that are these."""
    with os.scandir("/dev/shm") as files:
        return [file.name for file in files if file.inode() in inodes]


def folders(pid: int) -> list[Path]:
    """What the Ray of a command has on disk."""
    return list(Path(tempfile.gettempdir()).glob(f"relax-ray-{pid}-*"))


def ports(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """Where they listen."""
    found = set()
    for process in processes:
        try:
            listening = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        except psutil.Error:
            continue
        found |= {(str(one.laddr.ip), int(one.laddr.port)) for one in listening if ":" not in one.laddr.ip}
    return {place for place in found if place[1] not in RAYS_OWN}


def gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after `GONE_SECONDS`."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_SECONDS)
    return [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def free(place: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError:
            return False
    return True


@pytest.mark.parametrize("launcher", ["ray", "local"])
@pytest.mark.parametrize("phase", ["starting roles", "training"])
def test_nothing_is_left_of_a_run_whose_command_was_killed(command: Start, launcher: str, phase: str) -> None:
    words = (f"launcher={launcher}", *SMALL, "log.progress=plain")
    started = command("train", "configs/quickstart.yaml", *words, "steps=100000")
    if phase == "training":
        started.wait_for(lambda: started.steps_done() >= 2, timeout=300)
    else:
        assert started.process.stdout is not None
        assert any(line.startswith(phase) for line in started.process.stdout)
        time.sleep(1)
    family = started.descendants()
    memory = shared(family)
    listening = ports([*family, psutil.Process(started.process.pid)])
    assert family
    assert listening
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait(30)
    assert gone(family) == []
    assert [place for place in sorted(listening) if not free(place)] == []
    assert there(memory) == []
    after = command("train", "configs/quickstart.yaml", *words, "steps=2", root=started.root.parent / "after")
    run = after.finish(300)
    assert run.code == 0, run.output
    assert folders(started.process.pid) == []  # what a killed Ray left on disk was removed by the next one


def test_a_killed_run_is_resumed_from_its_newest_checkpoint(command: Start) -> None:
    started = command("train", "configs/quickstart.yaml", *SMALL, "checkpoint.every=2", "steps=100000")
    started.wait_for(lambda: started.steps_done() >= 5, timeout=300)
    family = started.descendants()
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait(30)
    assert gone(family) == []
    done = started.steps_done()
    resumed = command("train", "--resume", str(started.folder), f"steps={done + 2}", root=started.root)
    run = resumed.finish(300)
    assert run.code == 0, run.output
    trained = dict(run.trained())  # a step after the checkpoint was trained by both lives; the later counts
    assert sorted(trained) == list(range(done + 2))
    assert sorted(one for group in trained.values() for one in group) == list(range((done + 2) * 4))


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_nothing_is_left_of_a_run_whose_ray_was_killed(command: Start, name: str) -> None:
    started = command("train", "configs/quickstart.yaml", *SMALL, "steps=100000")
    started.wait_for(lambda: started.steps_done() >= 2, timeout=300)
    family = started.descendants()
    memory = shared(family)
    (daemon,) = [one for one in family if one.name() == name]
    daemon.kill()
    run = started.finish(timeout=120)
    assert run.code == 1
    assert f"{name} of the embedded Ray died" in run.output
    assert gone(family) == []
    assert there(memory) == []
    assert folders(started.process.pid) == []
