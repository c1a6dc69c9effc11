"""Supervision of a server process: it ends with its owner, with all it has started; its death is noticed."""

import asyncio
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.guard import Made, _unlink
from relax.backends.inference.sglang.process import ReservedPort, ServerFailed, ServerProcess

FAMILY = """
import subprocess, sys, time
other = "import os, time; os.setsid(); print('orphan', os.getpid(), flush=True); time.sleep(1000)"
child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {other!r}]).wait()"
print("started", flush=True)
subprocess.Popen([sys.executable, "-S", "-c", child])
time.sleep(1000)
"""
"""A server with a child, and a grandchild that is in a session of its own."""

OWNER = """
import asyncio, os, sys
from pathlib import Path
from relax.backends.inference.sglang.guard import Made, _unlink
from relax.backends.inference.sglang.process import ServerProcess

async def own():
    ServerProcess.start([sys.executable, "-S", "-c", sys.argv[2]], os.environ, Path(sys.argv[1]))
    await asyncio.sleep(1000)

asyncio.run(own())
"""


SHARED = Path("/dev/shm")


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[[str], ServerProcess]]:
    """`start(program)`: a server that is that Python program."""
    started: list[ServerProcess] = []

    def run(program: str) -> ServerProcess:
        server = ServerProcess.start(
            [sys.executable, "-S", "-c", program], os.environ, tmp_path / "server.log"
        )
        started.append(server)
        return server

    yield run
    for server in started:
        await server.close()


