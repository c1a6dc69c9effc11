"""Real servers, broken while a version goes in or answers come: killed, or told to give a request up."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from agentic import GenerationRequest, Sampling
from relax.backends.inference.base import EngineSpec
from relax.backends.inference.errors import EngineLost
from relax.backends.inference.sglang.engine import SglangEngine
from relax.backends.inference.sglang.guard import OWN, mapped
from relax.backends.models import build_model, named_weights
from relax.backends.tiny import write_tiny
from relax.config.roles import RolloutSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHARED = Path("/dev/shm")
Make = Callable[..., EngineSpec]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    build_model(made).save_pretrained(made)
    return made


@pytest.fixture
def spec(folder: Path, sglang_settings: Callable[..., dict[str, Any]], tmp_path: Path) -> Make:
    def make(model: Path = folder, **more: Any) -> EngineSpec:
        settings = RolloutSettings(engine="sglang", sglang=sglang_settings(**more), stall_seconds=30.0)  # pyright: ignore[reportArgumentType]
        return EngineSpec("engine-0", model, run_folder=tmp_path, settings=settings, max_running=16)

    return make


@pytest.fixture
async def engine(spec: Make, folder: Path) -> AsyncIterator[SglangEngine]:
    started = await SglangEngine.create(spec(weights="tensor", pause="retract"))
    try:
        await put(started, folder, 0)
        yield started
    finally:
        await started.close()


async def put(engine: SglangEngine, folder: Path, version: int) -> None:
    await engine.begin_update(version, weights(folder, version))
    await engine.commit_update(version)


def weights(folder: Path, version: int) -> dict[str, torch.Tensor]:
    return {name: tensor + 0.01 * version for name, tensor in named_weights(build_model(folder))}


def asked(count: int, tokens: int) -> list[GenerationRequest]:
    sampling = Sampling(max_new_tokens=tokens)
    return [
        GenerationRequest(f"r{n}", np.arange(7, 20 + n, dtype=np.int32), sampling, n) for n in range(count)
    ]


async def generated(engine: SglangEngine, tokens: int) -> None:
    async with asyncio.timeout(120):
        while (await engine.health()).generated_tokens < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def family(engine: SglangEngine) -> list[psutil.Process]:
    """The server's processes, its guards left out."""
    assert engine._process is not None
    below = psutil.Process(engine._process._process.pid).children(recursive=True)
    return [one for one in below if "guard.py" not in " ".join(one.cmdline())]


def in_shared_memory(inodes: set[int]) -> set[str]:
    """Names of the files there that have one of these inodes."""
    return {entry.name for entry in os.scandir(SHARED) if entry.inode() in inodes}


async def test_a_request_that_is_aborted_while_a_version_goes_in_ends_with_what_it_has(
    engine: SglangEngine, folder: Path
) -> None:
    """And the others go on, each of their tokens by the version that is told."""
    stream = engine.generate(asked(3, 900))
    reading = asyncio.ensure_future(_all(stream))
    await generated(engine, 60)
    await engine.begin_update(1, weights(folder, 1))
    committing = asyncio.ensure_future(engine.commit_update(1))
    await asyncio.sleep(0)  # it is under way
    await engine.abort("r1")
    await committing
    found = await reading
    assert found["r1"].finish_reason == "abort"
    assert 0 < len(found["r1"].tokens) < 900
    for name in ("r0", "r2"):
        assert len(found[name].tokens) == 900
        assert [span[0] for span in found[name].spans] == [0, 1]
        assert found[name].spans[-1][2] == 900


async def _all(stream: Any) -> dict[str, Any]:
    return {one.id: one.generation async for one in stream}


async def test_a_server_killed_while_a_version_goes_in_serves_no_mix_of_two(
    engine: SglangEngine, folder: Path
) -> None:
    stream = engine.generate(asked(4, 900))
    reading = asyncio.ensure_future(anext(stream))
    await generated(engine, 60)
    (scheduler,) = [one for one in family(engine) if one.cmdline()[0].startswith("sglang::scheduler")]
    await engine.begin_update(1, weights(folder, 1))
    committing = asyncio.ensure_future(engine.commit_update(1))
    await asyncio.sleep(0)
    scheduler.kill()
    with pytest.raises(EngineLost):
        await committing
    with pytest.raises(EngineLost) as lost:
        await reading
    # What may be gone on with was sampled by the version before, whole.
    assert {span[0] for kept in lost.value.partial.values() for span in kept.spans} <= {0}
    with pytest.raises(EngineLost):
        engine.generate(asked(1, 2))


async def test_all_of_a_killed_server_is_gone_with_what_it_had_in_shared_memory(
    engine: SglangEngine,
) -> None:
    """But for what the killed process alone had mapped, which nobody knows of any more: a semaphore."""
    processes = family(engine)
    (scheduler,) = [one for one in processes if one.cmdline()[0].startswith("sglang::scheduler")]
    reading = asyncio.ensure_future(anext(engine.generate(asked(2, 900))))
    await generated(engine, 20)
    inodes = {inode for one in processes if one != scheduler for inode in mapped(one.pid)}
    files = in_shared_memory(inodes)
    assert [name for name in files if name.startswith("sglang_loads_")]
    scheduler.kill()
    with pytest.raises(EngineLost):
        await reading
    await engine.close()
    assert not [one for one in processes if one.is_running() and one.status() != "zombie"]
    assert [name for name in in_shared_memory(inodes) & files if name.startswith(OWN)] == []
