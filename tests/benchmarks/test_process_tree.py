import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import psutil
import pytest
from measure.process_tree import ProcessTree, Reading  # pyright: ignore[reportMissingImports] - see conftest

# Each prints a line when it is where the test wants it, then waits for its standard input to close.
BURN = """
import sys, time
while time.process_time() < {seconds}:
    pass
print("there", flush=True)
sys.stdin.read()
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {burn!r}])
child.wait()
"""
DAEMON = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {burn!r}], start_new_session=True)
print(child.pid, flush=True)
os._exit(0)
"""

TICKS = 0.05
"""The kernel counts in hundredths of a second, by process and by user and system."""

Start = Callable[[ProcessTree, str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []
    trees: list[ProcessTree] = []

    def run(tree: ProcessTree, program: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=tree.environment(),
            start_new_session=True,
        )
        started.append(process)
        trees.append(tree)
        tree.follow(process.pid)
        return process

    yield run
    left = [process for tree in trees for process in tree.living()]
    for process in started:
        process.communicate(timeout=30)
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_cpu_of_a_child_counts_and_is_told_apart_from_the_root(start: Start):
    tree = ProcessTree()
    process = start(tree, PARENT.format(burn=BURN.format(seconds=0.5)))
    assert _line(process) == "there"
    reading = tree.read()
    assert reading.processes == 2
    assert reading.seconds - reading.root >= 0.5 - TICKS


def test_what_was_spent_since_is_told_by_the_name_a_process_shows_now():
    one, two = (1, 0.0), (2, 0.0)
    before = Reading({one: ("starting", 2.0)}, root=2.0, processes=1)
    after = Reading({one: ("worker", 2.5), two: ("worker", 1.0)}, root=2.5, processes=2)
    assert after.by_name_since(before) == {"worker": 1.5}
    assert after.seconds - before.seconds == 1.5


def test_a_daemon_whose_parent_has_gone_counts_by_its_mark(start: Start):
    tree = ProcessTree()
    process = start(tree, DAEMON.format(burn=BURN.format(seconds=0.3)))
    daemon = int(_line(process))
    assert _line(process) == "there"
    process.wait(timeout=30)
    assert psutil.Process(daemon).ppid() != process.pid
    assert os.getsid(daemon) == daemon
    reading = tree.read()
    assert reading.processes == 1
    assert reading.seconds >= 0.3 - TICKS
    assert daemon in {one.pid for one in tree.living()}


def test_what_an_ended_process_had_used_is_kept(start: Start):
    tree = ProcessTree()
    process = start(tree, PARENT.format(burn=BURN.format(seconds=0.3)))
    assert _line(process) == "there"
    before = tree.read()
    left = tree.living()
    process.communicate(timeout=30)
    psutil.wait_procs(left, timeout=30)
    after = tree.read()
    assert after.processes == 0
    assert after.seconds >= before.seconds


def test_the_process_that_measures_does_not_count_itself(start: Start):
    tree = ProcessTree()
    process = start(tree, BURN.format(seconds=0.0))
    assert _line(process) == "there"
    assert {one.pid for one in tree.living()} == {process.pid}


def test_a_reading_without_a_command_is_refused():
    with pytest.raises(RuntimeError, match="follow"):
        ProcessTree().read()
