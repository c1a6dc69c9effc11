"""Servers that an engine started itself: killed, stopped, and ones that do not start."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from agentic import GenerationRequest, Sampling
from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import EngineError, EngineLost
from relax.backends.inference.sglang import launch
from relax.backends.inference.sglang.engine import SglangEngine
from relax.backends.models import build_model, named_weights
from relax.backends.tiny import write_tiny
from relax.config.roles import RolloutSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STALL_SECONDS = 4.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, as `model=tiny` makes one."""
    return write_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture
def spec(folder: Path, sglang_settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., Any]:
    def make(**more: Any) -> EngineSpec:
        sglang = sglang_settings(**more)
        settings = RolloutSettings(engine="sglang", sglang=sglang, stall_seconds=STALL_SECONDS)  # pyright: ignore[reportArgumentType]
        return EngineSpec("engine-0", folder, run_folder=tmp_path, settings=settings, max_running=16)

    return make


@pytest.fixture
async def engine(spec: Callable[..., EngineSpec], folder: Path) -> AsyncIterator[SglangEngine]:
    started = await SglangEngine.create(spec())
    try:
        weights = dict(named_weights(build_model(folder)))
        await started.begin_update(0, weights)
        await started.commit_update(0)
        yield started
    finally:
        await started.close()


def requests() -> list[GenerationRequest]:
    sampling = Sampling(max_new_tokens=400)
    return [GenerationRequest(f"r{n}", np.arange(7, 20 + n, dtype=np.int32), sampling, n) for n in range(4)]


async def lost(engine: SglangEngine, happens: Callable[[list[psutil.Process]], None]) -> EngineLost:
    """What the engine raises when that happens to its server's processes in the middle of requests."""
    assert engine._process is not None
    under_guard = psutil.Process(engine._process._process.pid).children(recursive=True)
    family = [one for one in under_guard if "guard.py" not in " ".join(one.cmdline())]
    streams = [engine.generate(requests()[:2]), engine.generate(requests()[2:])]
    readers = [asyncio.ensure_future(anext(stream)) for stream in streams]
    async with asyncio.timeout(60):
        while (await engine.health()).generated_tokens < 40:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    happens(family)
    found = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(error, EngineLost) for error in found)
    ids = [sorted(error.partial) for error in found if isinstance(error, EngineLost)]
    assert ids == [["r0", "r1"], ["r2", "r3"]]  # each has got some tokens, and they may be gone on with
    with pytest.raises(EngineLost):
        engine.generate(requests())
    with pytest.raises(EngineLost):
        await engine.wait_version(1, 1.0)
    assert not (await engine.health()).alive
    await engine.close()
    assert not [process for process in family if process.is_running() and process.status() != "zombie"]
    assert isinstance(found[0], EngineLost)
    return found[0]


async def test_a_part_of_the_server_that_is_killed_loses_the_engine_at_once(engine: SglangEngine) -> None:
    def kill(family: list[psutil.Process]) -> None:
        (scheduler,) = [one for one in family if one.cmdline()[0].startswith("sglang::scheduler")]
        scheduler.kill()

    began = time.monotonic()
    error = await lost(engine, kill)
    assert time.monotonic() - began < 45  # SGLang's own main process would linger for a minute
    assert "died" in str(error)
    assert "Prefill batch" in str(error)  # the end of the log
    assert "engine-0.sglang.log" in str(error)


async def test_a_server_that_is_stopped_is_found_not_to_get_on(engine: SglangEngine) -> None:
    def stop(family: list[psutil.Process]) -> None:
        for process in family:
            os.kill(process.pid, signal.SIGSTOP)

    error = await lost(engine, stop)
    assert "has 4 requests and has not got on" in str(error)


async def test_starts_that_fail_are_named(
    spec: Callable[..., EngineSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"(?s)did not start.*unrecognized arguments: --no-such-flag"):
        await SglangEngine.create(spec(extra={"no_such_flag": 1}))
    with pytest.raises(EngineError, match=r"within 1 s \(rollout.sglang.start_seconds\)"):
        await SglangEngine.create(spec(start_seconds=1.0))
    with pytest.raises(EngineError, match=r"(?s)did not start.*no-python"):
        await SglangEngine.create(spec(python=str(tmp_path / "no-python")))
    with socket.create_server(("127.0.0.1", 0)) as taken:

        class Taken:
            number = taken.getsockname()[1]

            def close(self) -> None:
                pass

        monkeypatch.setattr(launch, "ReservedPort", Taken)
        with pytest.raises(EngineError, match=r"(?s)did not start.*(address already in use|not available)"):
            await SglangEngine.create(spec())
