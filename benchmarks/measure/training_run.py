"""`relax train` run as a person runs it, timed from outside.

Steps are dated by the actor's journal (journal.jsonl in the run folder: one "done" line a step, written when
the step is done), looked at every 10 ms; what the run itself says of its steps comes from metrics.jsonl.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from .process_tree import ProcessTree, Reading, system_busy

LOOK_SECONDS = 0.01
LOOK_STEPS = 5
"""Steps between two readings of the CPU-seconds."""
END_SECONDS = 30.0
"""Longest wait for processes to go after a run has ended, or was told to."""
PHASES = ("wait", "train", "optim", "publish")


class RunError(RuntimeError):
    """A run that could not be measured: it failed, took too long, or left processes behind."""


@dataclass(frozen=True)
class Window:
    """The steps that are measured: those after the warm-up, from one step's end to the last step's end.

    Attributes:
        cpu_before: CPU-seconds of the whole system before the window: the start-up and the warm-up steps.
        walls: seconds of each step, end to end.
        cpu: CPU-seconds a step of the whole system, a value for every few steps.
        cpu_root: the same of the command's own process.
        cpu_by_name: CPU-seconds a step by process name, the largest first; over the whole window.
        processes: alive at the end of the window.
        others: cores that processes other than the run's kept busy meanwhile.
        others_before: the same before the window.
    """

    cpu_before: float
    walls: list[float]
    cpu: list[float]
    cpu_root: list[float]
    cpu_by_name: dict[str, float]
    processes: int
    others: float
    others_before: float


@dataclass(frozen=True)
class TrainingRun:
    """A run that went to its end.

    Attributes:
        folder: the run folder.
        first_step: seconds from the start of the command to the end of the first optimizer step.
        wall: seconds from the start of the command to its end.
        window: what was measured of the steps after the warm-up.
        metrics: the lines of metrics.jsonl.
        output: what the command printed.
    """

    folder: Path
    first_step: float
    wall: float
    window: Window
    metrics: list[dict[str, Any]]
    output: str

    def rewards(self) -> list[float]:
        """Mean reward of each step."""
        return [line["reward/mean"] for line in self.metrics]

    def phases(self, warm_up: int) -> dict[str, list[float]]:
        """Seconds of each step by phase of the actor, warm-up left out; `between` is what lies between steps'
        own clocks.
        """
        lines = self.metrics[warm_up:]
        split = {phase: [line[f"time/{phase}"] for line in lines] for phase in PHASES}
        own = [sum(line[f"time/{phase}"] for phase in PHASES) for line in lines]
        split["between"] = [max(wall - o, 0.0) for wall, o in zip(self.window.walls, own, strict=False)]
        return split

    def trained_tokens(self) -> float:
        """Tokens in the loss, over all steps."""
        return sum(line["tokens/trained"] for line in self.metrics)

    def generated_tokens(self, tokens_each: int) -> int:
        """Tokens sampled by all engines, from their own records of what they admitted. For runs that sample a
        fixed number of tokens a request (`ignore_eos`, one turn).
        """
        admitted = 0
        for file in self.folder.glob("schedule/segment-*/engine-*.jsonl"):
            for line in file.read_text().splitlines():
                event = json.loads(line)["event"]
                admitted += len(event[1]) if event[0] == "admit" else 0
        return admitted * tokens_each


def train(
    config: Path,
    words: Sequence[str],
    root: Path,
    name: str,
    *,
    steps: int,
    warm_up: int,
    timeout: float,
    cwd: Path,
) -> TrainingRun:
    """Run `relax train CONFIG WORDS` to its end.

    Args:
        config: configuration file.
        words: key=value words.
        root, name: the run folder is root/name.
        steps: that the run has.
        warm_up: first steps that are not measured; at least 1.
        timeout: seconds for the whole command.
        cwd: the folder to run in.

    Raises:
        RunError: it failed, took too long, did fewer steps, or left processes behind.
    """
    folder = root / name
    command = [
        sys.executable,
        *("-m", "relax.entrypoints.cli", "train", str(config)),
        *words,
        *(f"steps={steps}", f"run.root={root}", f"run.name={name}", "log.progress=plain"),
    ]
    tree = ProcessTree()
    variables = tree.environment()
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    log = root / f"{name}.log"
    root.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=cwd,
            start_new_session=True,
        )
    tree.follow(process.pid)
    try:
        watched = _watch(process, tree, folder / "journal.jsonl", steps, warm_up, started + timeout)
        _wait(process, started + timeout)
        ended = time.monotonic()
    except BaseException:
        _end(process, tree)
        raise
    finally:
        output = log.read_text()
    left = _left_behind(tree)
    if process.returncode != 0 or watched.last_step < steps - 1:
        raise RunError(
            f"`{' '.join(command[1:])}` ended with {process.returncode} after {watched.last_step + 1} of "
            f"{steps} steps:\n{output[-4000:]}"
        )
    if left:
        raise RunError(f"`{' '.join(command[1:])}` left processes behind: {', '.join(left)}")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if len(metrics) != steps:
        raise RunError(f"{folder / 'metrics.jsonl'} has {len(metrics)} lines after {steps} steps")
    return TrainingRun(folder, watched.times[0] - started, ended - started, watched.window(), metrics, output)


@dataclass(frozen=True)
class _Look:
    """What the machine and the run had used when a step was seen done."""

    step: int
    time: float
    busy: float
    used: Reading


class _Watched:
    """When each step was done, and looks at what was used: at both ends of the window and in between."""

    def __init__(self) -> None:
        self._began = (time.monotonic(), system_busy())
        self.times: dict[int, float] = {}
        self.looks: list[_Look] = []

    @property
    def last_step(self) -> int:
        return max(self.times, default=-1)

    def window(self) -> Window:
        """From the first look to the last."""
        if len(self.looks) < 2:
            raise RunError("every step was seen done at once, so there is no window to measure")
        first, last = self.looks[0], self.looks[-1]
        pairs = list(pairwise(self.looks))
        cpu = last.used.seconds - first.used.seconds
        steps = last.step - first.step
        began, busy = self._began
        return Window(
            cpu_before=first.used.seconds,
            walls=[self.times[step] - self.times[step - 1] for step in range(first.step + 1, last.step + 1)],
            cpu=[(b.used.seconds - a.used.seconds) / (b.step - a.step) for a, b in pairs],
            cpu_root=[(b.used.root - a.used.root) / (b.step - a.step) for a, b in pairs],
            cpu_by_name={n: s / steps for n, s in last.used.by_name_since(first.used).items()},
            processes=last.used.processes,
            others=max(last.busy - first.busy - cpu, 0.0) / (last.time - first.time),
            others_before=max(first.busy - busy - first.used.seconds, 0.0) / (first.time - began),
        )


def _watch(
    process: subprocess.Popen[bytes],
    tree: ProcessTree,
    journal: Path,
    steps: int,
    warm_up: int,
    deadline: float,
) -> _Watched:
    """Follow the journal until the last step is done or the command has ended."""
    watched, offset, rest = _Watched(), 0, b""
    while watched.last_step < steps - 1:
        ended = process.poll() is not None
        if time.monotonic() > deadline:
            raise RunError(
                f"the run took longer than it may; {watched.last_step + 1} of {steps} steps were done"
            )
        if journal.is_file() and journal.stat().st_size > offset:
            with journal.open("rb") as stream:
                stream.seek(offset)
                fresh = stream.read()
            now = time.monotonic()
            offset += len(fresh)
            *lines, rest = (rest + fresh).split(b"\n")
            for line in lines:
                entry = json.loads(line)
                if not entry.get("done"):
                    continue
                watched.times[entry["step"]] = now
            step = watched.last_step
            next_look = watched.looks[-1].step + LOOK_STEPS if watched.looks else warm_up - 1
            if step >= next_look or step == steps - 1:
                ends = not watched.looks or step == steps - 1
                watched.looks.append(_Look(step, now, system_busy(), tree.read(search=ends)))
        elif ended:
            break
        time.sleep(LOOK_SECONDS)
    return watched


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        raise RunError("the run did all its steps but did not end in time") from None


def _end(process: subprocess.Popen[bytes], tree: ProcessTree) -> None:
    """End a run early: ask it, then end what is left of it."""
    living = tree.living()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            living += tree.living()
    for one in {*living, *tree.living()}:
        if one.is_running() and one.pid != os.getpid():
            one.kill()
    process.wait(END_SECONDS)


def _left_behind(tree: ProcessTree) -> list[str]:
    """Names of what still runs a while after the command ended; ended here, so that it disturbs no one."""
    _, alive = psutil.wait_procs(tree.living(), timeout=END_SECONDS)
    names = []
    for one in alive:
        names.append(f"{one.name()} ({one.pid})")
        one.kill()
    return names
