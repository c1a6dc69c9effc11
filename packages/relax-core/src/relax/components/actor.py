"""The Actor role: streams each step's groups from the bus, accumulates, steps once, publishes a version."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import transferqueue as tq

from relax import schema
from relax.algorithms.spec import Algorithm, LossOutputs
from relax.backends.train.base import StepStats, TrainBackend
from relax.components.context import Closes, RunContext
from relax.distributed.bus import Bus
from relax.distributed.schedule import Record, read
from relax.distributed.version_clock import VersionClock
from relax.distributed.weights import Publishing, publish_metrics
from relax.engine.checkpoints import Checkpoints, Trained, snapshot
from relax.engine.micro_batches import Group, canonical, chunked, groups_of, ordered, pack, within
from relax.ops.reports import Reports


class Stopped(Exception):
    """The run was asked to stop; the step at hand is given up and its samples go back to the bus."""


class Diverged(RuntimeError):
    """Too many steps in a row had a gradient that is not finite."""


@dataclass
class Totals:
    """Loss sums of a step, added over micro-batches in order."""

    loss: float = 0.0
    count: float = 0.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, outputs: LossOutputs) -> None:
        self.loss += float(outputs.loss)
        self.count += outputs.count
        for name, (total, count) in outputs.metrics.items():
            if name.endswith("_max"):
                seen = self.metrics.get(name, (total, count))
                self.metrics[name] = (max(seen[0], total), count)
            else:
                seen = self.metrics.get(name, (0.0, 0.0))
                self.metrics[name] = (seen[0] + total, seen[1] + count)

    def means(self) -> dict[str, float]:
        found = {"loss": self.loss / self.count if self.count else 0.0}
        for name, (total, count) in self.metrics.items():
            found[name] = total if name.endswith("_max") else (total / count if count else 0.0)
        return found


@dataclass
class Clocks:
    """Seconds of a step by phase."""

    started: float = field(default_factory=time.perf_counter)
    wait: float = 0.0
    train: float = 0.0
    optim: float = 0.0
    publish: float = 0.0


class Actor:
    """Trains every step from `first_step` to the last, or until told to stop."""

    LOOK_SECONDS = 10.0
    """Without a group for so long, it looks whether there are some that the bus refuses to give it."""

    def __init__(
        self,
        context: RunContext,
        backend: TrainBackend,
        algorithm: Algorithm,
        checkpoints: Checkpoints,
        publisher: Publishing,
        reports: Reports,
    ) -> None:
        self._context = context
        self._config = context.config
        self._backend = backend
        self._algorithm = algorithm
        self._checkpoints = checkpoints
        self._publisher = publisher
        self._reports = reports
        self._clock = VersionClock(self._config.max_staleness, actor=context.first_step)
        self._trained = Trained.of_state(context.source)
        self._groups = self._config.rollout.prompts_per_step
        self._members = self._config.rollout.samples_per_prompt
        self._chunk = max(1, self._config.actor.micro_batch_size // self._members)
        self._tokens = self._config.actor.micro_batch_tokens
        self._stop = asyncio.Event()
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._record = Record(context.schedule / "actor.jsonl")
        self._journal = Record(context.folder / "journal.jsonl")
        self._replay = (
            {entry["step"]: entry for entry in read(context.replay / "actor.jsonl")}
            if context.replay
            else None
        )
        self._bus: Bus | None = None
        self._tail: asyncio.Task[None] | None = None
        self._skipped = 0

    def stop(self) -> None:
        """Give up the step at hand, write a checkpoint, end the stream. Call from the event loop."""
        self._stop.set()

    def engines_away(self, names: Collection[str]) -> None:
        """These engines are lost now: no version is held up by them."""
        self._publisher.away = frozenset(names)

    async def run(self) -> None:
        """Train to the last step; closes the partition, which ends the other roles."""
        self._bus = await Bus.connect(self._context.bus, self._config, media=self._context.media)
        await self._bus.advance(self._clock.actor)
        saved = self._context.first_step
        try:
            await self._in_thread(self._publish)
            for step in range(self._context.first_step, self._config.steps):
                await self._step(step)
                every = self._config.checkpoint.every
                if every and (step + 1) % every == 0:
                    await self._in_thread(self._save)
                    saved = step + 1
        except Stopped:
            await self._in_thread(self._backend.discard_gradient)
            self._reports.add("event", event="stopped", step=self._clock.actor)
        finally:
            await self._settled()
        if self._clock.actor > saved or not self._checkpoints.newest():
            await self._in_thread(self._save)
        await self._in_thread(self._publisher.settle)
        await self._bus.partition.close()

    async def close(self) -> None:
        self._publisher.close()
        if isinstance(self._backend, Closes):
            await self._in_thread(self._backend.close)
        self._compute.shutdown(wait=True)
        self._record.close()
        self._journal.close()
        if self._bus is not None:
            await self._bus.close()

    # One step

    async def _step(self, step: int) -> None:
        clocks, totals, groups, sizes = Clocks(), Totals(), [], []
        async with aclosing(self._chunks(step, clocks)) as chunks:
            async for chunk in chunks:
                groups += chunk
                sizes.append(len(chunk))
                for group in chunk:
                    for versions in group.column("policy_versions"):
                        self._clock.admit(step, versions)
                self._journal.write(
                    step=step,
                    segment=self._context.segment,
                    ids=[i for group in chunk for i in group.ids],
                    ordinals=[group.ordinal for group in chunk],
                )
                begun = time.perf_counter()
                totals.add(
                    await self._in_thread(
                        lambda chunk=chunk: self._backend.forward_backward(
                            pack(chunk, routes_of=self._config.actor.routing_replay_tokens),
                            self._algorithm.loss,
                        )
                    )
                )
                clocks.train += time.perf_counter() - begun
        begun = time.perf_counter()
        stats = await self._in_thread(
            lambda: self._backend.optim_step(1.0 / totals.count if totals.count else 0.0)
        )
        clocks.optim = time.perf_counter() - begun
        self._note_skipped(step, stats)
        self._clock.stepped(step)
        begun = time.perf_counter()
        published = await self._in_thread(self._publish)
        clocks.publish = time.perf_counter() - begun
        self._record.write(
            step=step,
            ordinals=[group.ordinal for group in groups],
            micro_batches=sizes,
            oldest_versions=[
                min(int(versions[:, 0].min()) for versions in group.column("policy_versions"))
                for group in groups
            ],
        )
        self._journal.write(step=step, segment=self._context.segment, done=True)
        self._trained.add(group.ordinal for group in groups)
        assert self._bus is not None
        await self._bus.advance(self._clock.actor)
        metrics = step_metrics(step, groups, totals, stats, clocks)
        metrics["perf/micro_batches"] = float(len(sizes))
        metrics |= published
        await self._settled()
        batches = list({id(group.batch): group.batch for group in groups}.values())
        self._tail = asyncio.create_task(self._acknowledge(step, batches, metrics))

    def _note_skipped(self, step: int, stats: StepStats) -> None:
        self._skipped = self._skipped + 1 if stats.skipped else 0
        if not stats.skipped:
            return
        self._reports.add("event", event="step skipped", step=step, grad_norm=stats.grad_norm)
        if self._skipped > self._config.actor.max_skipped_steps:
            raise Diverged(
                f"the gradient was not finite in {self._skipped} steps in a row (actor.max_skipped_steps = "
                f"{self._config.actor.max_skipped_steps}): training has diverged; lower actor.lr = "
                f"{self._config.actor.lr:g} and resume from an earlier checkpoint"
            )

    async def _acknowledge(
        self, step: int, batches: "list[tq.AsyncBatch]", metrics: dict[str, float]
    ) -> None:
        """Tell the bus that a step's samples are trained, and let go of their memory; goes on beside the next
        step.
        """
        await asyncio.gather(*(batch.ack() for batch in batches))
        batches.clear()
        assert self._bus is not None
        usage = await self._bus.usage()
        metrics["queue/depth"] = float(usage.samples)
        metrics["queue/payload"] = float(usage.payload)
        metrics["queue/memory"] = float(usage.memory)
        metrics["queue/pinned"] = float(usage.pinned)
        metrics["queue/waiting_puts"] = float(usage.waiting_puts)
        self._reports.add("step", step=step, metrics=metrics)

    async def _settled(self) -> None:
        """Wait until the step before has been acknowledged."""
        if self._tail is not None:
            await self._tail

    async def _chunks(self, step: int, clocks: Clocks) -> AsyncGenerator[list[Group]]:
        """The micro-batches of a step; the time waited for them goes to `clocks`."""
        chunks = self._cut(step)
        while True:
            begun = time.perf_counter()
            # By a value and not by StopAsyncIteration: its traceback would keep views of the bus's memory.
            chunk = await self._or_stop(anext(chunks, None))
            if chunk is None:
                return
            clocks.wait += time.perf_counter() - begun
            yield chunk

    def _cut(self, step: int) -> AsyncIterator[list[Group]]:
        if self._replay is not None:
            recorded = self._replay[step]
            groups = ordered(self._groups_of(step), recorded["ordinals"], self._groups)
            return chunked(groups, iter(recorded["micro_batches"]))
        if self._config.mode == "colocate":
            groups = canonical(self._groups_of(step), self._groups)
            return (
                chunked(groups, repeat(self._chunk)) if self._tokens is None else within(groups, self._tokens)
            )
        if self._tokens is not None:
            return self._fetched(step, self._tokens)
        return chunked(self._groups_of(step), repeat(self._chunk))

    async def _groups_of(self, step: int) -> AsyncGenerator[Group]:
        async for groups in self._fetched(step, None):
            for group in groups:
                yield group

    async def _fetched(self, step: int, tokens: int | None) -> AsyncGenerator[list[Group]]:
        """The groups of a step as the bus has them: those that are ready, or with `tokens` one micro-batch
        after the other.
        """
        assert self._bus is not None
        left = self._groups
        while left:
            try:
                batch = await self._bus.groups(
                    schema.TASK_ACTOR,
                    self._members,
                    most=left,
                    least=1 if tokens is None else left,
                    tokens=tokens,
                    up_to_step=step,
                    max_staleness=self._config.max_staleness,
                    timeout=self.LOOK_SECONDS,
                )
            except tq.Timeout:
                await self._bus.refuse_stale(schema.TASK_ACTOR, step, self._clock.earliest(step))
                continue
            groups = groups_of(batch)
            wrong = [group.step for group in groups if group.step != step]
            if wrong:
                raise RuntimeError(f"the bus gave a group of step {wrong[0]} to step {step}")
            left -= len(groups)
            yield groups

    async def _or_stop(self, what: Any) -> Any:
        if self._stop.is_set():
            raise Stopped
        waiting, stop = asyncio.ensure_future(what), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({waiting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise Stopped
        finally:
            stop.cancel()
            if not waiting.done():
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

    # In the compute thread

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._compute, call)

    def _publish(self) -> dict[str, float]:
        """Publish the newest version; returns what is told of the one before."""
        stats = self._publisher.publish(self._clock.actor)
        return publish_metrics(stats) if stats is not None else {}

    def _save(self) -> None:
        self._checkpoints.save(self._clock.actor, snapshot(self._backend), self._trained.state())
        self._reports.add("event", event="checkpoint", step=self._clock.actor)


def step_metrics(
    step: int, groups: Sequence[Group], totals: Totals, stats: StepStats, clocks: Clocks
) -> dict[str, float]:
    """What is told of a step. `time/` and `perf/` depend on the clock, all others only on the data."""
    rewards = np.array([float(r) for group in groups for r in group.column("reward")])
    masks = [mask for group in groups for mask in group.column("loss_mask")]
    tokens = int(sum(int(mask.sum()) for mask in masks))
    ages = np.array(
        [step - int(versions[:, 0].min()) for group in groups for versions in group.column("policy_versions")]
    )
    truncated = [float(t) for group in groups for t in group.column("truncated")]
    turns = [float(t) for group in groups for t in group.column("turns")]
    seconds = time.perf_counter() - clocks.started
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **{f"loss/{name}" if name != "loss" else name: value for name, value in totals.means().items()},
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "skipped": float(stats.skipped),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "response/tokens_mean": tokens / len(masks),
        "response/truncated": float(np.mean(truncated)),
        "response/turns_mean": float(np.mean(turns)),
        "tokens/trained": float(tokens),
        "time/step": seconds,
        "time/wait": clocks.wait,
        "time/train": clocks.train,
        "time/optim": clocks.optim,
        "time/publish": clocks.publish,
        "perf/tokens_per_second": tokens / seconds,
    }
    for name, values in _parts(groups).items():
        metrics[f"reward/{name}"] = float(np.mean(values))
    return metrics


def _parts(groups: Sequence[Group]) -> dict[str, list[float]]:
    parts: dict[str, list[float]] = {}
    for group in groups:
        for sample in group.column("reward_parts"):
            for name, value in sample.items():
                parts.setdefault(name, []).append(float(value))
    return parts
