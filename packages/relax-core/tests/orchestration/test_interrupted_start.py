"""A run that is told to end before its roles are there: it is interrupted, and nothing of Ray stays."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax.config import ConfigError
from relax.orchestration import cluster
from relax.orchestration.cluster import EMBEDDED, _own_sigterm, _said_in_words
from relax.orchestration.launcher import Poll, RoleFailed, WorkerStatus
from relax.orchestration.train import _follow


@pytest.fixture
def handler() -> Iterator[Any]:
    """A handler of SIGTERM that is the run's own."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("code", [1, signal.SIGTERM], ids=["Ray's node", "Ray's driver"])
def test_a_sigterm_that_ray_takes_over_interrupts_the_run(handler: Any, code: int) -> None:
    def start() -> None:
        with _own_sigterm():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_after_rays_start_sigterm_is_the_runs_again_and_ray_drains_nothing(handler: Any) -> None:
    with _own_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert EMBEDDED["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] == "0"


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        (
            "10.0.0.1:6379",
            ConfigError,
            r"ray.address = '10.0.0.1:6379': no Ray is reached there \(gone\); start",
        ),
        (None, RoleFailed, "^Ray did not start: gone$"),
    ],
)
def test_a_ray_that_does_not_start_is_said_in_a_line(
    address: str | None, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message), _said_in_words(address):
        raise ConnectionError("gone\nand much more")


def test_whether_anybody_listens_at_an_address_is_found_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        at = f"127.0.0.1:{head.getsockname()[1]}"
        cluster._reach(at)
        cluster._reach(f"ray://{at}")
    with pytest.raises(ConnectionRefusedError):
        cluster._reach(at)
    cluster._reach("auto")  # which is Ray's to find


def test_what_has_a_file_of_rays_folder_open_is_ended_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "LEAVE_SECONDS", 0.1)
    (tmp_path / "ray").mkdir()
    family = []
    for log in (tmp_path / "ray" / "agent.log", tmp_path / "other.log"):
        with log.open("w") as out:
            family.append(subprocess.Popen(["sleep", "1000"], stdout=out))
    agent, other = family
    try:
        cluster._end_users(tmp_path / "ray")
        assert agent.wait(30) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


async def test_nobody_waits_for_roles_that_start_when_the_run_is_told_to_end(config: Any) -> None:
    stop = asyncio.get_running_loop().create_future()

    class Starting:
        polls = 0

        async def poll(self) -> Poll:
            self.polls += 1
            if self.polls == 3:
                stop.set_result(None)
            return Poll(
                {"actor": WorkerStatus("actor", "starting"), "rollout": WorkerStatus("rollout", "done")}
            )

    run: Any = SimpleNamespace(ready=False, rewards=[], take=lambda report: None)
    services: Any = SimpleNamespace(
        queue=SimpleNamespace(restarted=lambda: ()),
        coordinator=SimpleNamespace(restarts=lambda: 0),
        failure=None,
    )
    launcher: Any = Starting()
    async with asyncio.timeout(20):
        assert await _follow(launcher, frozenset(), stop, config(), run, services)
    assert not run.ready
