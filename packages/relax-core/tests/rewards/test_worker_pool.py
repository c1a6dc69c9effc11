import asyncio
import contextlib
import subprocess
import sys
import time

import psutil
import pytest
from relax.engine.rewards import RewardError
from relax.engine.rewards.worker_pool import WorkerDied, WorkerPool, WorkerTimeout


@pytest.fixture
def pool():
    made = []

    def make(target, *, workers=1, timeout=30.0, **options):
        made.append(WorkerPool(target, workers=workers, timeout=timeout, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_a_child_serves_many_calls_and_large_messages(pool):
    lengths = pool("builtins:len")
    assert await lengths.call("abc") == 3
    (pid,) = lengths.pids
    assert await lengths.call("x" * 3_000_000) == 3_000_000
    assert lengths.pids == [pid]


async def test_what_a_target_prints_does_not_disturb_the_answers(pool):
    printing = pool("builtins:print")
    assert [await printing.call("on standard error") for _ in range(2)] == [None, None]


async def test_a_late_child_is_killed_at_its_deadline_and_replaced(pool):
    sleeping = pool("time:sleep", timeout=0.5)
    assert await sleeping.call(0) is None
    (pid,) = sleeping.pids
    with pytest.raises(WorkerTimeout, match=r"time:sleep took longer than 0.5 s and was killed"):
        await sleeping.call(600)
    assert not psutil.pid_exists(pid)
    assert await sleeping.call(0) is None


async def test_a_child_that_ends_is_told_by_its_status_and_replaced(pool):
    exiting = pool("os:_exit")
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"os:_exit ended with status 3"):
            await exiting.call(3)


async def test_a_child_may_not_take_all_memory(pool):
    allocating = pool("builtins:bytearray", memory_bytes=256 << 20)
    with pytest.raises(WorkerDied, match="status 1"):
        await allocating.call(1 << 30)


async def test_a_target_that_cannot_be_imported_is_an_error_of_the_setup(pool):
    with pytest.raises(RewardError, match=r"no_such_module:f ended with status 1 while starting"):
        await pool("no_such_module:f").call(1)


async def test_closing_ends_calls_under_way_and_leaves_no_process(pool):
    sleeping = pool("time:sleep", timeout=600.0)
    await sleeping.call(0)
    (pid,) = sleeping.pids
    calls = [asyncio.ensure_future(sleeping.call(500)) for _ in range(3)]
    await asyncio.sleep(0)  # lets the calls be submitted
    began = time.monotonic()
    await asyncio.to_thread(sleeping.close)
    for call in calls:
        with pytest.raises(RewardError, match="time:sleep is closed"):
            await call
    assert time.monotonic() - began < 10
    assert not psutil.pid_exists(pid)
    sleeping.close()
    with pytest.raises(RewardError, match="is closed"):
        await sleeping.call(0)


async def test_a_cancelled_call_leaves_the_pool_usable(pool):
    sleeping = pool("time:sleep", timeout=0.5)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sleeping.call(600), 0.05)
    assert await sleeping.call(0) is None


def test_the_pool_serves_one_event_loop_after_another(pool):
    lengths = pool("builtins:len")
    assert [asyncio.run(lengths.call("ab")) for _ in range(2)] == [2, 2]


def test_children_end_with_a_parent_that_never_closed():
    code = (
        "import asyncio, os\n"
        "from relax.engine.rewards.worker_pool import WorkerPool\n"
        "pool = WorkerPool('builtins:len', workers=1, timeout=30.0)\n"
        "asyncio.run(pool.call('a'))\n"
        "print(pool.pids[0], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    pid = int(run.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=20)
    assert not psutil.pid_exists(pid)
