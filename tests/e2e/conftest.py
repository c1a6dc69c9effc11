"""Whole runs at small size: in this process by the local launcher, and on Ray by the command line."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TIMED = ("time/", "perf/", "queue/", "weights/")
"""Metrics that depend on the clock."""


@dataclass(frozen=True)
class Run:
    """What a run left in its folder."""

    folder: Path
    output: str = ""
    code: int = 0

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.lines("metrics.jsonl")

    @property
    def rewards(self) -> list[float]:
        return [step["reward/mean"] for step in self.metrics]

    @property
    def untimed(self) -> list[dict[str, Any]]:
        """Metrics that depend on the data alone."""
        return [{k: v for k, v in step.items() if not k.startswith(TIMED)} for step in self.metrics]

    @property
    def accounting(self) -> list[dict[str, Any]]:
        return self.lines("accounting.jsonl")

    def trained(self) -> list[tuple[int, list[int]]]:
        """(step, ordinals in the order trained) of every completed step, over all segments."""
        files = sorted((self.folder / "schedule").glob("segment-*/actor.jsonl"))
        entries = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [(entry["step"], entry["ordinals"]) for entry in entries]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What goes wrong in the engines of this test."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "breaking")
    found = importlib.import_module("breaking_engine").PLAN
    found.faults, found.made = deque(), 0
    yield found
    found.faults.clear()


@pytest.fixture(scope="session", autouse=True)
def _from_the_root() -> Iterator[None]:
    """Configurations name their data files from the root of the repository."""
    before = Path.cwd()
    os.chdir(ROOT)
    yield
    os.chdir(before)


@pytest.fixture
def local(tmp_path: Path) -> Callable[..., Run]:
    """Run a configuration in this process: local("quickstart", "steps=5", resume=False, replay=None)."""

    def run(
        config: str, *words: str, name: str = "run", resume: bool = False, replay: Run | None = None
    ) -> Run:
        from relax.config import load
        from relax.orchestration import run_folder
        from relax.orchestration.train import prepare, train

        always = [
            f"run.root={tmp_path}",
            f"run.name={name}",
            "launcher=local",
            "log.progress=none",
            "log.tensorboard=false",
        ]
        if resume:
            folder, resolved = run_folder.reopen(tmp_path / name, list(words))
        else:
            resolved = load(ROOT / "configs" / f"{config}.yaml", [*always, *words])
            folder = run_folder.create(resolved, name)
        schedule = replay.folder / "schedule" / "segment-0" if replay is not None else None
        context = prepare(resolved, folder, resume=resume, replay=schedule)
        train(resolved, folder, context, name)
        return Run(folder.path)

    return run


@dataclass
class Command:
    """A `relax` command that runs beside the test."""

    process: "subprocess.Popen[str]"
    root: Path

    @property
    def folder(self) -> Path:
        return next(path for path in self.root.iterdir() if path.is_dir())

    def wait_for(self, condition: Callable[[], bool], timeout: float = 90.0) -> None:
        """Until a condition on the run holds; fails when the command ends before."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"not within {timeout} s"
            time.sleep(0.05)

    def steps_done(self) -> int:
        try:
            return len((self.folder / "metrics.jsonl").read_text().splitlines())
        except (StopIteration, FileNotFoundError):
            return 0

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, timeout: float = 90.0) -> Run:
        output, _ = self.process.communicate(timeout=timeout)
        return Run(self.folder, output, self.process.returncode)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `relax` as a person would; what is left of it at the end of the test is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, root: Path | None = None) -> Command:
        root = root or tmp_path / "runs"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        process = subprocess.Popen(
            [
                str(Path(sys.executable).parent / "relax"),
                *words,
                *([f"run.root={root}"] if "--resume" not in words else []),
            ],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(process)
        return Command(process, root)

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every sample (`relax.distributed.bus.Sample`) that the rollout of a `local` run puts on the bus."""
    from relax.distributed.bus import Bus

    samples: list[Any] = []
    original = Bus.put_group

    async def recording(self: Bus, group: list[Any], *where: Any) -> Any:
        samples.extend(group)
        return await original(self, group, *where)

    monkeypatch.setattr(Bus, "put_group", recording)
    return samples
