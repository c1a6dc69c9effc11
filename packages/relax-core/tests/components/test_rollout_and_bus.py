"""Rollout between engines and bus: its groups take room step by step, and wait for it rather than fail."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agentic import Generation, GenerationRequest
from omni_processor import OmniProcessor, cancellation, videos
from relax import schema
from relax.backends.inference.base import FinishedGeneration, Health
from relax.backends.tiny import write_tiny
from relax.components.assembly import Environments
from relax.components.context import RunContext
from relax.components.rollout import Rollout
from relax.distributed.bus import Bus, BusFull, Endpoint
from relax.distributed.schedule import placements
from relax.distributed.version_clock import VersionClock
from relax.engine.batching import Coalescing
from relax.engine.pool import EnginePool
from relax.engine.prompts import PromptSource
from relax.engine.router import RecordedPlacement, Router
from relax.ops.reports import Reports

Config = Callable[..., Any]
WORDS = (
    "steps=2",
    "rollout.prompts_per_step=2",
    "reward=char_share",
    "reward.kwargs={character: '7', length: 4}",
)
ANSWER = np.array([20, 21, 22, 23], np.int32)


class Engine:
    """Serves version 0 for ever and answers at once, but for the groups it is told to be slow with."""

    def __init__(self, slow: set[int]) -> None:
        self.slow = slow
        self.go_on = asyncio.Event()
        self.answered: list[int] = []

    async def built(self) -> None: ...

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[FinishedGeneration]:
        for request in sorted(requests, key=lambda request: int(request.id[:8]) in self.slow):
            ordinal = int(request.id[:8])
            if ordinal in self.slow:
                await self.go_on.wait()
            self.answered.append(ordinal)
            spans = [(0, 0, len(ANSWER))]
            yield FinishedGeneration(
                request.id, Generation(ANSWER, np.zeros(len(ANSWER), np.float32), spans, "length")
            )

    async def wait_version(self, version: int, timeout: float) -> int:
        if version == 0:
            return 0
        await asyncio.sleep(timeout)
        raise TimeoutError

    async def health(self) -> Health:
        return Health(True, 0, 0, 0, 1, 1, 8 * len(ANSWER), 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


def rollout(
    config: Any,
    bus: Endpoint,
    folder: Path,
    model: Path,
    engine: Engine,
    rows: Sequence[Any] = (),
    replay: Path | None = None,
) -> tuple[Rollout, Reports]:
    clock, reports = VersionClock(config.max_staleness), Reports("rollout")
    engines: Any = {"engine-0": engine}
    context = RunContext(config, folder, model, bus, Endpoint(""), media=bool(rows), replay=replay)
    source = PromptSource(rows or [{"prompt": f"say {n}"} for n in range(8)], config.data, config.seed)
    placement = None if replay is None else RecordedPlacement(*placements(replay / "rollout.jsonl"))
    pool = EnginePool(engines, Coalescing, clock, 60.0, placement=placement or Router())
    processor = OmniProcessor.from_pretrained(model)
    return Rollout(context, processor, source, pool, clock, Environments(config), 256, reports), reports


async def train(bus: Bus, groups: int) -> list[int]:
    """Play the others for so many groups; returns their ordinals."""
    batch = await bus.groups(schema.TASK_ADVANTAGES, 2, most=groups, least=groups, timeout=10)
    await bus.partition.update(batch.ids, {"advantages": [np.zeros(len(ANSWER), np.float32)] * len(batch)})
    await batch.ack()
    batch = await bus.groups(schema.TASK_ACTOR, 2, most=groups, least=groups, timeout=10)
    await batch.ack()
    return sorted({int(ordinal) for ordinal in batch["ordinal"]})


async def until(look: Callable[[], Any], enough: Callable[[Any], bool]) -> None:
    for _ in range(1000):
        if enough(await look()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 10 s: {await look()}")


async def put_so_far(bus: Bus) -> int:
    return (await bus.usage()).samples // 2


async def test_a_slow_group_finds_room_though_the_next_step_is_ready(
    config: Config,
    queue: Callable[..., Endpoint],
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue has room for a step and a half. Groups 2 and 3, of step 1, are done before group 1, of step
    0: if they went on the queue then, group 1 would not find room, and step 0 never be trained.
    """
    monkeypatch.setattr(Rollout, "ROOM_SECONDS", 0.2)
    settings = config(*WORDS)
    address = queue()
    measured = await Bus.connect(address, settings, media=False)
    loop, _ = rollout(settings, address, tmp_path / "a", model, Engine(slow=set()))
    await asyncio.wait_for(loop.run(), 30)
    group = (await measured.usage()).payload // 4
    await measured.close()

    address = queue(max_bytes=int(3.2 * group) + 64)
    bus = await Bus.connect(address, settings, media=False)
    engine = Engine(slow={1})
    loop, reports = rollout(settings, address, tmp_path / "b", model, engine)
    running = asyncio.ensure_future(loop.run())
    try:
        await until(bus.usage, lambda usage: len(engine.answered) == 6 and usage.samples >= 2)
        await asyncio.sleep(0.2)
        assert await put_so_far(bus) == 1  # those of step 1 stay back
        engine.go_on.set()
        await until(bus.usage, lambda usage: usage.waiting_puts > 0)
        assert await put_so_far(bus) == 3
        await asyncio.sleep(0.5)
        assert await train(bus, 2) == [0, 1]
        assert await train(bus, 2) == [2, 3]
        await asyncio.wait_for(running, 30)
        told = reports.drain()
        assert [r.data["step"] for r in told if r.data.get("event") == "waiting for room"] == [1]
        assert max(r.data["waited"] for r in told if r.kind == "rollout") > 0.2
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bus.close()


