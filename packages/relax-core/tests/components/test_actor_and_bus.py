"""The actor between bus and trainer: which micro-batches it forms, what it refuses, what it lets go of."""

import asyncio
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax import schema
from relax.algorithms.spec import Algorithm, LossOutputs
from relax.backends.train.base import Packed, StepStats
from relax.components.actor import Actor
from relax.components.context import RunContext
from relax.distributed.bus import Bus, Endpoint
from relax.distributed.version_clock import VersionViolation
from relax.ops.reports import Reports

Config = Callable[..., Any]
LENGTHS = [5, 9, 2, 2]  # response tokens of the groups of each step; a group has 2 members with 3 more


class Trainer:
    """Remembers the micro-batches it was given and what the journal said when each came."""

    def __init__(self, folder: Path) -> None:
        self.tokens: list[int] = []
        self.journalled: list[int] = []
        self.steps = 0
        self._journal = folder / "journal.jsonl"

    def forward_backward(self, batch: Packed, loss: Any) -> LossOutputs:
        self.tokens.append(len(batch.tokens))
        self.journalled.append(sum("ids" in json.loads(line) for line in self._journal.open()))
        return LossOutputs(torch.tensor(0.0), 1.0)

    def optim_step(self, scale: float) -> StepStats:
        self.steps += 1
        return StepStats(0.0, 0.0, skipped=False)

    def discard_gradient(self) -> None: ...

    def tensors(self) -> Any:
        return []

    def load_state(self, state: Any) -> None: ...

    def state(self) -> Any:
        return None


class Nothing:
    """Stands for what is beside the point: publisher and checkpoints."""

    away: frozenset[str] = frozenset()

    def publish(self, version: int) -> None: ...
    def settle(self) -> None: ...
    def close(self) -> None: ...
    def newest(self) -> Any: ...
    def save(self, *what: Any) -> None: ...


class Stage:
    """An actor on a queue, with everything else played by the test."""

    def __init__(self, config: Any, folder: Path, bus: Endpoint, replay: Path | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.trainer = Trainer(folder)
        self.reports = Reports("actor")
        self.context = RunContext(config, folder, folder, bus, Endpoint(""), replay=replay)
        algorithm = Algorithm("none", "group", frozenset(), lambda _: torch.zeros(0), lambda _: None)  # type: ignore[arg-type, return-value]
        nothing: Any = Nothing()
        self.actor = Actor(self.context, self.trainer, algorithm, nothing, nothing, self.reports)  # type: ignore[arg-type]

    @property
    def recorded(self) -> list[list[int]]:
        """Groups in each micro-batch, step by step, as the schedule says."""
        lines = (self.context.schedule / "actor.jsonl").read_text().splitlines()
        return [json.loads(line)["micro_batches"] for line in lines]

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [report.data["metrics"] for report in self.reports.drain() if report.kind == "step"]


async def feed(bus: Bus, group: Any, config: Any, version: Callable[[int], int] = lambda step: step) -> None:
    """Play rollout and Advantages: put the groups of every step once it may start, and score them."""
    for step in range(config.steps):
        ticket = await bus.admit_step(step, max(0, step - config.max_staleness))
        put = [
            await bus.put_group(group(4 * step + index, version(step), response), step, ticket)
            for index, response in enumerate(LENGTHS)
        ]
        await (await bus.groups(schema.TASK_ADVANTAGES, 2, most=4, least=4)).ack()
        for ids, response in zip(put, LENGTHS, strict=True):
            await bus.partition.update(ids, {"advantages": [np.zeros(response, np.float32)] * 2})


async def play(stage: Stage, group: Any, **options: Any) -> None:
    bus = await Bus.connect(stage.context.bus, stage.context.config, media=False)
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(feed(bus, group, stage.context.config, **options))
            tasks.create_task(stage.actor.run())
    finally:
        await stage.actor.close()
        await bus.close()


async def test_the_queue_forms_micro_batches_by_tokens(
    config: Config, group: Any, queue: Callable[..., Endpoint], tmp_path: Path
) -> None:
    settings = config("actor.micro_batch_tokens=34", "steps=3")
    stage = Stage(settings, tmp_path / "run", queue())
    await play(stage, group)
    assert stage.trainer.tokens == [16, 34, 10] * 3  # tokens, prompts too: 16 + 24 > 34, 24 + 10 fit, 10
    assert stage.trainer.journalled == list(range(1, 10))  # each before its gradient
    assert stage.recorded == [[1, 2, 1]] * 3
    assert stage.trainer.steps == 3
    assert [step["perf/micro_batches"] for step in stage.metrics] == [3.0] * 3


@pytest.mark.parametrize("mode", ["async", "colocate"])
async def test_a_budget_cuts_a_step_alike_in_both_modes_and_in_a_replay(
    config: Config, group: Any, queue: Callable[..., Endpoint], tmp_path: Path, mode: str
) -> None:
    words = ("actor.micro_batch_tokens=30", "steps=2", f"mode={mode}", "max_staleness=0")
    stage = Stage(config(*words), tmp_path / "run", queue())
    await play(stage, group)
    assert stage.recorded == [[1, 1, 2]] * 2
    again = Stage(config(*words[1:]), tmp_path / "again", queue(), replay=stage.context.schedule)
    await play(again, group)
    assert again.recorded == stage.recorded  # also where the replay was not told of the budget
    assert again.trainer.tokens == stage.trainer.tokens


async def test_without_a_budget_a_micro_batch_has_a_number_of_samples(
    config: Config, group: Any, queue: Callable[..., Endpoint], tmp_path: Path
) -> None:
    stage = Stage(config("actor.micro_batch_size=6", "steps=2"), tmp_path / "run", queue())
    await play(stage, group)
    assert stage.recorded == [[3, 1]] * 2


async def test_a_group_that_is_too_old_ends_the_run_by_name_and_is_never_trained(
    config: Config,
    group: Any,
    queue: Callable[..., Endpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue finds it by the version that it was put with, whatever the sample says of its tokens."""
    monkeypatch.setattr(Actor, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr("relax.distributed.version_clock.VersionClock.admit", lambda *_: 0)
    stage = Stage(config("max_staleness=1", "steps=4"), tmp_path / "run", queue())
    with pytest.raises(ExceptionGroup) as caught:
        await play(stage, group, version=lambda step: step if step < 3 else 1)
    violations, others = caught.value.split(VersionViolation)
    assert others is None
    assert violations is not None
    (violation,) = violations.exceptions
    assert "group 00000012 (version 1)" in str(violation)
    assert "max_staleness = 1 allows step 3, which takes version 2 and newer" in str(violation)
    trained = [json.loads(line) for line in (stage.folder / "journal.jsonl").open()]
    assert {entry["step"] for entry in trained} == {0, 1, 2}
    assert stage.trainer.steps == 3


async def test_the_actor_lets_go_of_a_steps_memory_with_its_ack(
    config: Config, group: Any, queue: Callable[..., Endpoint], tmp_path: Path
) -> None:
    stage = Stage(config("steps=6", "actor.micro_batch_tokens=30"), tmp_path / "run", queue())
    gc.collect()
    gc.disable()  # by itself, and not because the collector came by
    try:
        await play(stage, group)
    finally:
        gc.enable()
    assert [step["queue/pinned"] for step in stage.metrics] == [0.0] * 6
