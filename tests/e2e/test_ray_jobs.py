"""`ray-job.sh` against a real Ray with its job server: what it says, how it ends, what it leaves."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


@dataclass
class Head:
    """A Ray of one node with a job server."""

    address: str
    process: subprocess.Popen[bytes]
    environment: dict[str, str]

    def ask(self, path: str) -> object:
        request = urllib.request.Request(
            f"{self.address}{path}", headers={"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def answers(self) -> bool:
        try:
            return bool(self.ask("/api/version"))
        except OSError:
            return False

    def roles(self) -> list[psutil.Process]:
        """Its processes that are workers of a run, or deployments that watch them."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [
            one for one in found if titled(one, ("ray::RoleWorker", "ray::SERVE_REPLICA", "ray::Lifeline"))
        ]


def titled(process: psutil.Process, names: tuple[str, ...]) -> bool:
    try:
        return process.cmdline()[0].startswith(names)
    except (psutil.NoSuchProcess, IndexError):
        return False


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """With a token, and every port its own."""
    port, dashboard, client, agent, listen = free_ports(5)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS")}
    environment |= {
        "PATH": f"{TOOLS}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        command = [
            *(TOOLS / "ray", "start", "--head", "--block", "--disable-usage-stats", "--num-cpus=3"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            *(f"--ray-client-server-port={client}", f"--dashboard-agent-grpc-port={agent}"),
            *(f"--dashboard-agent-listen-port={listen}", f"--object-store-memory={200 << 20}"),
        ]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        there = Head(f"http://127.0.0.1:{dashboard}", process, environment)
        try:
            until(lambda: there.answers() or process.poll() is not None)
            assert process.poll() is None
            yield there
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            process.wait(timeout=60)
            psutil.wait_procs(family, timeout=30)


@dataclass
class Submitted:
    """A `ray-job.sh` that runs beside the test."""

    process: subprocess.Popen[str]
    job: str
    root: Path
    log: Path

    @property
    def folder(self) -> Path:
        return next(path for path in self.root.iterdir() if path.is_dir())

    def steps_done(self) -> int:
        try:
            return len((self.folder / "metrics.jsonl").read_text().splitlines())
        except (StopIteration, FileNotFoundError):
            return 0

    def finish(self, seconds: float = 200.0) -> tuple[int, str]:
        """Exit code, and what it said."""
        code = self.process.wait(timeout=seconds)
        return code, self.log.read_text()


@pytest.fixture
def submit(head: Head, tmp_path: Path) -> Iterator[Callable[..., Submitted]]:
    """submit("steps=3"): the quick start as a job."""
    started: list[Submitted] = []

    def start(*words: str) -> Submitted:
        number = len(started)
        job, root, log = (
            f"job-{secrets.token_hex(4)}",
            tmp_path / f"runs-{number}",
            tmp_path / f"log-{number}",
        )
        process = subprocess.Popen(
            [
                ROOT / "scripts/entrypoint/ray-job.sh",
                *("configs/quickstart.yaml", "log.progress=plain", f"run.root={root}", *words),
            ],
            env=head.environment | {"RAY_ADDRESS": head.address, "JOB_ID": job},
            text=True,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(Submitted(process, job, root, log))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def stop(head: Head, job: str) -> str:
    done = subprocess.run(
        [TOOLS / "ray", "job", "stop", "--address", head.address, job],
        env=head.environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    return done.stdout


def test_a_job_trains_and_leaves_its_run_where_it_was_told(submit, head):
    job = submit("steps=3", "run.name=by-hand")
    code, said = job.finish()
    assert code == 0, said
    assert "192 samples put = 192 trained + 0 dropped (exact)" in said
    assert job.folder == job.root / "by-hand"
    assert job.steps_done() == 3
    until(lambda: not head.roles(), 60)


def test_a_configuration_that_cannot_run_fails_with_its_message_and_1(submit, head):
    code, said = submit("actor.lr=fast").finish()
    assert code == 1, said
    assert "actor.lr = 'fast'" in said
    assert "exit code 2" in said
    assert "Traceback" not in said
    assert not head.roles()


def test_ctrl_c_ends_the_following_and_a_stop_the_run_with_a_checkpoint(submit, head):
    job = submit("steps=100000")
    until(lambda: job.steps_done() >= 2)
    os.killpg(job.process.pid, signal.SIGINT)
    code, said = job.finish(30)
    assert code == 130, said
    assert (
        f"the job goes on; follow it: {TOOLS / 'ray'} job logs --address {head.address} --follow {job.job}"
        in said
    )
    done = job.steps_done()
    until(lambda: job.steps_done() > done)
    assert f"Job '{job.job}' was stopped" in stop(head, job.job)
    logs = head.ask(f"/api/jobs/{job.job}/logs")
    assert isinstance(logs, dict)
    assert f"stopped; go on with: relax train --resume {job.folder}" in logs["logs"]
    assert (job.folder / "checkpoints" / f"step-{job.steps_done():06d}").is_dir()
    (accounts,) = [json.loads(line) for line in (job.folder / "accounting.jsonl").read_text().splitlines()]
    assert accounts["faults"] == []
    until(lambda: not head.roles(), 60)


def test_a_driver_that_is_killed_leaves_no_roles_on_the_cluster(submit, head):
    """Serve's deployments do not belong to the job that made them."""
    job = submit("steps=100000")
    until(lambda: job.steps_done() >= 2)
    (driver,) = [p for p in psutil.process_iter() if titled(p, ("ray",)) is False and drives(p, job.root)]
    family = driver.children(recursive=True)
    assert head.roles()
    driver.kill()
    code, said = job.finish(60)
    assert code == 1, said
    until(lambda: not head.roles(), 60)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    code, said = submit("steps=2").finish()
    assert code == 0, said


def drives(process: psutil.Process, root: Path) -> bool:
    """Whether it is the `relax train` itself of a run below a folder."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return f"run.root={root}" in words and any(word.endswith("/relax") for word in words[:2])