async def test_a_queue_that_stays_full_ends_rollout_by_name(
    config: Config, queue: Callable[..., Endpoint], tmp_path: Path, model: Path
) -> None:
    settings = config(*WORDS, "queue.max_bytes=2000", "queue.wait_seconds=0.3")
    loop, _ = rollout(settings, queue(max_bytes=2000), tmp_path / "run", model, Engine(set()))
    with pytest.raises(
        BusFull, match=r"of step 0 found no room on the bus for 0.3 s .*queue.max_bytes = 2000"
    ):
        await asyncio.wait_for(loop.run(), 30)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Videos are decoded once it is set."""
    event, decode = threading.Event(), videos.decode

    def waiting(*arguments: Any) -> Any:
        while not event.wait(0.01):
            cancellation.check()  # as between two frames
        yield from decode(*arguments)

    monkeypatch.setattr(videos, "decode", waiting)
    return event


@pytest.mark.parametrize("ends", [False, True])
async def test_a_slow_video_holds_up_its_group_alone_and_not_the_end_of_a_run(
    config: Config,
    queue: Callable[..., Endpoint],
    tmp_path: Path,
    gate: threading.Event,
    ends: bool,
) -> None:
    settings = config(*WORDS, "data.video_column=videos", "data.shuffle=false", "max_staleness=1")
    film = np.random.default_rng(0).integers(0, 255, (4, 32, 64, 3)).astype(np.uint8)
    rows = [{"prompt": f"say {n}", "videos": [film] * (n == 0)} for n in range(8)]
    address, engine = queue(), Engine(slow=set())
    model = write_tiny(tmp_path / "model", kind="qwen3_vl")
    bus = await Bus.connect(address, settings, media=True)
    loop, _ = rollout(settings, address, tmp_path / "a", model, engine, rows)
    running = asyncio.ensure_future(loop.run())
    try:
        await until(bus.usage, lambda _: sorted(engine.answered) == [1, 1, 2, 2, 3, 3])
        if ends:
            running.cancel()
            await asyncio.wait({running}, timeout=20)
            assert running.cancelled()
            assert not [one for one in threading.enumerate() if one.name.startswith("decoding")]
        else:
            gate.set()
            await asyncio.wait_for(running, 30)
            assert engine.answered[-2:] == [0, 0]
            assert await put_so_far(bus) == 4
    finally:
        gate.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bus.close()


async def test_a_replay_leaves_out_a_group_that_was_dropped_after_it_was_started(
    config: Config, queue: Callable[..., Endpoint], tmp_path: Path
) -> None:
    settings = config(*WORDS, "data.video_column=videos", "data.shuffle=false", "max_staleness=1")
    rows = [{"prompt": f"say {n}", "videos": [b"no video"] * (n in (1, 3))} for n in range(8)]
    model = write_tiny(tmp_path / "model", kind="qwen3_vl")
    made = []
    for name, replay in (("a", None), ("b", tmp_path / "a" / "schedule" / "segment-0")):
        engine = Engine(slow=set())
        loop, _ = rollout(settings, queue(), tmp_path / name, model, engine, rows, replay)
        await asyncio.wait_for(loop.run(), 30)
        made.append(sorted(engine.answered))
    assert made == [[0, 0, 2, 2, 4, 4, 5, 5]] * 2