def until(found: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def exists(file: Path) -> bool:
    return file.exists()


def orphan_of(log: Path) -> int:
    until(lambda: "orphan" in log.read_text())
    return int(log.read_text().split("orphan", 1)[1].split()[0])


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def says(server: ServerProcess, word: str) -> bool:
    return word in server.log.read_text()


async def test_closing_ends_the_server_and_all_it_has_started(start):
    server = start(FAMILY)
    await server.ready(lambda: says(server, "orphan"), 30)
    orphan = orphan_of(server.log)
    await server.close()
    await server.close()
    assert gone(orphan)
    assert server.ended.result() == "it was closed"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_when_its_owner_dies_however_that_is(how, tmp_path):
    log = tmp_path / "server.log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log), FAMILY])
    try:
        until(log.exists)
        orphan = orphan_of(log)
        family = [psutil.Process(owner.pid).children(recursive=True), [psutil.Process(orphan)]]
        owner.send_signal(how)
        owner.wait(30)
        until(lambda: all(gone(one.pid) for group in family for one in group))
    finally:
        owner.kill()
        owner.wait()


SHARING = """
import mmap, multiprocessing, pathlib, time
from multiprocessing.shared_memory import SharedMemory

lock = multiprocessing.get_context("spawn").Lock()
own = SharedMemory(create=True, size=4096)
names = pathlib.Path(NAMES)
while not names.exists():
    time.sleep(0.02)
*others, weights = names.read_text().split()
kept = [SharedMemory(name) for name in others]
with open(weights, "r+b") as file:
    model = mmap.mmap(file.fileno(), 0)
print("shared", own.name, lock._semlock.name, flush=True)
time.sleep(1000)
"""
"""A server with shared memory and a semaphore of its own, which also maps memory of others, and a model."""


@pytest.fixture
def shared() -> Iterator[Callable[[], SharedMemory]]:
    """`shared()`: memory of this process."""
    made: list[SharedMemory] = []

    def make() -> SharedMemory:
        made.append(SharedMemory(f"psm_{uuid.uuid4().hex[:12]}", create=True, size=4096))
        return made[-1]

    yield make
    for memory in made:
        memory.close()
        memory.unlink()


@pytest.fixture
def model() -> Iterator[Path]:
    """A file of weights, which people keep there to load it fast."""
    file = SHARED / f"{uuid.uuid4().hex}.safetensors"
    file.write_bytes(bytes(4096))
    yield file
    file.unlink()


async def test_what_a_killed_server_had_in_shared_memory_is_gone_and_nothing_else(
    start, shared, model, tmp_path
):
    before = shared()
    before.close()  # it is there, and nobody has it mapped
    names = tmp_path / "names"
    server = start(SHARING.replace("NAMES", repr(str(names))))
    during = shared()  # this process has it mapped
    names.write_text(f"{before.name} {during.name} {model}")
    await server.ready(lambda: says(server, "shared"), 30)
    _, own, semaphore = server.log.read_text().split()[:3]
    files = [SHARED / own, SHARED / f"sem.{semaphore.lstrip('/')}"]
    assert [file for file in files if not exists(file)] == []
    await server.close()
    assert [file for file in files if exists(file)] == []
    assert exists(model)
    assert exists(SHARED / before.name)
    assert exists(SHARED / during.name)


PARTED = """
import multiprocessing, time
from multiprocessing import resource_tracker

resource_tracker.ensure_running()  # the parent's, which is killed before it can unlink anything

def part():
    lock = multiprocessing.get_context("spawn").Lock()
    print("made", lock._semlock.name, multiprocessing.current_process().pid, flush=True)
    time.sleep(1000)

multiprocessing.get_context("fork").Process(target=part).start()
time.sleep(1000)
"""
"""A server of two processes, of which the second has a semaphore that the first knows nothing of."""


@pytest.mark.parametrize("told", [True, False], ids=["with inotify", "without"])
def test_a_semaphore_is_known_as_its_makers_after_that_was_killed(told, tmp_path, monkeypatch):
    """Those of others are left alone."""
    log = tmp_path / "log"
    made = Made()
    if not told:
        os.close(made.descriptor)
        made.descriptor = -1
    with log.open("wb") as out:
        server = subprocess.Popen([sys.executable, "-S", "-c", PARTED], stdout=out)
    elsewhere = multiprocessing.get_context("spawn").Lock()  # this process's own
    try:
        until(lambda: "made" in log.read_text() or server.poll() is not None)
        _, name, part = log.read_text().split()
        file = SHARED / f"sem.{name.lstrip('/')}"
        made.look()
        assert made.inodes == {file.stat().st_ino}
        os.kill(int(part), signal.SIGKILL)
        made.look()
        assert made.inodes == {file.stat().st_ino}
    finally:
        for process in (*psutil.Process(server.pid).children(recursive=True), server):
            process.kill()
        server.wait()
        if told:
            assert (
                select.select([made.descriptor], [], [], 0)[0] == []
            )  # nothing was made since the last look
            os.close(made.descriptor)
    _unlink(made.inodes)
    assert not exists(file)
    assert exists(SHARED / f"sem.{elsewhere._semlock.name.lstrip('/')}")  # pyright: ignore


@pytest.mark.slow
async def test_nothing_is_left_of_a_part_that_was_killed(start):
    server = start(PARTED)
    await server.ready(lambda: says(server, "made"), 30)
    _, name, part = server.log.read_text().split()
    file = SHARED / f"sem.{name.lstrip('/')}"
    await asyncio.sleep(2)  # the guard takes note within milliseconds, and has nobody to tell
    os.kill(int(part), signal.SIGKILL)
    until(lambda: gone(int(part)))
    assert exists(file)
    await server.close()
    assert not exists(file)


BESIDES = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("orphan", os.getpid(), flush=True)
time.sleep(1000)
"""
"""A server with a child that does not end with it, as SGLang's have it that are still being started."""


@pytest.mark.parametrize("which", ["the owner's child, as Ray does", "the one that guards"])
async def test_nothing_is_left_when_a_guard_is_killed(start, which):
    server = start(BESIDES)
    await server.ready(lambda: says(server, "orphan"), 30)
    orphan = orphan_of(server.log)
    guard = psutil.Process(server._process.pid)
    if which == "the one that guards":
        (guard,) = guard.children()
    guard.kill()
    until(lambda: gone(orphan))
    async with asyncio.timeout(30):
        assert "its process ended" in await asyncio.shield(server.ended)


async def test_a_death_is_told_with_its_signal_and_the_end_of_the_log(start):
    server = start("import os\nfor n in range(40): print('line', n, flush=True)\nos.kill(os.getpid(), 11)")
    async with asyncio.timeout(30):
        told = await asyncio.shield(server.ended)
    assert "killed by SIGSEGV" in told
    assert "line 39" in told
    assert "line 2\n" not in told
    assert str(server.log) in told


async def test_an_error_that_much_follows_is_shown_before_the_end_of_the_log(start):
    server = start("print('OSError: the port is taken')\nfor n in range(90): print('line', n)")
    async with asyncio.timeout(30):
        told = await asyncio.shield(server.ended)
    assert "OSError: the port is taken\n...\nline 65\n" in told
    assert told.endswith("line 89")


async def test_the_end_of_a_part_is_the_end_of_the_server(start):
    server = start(FAMILY)
    await server.ready(lambda: says(server, "orphan"), 30)
    part = orphan_of(server.log)
    server.watch([part])
    os.kill(part, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert f"its process {part} died" in await asyncio.shield(server.ended)


async def test_a_start_that_fails_or_takes_too_long_is_told_with_the_log(start, tmp_path):
    bad = start("import sys; sys.exit('unrecognized arguments: --nonsense')")
    with pytest.raises(ServerFailed, match=r"exit code 1.*\n(.*\n)*.*unrecognized arguments: --nonsense"):
        await bad.ready(lambda: says(bad, "never"), 30)
    slow = start("import time; print('loading', flush=True); time.sleep(1000)")
    await slow.ready(lambda: says(slow, "loading"), 30)
    with pytest.raises(
        ServerFailed, match=r"within 0.5 s \(rollout.sglang.start_seconds\)\n(.*\n)*.*loading"
    ):
        await slow.ready(lambda: says(slow, "never"), 0.5)
    missing = ServerProcess.start([str(tmp_path / "no-python")], os.environ, tmp_path / "other.log")
    with pytest.raises(EngineError, match=r"exit code 127.*\n(.*\n)*.*no-python' cannot be run"):
        await missing.ready(lambda: says(missing, "never"), 30)
    await missing.close()


def test_a_reserved_port_is_kept_from_others_and_open_to_a_server():
    import socket

    reserved = ReservedPort()
    try:
        for _ in range(50):
            with socket.create_server(("127.0.0.1", 0)) as other:
                assert other.getsockname()[1] != reserved.number
        with socket.create_server(("127.0.0.1", reserved.number)) as server:
            assert server.getsockname()[1] == reserved.number
    finally:
        reserved.close()
