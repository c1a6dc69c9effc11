"""A run in one process that is told to end while a role is being made: nobody waits for what makes it."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from relax.ops.leavable import leavable

SLOW = """
import sys, threading, time

class SlowEngine:
    def __init__(self): pass

    @classmethod
    async def create(cls, spec):
        from relax.ops.leavable import leavable

        def load():
            print("loading", flush=True)
            time.sleep(600)

        return await leavable(load)
"""
"""An engine that takes its time, as one of a large model does."""


async def test_it_returns_and_raises_what_the_work_does() -> None:
    assert await leavable(lambda: 7) == 7
    assert await leavable(lambda: threading.current_thread().daemon)
    with pytest.raises(ZeroDivisionError):
        await leavable(lambda: 1 // 0)


def test_a_loop_does_not_wait_for_what_was_left() -> None:
    go = threading.Event()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await leavable(lambda: go.wait(60))

    began = time.monotonic()
    asyncio.run(leave())
    assert time.monotonic() - began < 30
    go.set()  # it ends with nobody to tell


@pytest.mark.parametrize(
    "told",
    [
        signal.SIGHUP,
        *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_a_start_that_is_interrupted_ends_the_command(told: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "slow_engine.py").write_text(SLOW)
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "say 7"}\n')
    command = [
        *(str(Path(sys.executable).parent / "relax"), "train", "launcher=local", f"data={data}"),
        *("reward=char_share", "reward.kwargs={character: '7', length: 4}", "log.progress=none"),
        *("rollout.engine=slow_engine:SlowEngine", f"run.root={tmp_path / 'runs'}"),
    ]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
    before = signal.signal(told, signal.SIG_DFL)  # it is inherited, and under nohup these tests ignore SIGHUP
    try:
        run = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(told, before)
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == "loading\n"
        run.send_signal(told)
        _, said = run.communicate(timeout=90)  # it would load for ten minutes
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130
    assert said.startswith("interrupted; run at ")
