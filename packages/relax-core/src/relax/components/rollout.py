"""The Rollout role: prompts become groups of episodes on the engine pool, and finished groups go to the bus.

Two schedules share everything but the order of starting. `flow`: a group starts as soon as the version rule
lets it, and its requests go where the pool's router says. `lockstep`: all groups of a step start together,
each on the replica its ordinal names, and their turns go to the engine in canonical order, so that a run
repeats bit for bit. In both, what is asked of an engine that is lost is asked of another one.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from agentic import Episode, EpisodeError, Limits, Sampling, Task, derive_seed, run_episode
from omni_processor import OmniProcessor

from relax.backends.routes import InvalidRoutes, Routes, Routing
from relax.components.assembly import Environments
from relax.components.context import RunContext
from relax.distributed.bus import Bus, Sample
from relax.distributed.schedule import Record, read
from relax.distributed.version_clock import VersionClock
from relax.engine.decoding import Decoding
from relax.engine.episode_routes import routes_of
from relax.engine.pacing import Pacer, Slot
from relax.engine.policy import Encoder, Opening, SeatPolicy
from relax.engine.pool import EnginePool, Replica, ReplicaEngine
from relax.engine.prompts import BadRow, Prompt, PromptSource
from relax.engine.router import RecordedPlacement, StaticPlacement
from relax.engine.seats import Party, Seat
from relax.engine.tasks import task_of
from relax.ops.reports import Reports


class RolloutFailed(RuntimeError):
    """So many groups failed in a row that the fault is not in single prompts."""


class EmptyEpisode(RuntimeError):
    """An episode ended (time limit, abort) before anything was sampled: there is nothing to train on."""


@dataclass(frozen=True)
class Start:
    """One group on its way: which prompt, for which slot, and on which replica where that is fixed."""

    prompt: Prompt
    slot: Slot
    replica: Replica | None = None

    @property
    def name(self) -> str:
        return f"{self.prompt.ordinal:08d}"


class Rollout:
    """Generates the groups of every step from `first_step` to the last."""

    ROOM_SECONDS = 1.0
    """A put that takes longer may wait for room on the bus, so that is looked into."""

    def __init__(
        self,
        context: RunContext,
        processor: OmniProcessor,
        source: PromptSource,
        pool: EnginePool,
        clock: VersionClock,
        environments: Environments,
        context_length: int,
        reports: Reports,
        routing: Routing | None = None,
    ) -> None:
        """`routing`: how the model routes, where that is told with every sample; None where it is not."""
        config = context.config
        self._context = context
        self._processor = processor
        self._decoding = Decoding()
        self._encoder = Encoder(processor, self._decoding)
        self._source = source
        self._pool = pool
        self._clock = clock
        self._environments = environments
        self._reports = reports
        self._routing = routing
        self._bad_routes = 0
        self._members = config.rollout.samples_per_prompt
        self._pacer = Pacer(config.rollout.prompts_per_step, context.first_step, config.steps)
        self._limits = Limits(
            max_turns=config.rollout.max_turns,
            max_tokens=context_length,
            max_seconds=config.rollout.episode_seconds,
        )
        self._sampling = Sampling(
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            stop_token_ids=() if config.rollout.ignore_eos else tuple(processor.eos_token_ids),
        )
        self._record = Record(context.schedule / "rollout.jsonl")
        self._generated = 0
        self._waited = 0.0
        self._resumed_at = 0
        self._tickets: dict[int, int] = {}
        self._delivered = asyncio.Event()
        self._bus: Bus | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._homes: dict[str, str] = {}  # group -> the replica it was placed on first
        pool.events = self._engine_event

    def _engine_event(self, event: str, **data: Any) -> None:
        self._record.write(event=event, engine=data["engine"])
        self._reports.add("event", event=event, **data)

    def engine_lost(self, name: str, reason: str, restarting: bool) -> None:
        """An engine's supervisor says that it is gone, and whether another one is being started."""
        self._pool.engine_lost(name, reason, restarting=restarting)

    def engine_back(self, name: str, engine: ReplicaEngine) -> None:
        """Another engine has taken the place of a lost one."""
        self._pool.engine_back(name, engine)

    async def run(self) -> None:
        """Until every step has its groups on the bus."""
        self._bus = await Bus.connect(self._context.bus, self._context.config, media=self._context.media)
        if self._context.source is not None:
            self._source.load_state(self._context.source)
            self._resumed_at = int(self._context.source["next"])
        self._pool.start()
        try:
            if self._context.replay is not None:
                await self._replay()
            elif self._context.config.mode == "colocate":
                await self._lockstep()
            else:
                await self._flow()
            await self._report_totals()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._decoding.close()
            await self._pool.close()
            await self._environments.close()
            await self._bus.close()
            self._record.close()

    # The schedules

    async def _flow(self) -> None:
        while not self._pacer.exhausted:
            slot = self._pacer.peek()
            if slot is None:
                await self._any_finished()
                continue
            if await self._startable(slot.step):
                await self._unless_one_fails(self._admit(slot.step))
                self._launch_startable()

    async def _admit(self, step: int) -> None:
        """Get the bus's admission for a step, once, before its first group is started, and for those after it
        that may start as well. This is its own check of what the version clock has found.
        """
        assert self._bus is not None
        while step < self._context.config.steps and self._clock.routable(step):
            if step not in self._tickets:
                version = self._pool.oldest_served(step)
                self._tickets[step] = await self._bus.admit_step(step, version)
            step += 1

    def _launch_startable(self) -> None:
        """Start every group that may start now, so that their first turns reach the engines together."""
        while (slot := self._pacer.peek()) is not None and slot.step in self._tickets:
            prompt = self._take()
            self._begin(Start(prompt, self._pacer.start(prompt.ordinal)))

    def _take(self) -> Prompt:
        """The next prompt for the slot at hand; rows that make none are dropped, each with its reason.

        A resume takes the bad rows of the run so far once more, before any other prompt. That they come in a
        row then says nothing about how the run goes, so they do not count as failures.
        """
        slot = self._pacer.peek()
        assert slot is not None
        bad = 0
        while True:
            try:
                return self._source.take()
            except BadRow as error:
                self._drop(error.ordinal, slot, error)
                bad += error.ordinal >= self._resumed_at
                self._check_failures(self._pacer.failures_in_a_row + bad, error)

    async def _startable(self, step: int) -> bool:
        """Wait until a group of `step` may start; False when one ended first, which may change the next."""
        waiting = asyncio.ensure_future(self._pool.wait_startable(step))
        try:
            await asyncio.wait({waiting, *self._running}, return_when=asyncio.FIRST_COMPLETED)
            self._reap()
            if waiting.done():
                waiting.result()
                return True
            return False
        finally:
            waiting.cancel()

    async def _unless_one_fails(self, what: Coroutine[Any, Any, None]) -> None:
        """Await it; a fault of a running group is raised meanwhile."""
        waiting = asyncio.ensure_future(what)
        try:
            while not waiting.done():
                await asyncio.wait({waiting, *self._running}, return_when=asyncio.FIRST_COMPLETED)
                self._reap()
            waiting.result()
        finally:
            waiting.cancel()

    async def _lockstep(self) -> None:
        placement = self._pool.placement
        assert isinstance(placement, StaticPlacement)
        while (slot := self._pacer.peek()) is not None:
            await self._pool.wait_all_at(self._clock.earliest(slot.step))
            await self._admit(slot.step)
            starts = []
            while (next_slot := self._pacer.peek()) is not None and next_slot.step == slot.step:
                prompt = self._take()
                replica = self._pool.replicas[placement.by_ordinal(prompt.ordinal)]
                replica.front.enter(self._members)
                starts.append(Start(prompt, self._pacer.start(prompt.ordinal), replica))
            for start in starts:
                self._begin(start)
            while self._running:
                await self._any_finished()

    async def _replay(self) -> None:
        placement = self._pool.placement
        assert isinstance(placement, RecordedPlacement)
        assert self._context.replay is not None
        entries = [
            entry
            for entry in read(self._context.replay / "rollout.jsonl")
            if entry["event"] in ("start", "drop")
        ]
        dropped = {(entry["ordinal"], entry["step"]) for entry in entries if entry["event"] == "drop"}
        for entry in entries:
            ordinal, step = entry["ordinal"], entry["step"]
            if (ordinal, step) in dropped:  # nothing came of it but that its slot went to another
                if entry["event"] == "start":
                    self._pacer.start(ordinal)
                elif ordinal in self._pacer.running:
                    self._pacer.failed(ordinal)
                continue
            if (replica := placement.groups.get(f"{ordinal:08d}")) is not None:
                await self._pool.wait_may_start(step, replica)
            else:
                await self._pool.wait_startable(step)
            self._reap()
            await self._unless_one_fails(self._admit(step))
            self._pacer.start(ordinal)
            try:
                prompt = self._source.prompt(ordinal)
            except BadRow as error:  # its row was good when the run was recorded: the data changed
                raise RolloutFailed(f"group {ordinal} failed in a replay: {error}") from error
            self._begin(Start(prompt, Slot(step, entry["index"])))
        while self._running:
            await self._any_finished()

    def _begin(self, start: Start) -> None:
        self._record.write(
            event="start",
            ordinal=start.prompt.ordinal,
            step=start.slot.step,
            index=start.slot.index,
        )
        self._running.add(asyncio.create_task(self._group(start)))

    def _placed(self, request: str, replica: str) -> None:
        """Record where a request goes, where that does not follow from what was recorded of its group."""
        group = request.partition("-")[0]
        if group not in self._homes:
            self._homes[group] = replica
            self._record.write(event="place", ordinal=int(group), replica=replica)
        elif self._homes[group] != replica:
            self._record.write(event="place", request=request, replica=replica)

    async def _any_finished(self) -> None:
        if self._running:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        self._reap()

    def _reap(self) -> None:
        for task in [task for task in self._running if task.done()]:
            self._running.discard(task)
            task.result()

    # One group

    async def _group(self, start: Start) -> None:
        ordinal = start.prompt.ordinal
        try:
            episodes = await self._episodes(start)
            if empty := [
                member for member, episode in enumerate(episodes) if not episode.transcript.loss_mask.any()
            ]:
                raise EmptyEpisode(f"members {empty} of group {ordinal} ended before a token was sampled")
            routes = self._routes(episodes)
        except (EpisodeError, EmptyEpisode, InvalidRoutes) as error:
            self._failed(start, error)
            return
        finally:
            self._pool.placement.closed(start.name)
            self._homes.pop(start.name, None)
        samples = [
            self._sample(start, member, episode, routes[member]) for member, episode in enumerate(episodes)
        ]
        ages = [self._clock.admit(start.slot.step, sample.policy_versions) for sample in samples]
        await self._put(samples, start.slot.step)
        self._pacer.finished(ordinal)
        self._delivered.set()
        self._report(start, samples, max(ages))

    async def _put(self, samples: list[Sample], step: int) -> None:
        """Put a group, once those of the steps before it are on the bus, and there is room."""
        assert self._bus is not None
        while not self._pacer.may_put(step):
            self._delivered.clear()
            await self._delivered.wait()
        begun = time.perf_counter()
        watching = asyncio.create_task(self._found_full(self._bus, step))
        try:
            await self._bus.put_group(samples, step, self._tickets[step])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if not watching.cancelled() and watching.result():
            self._waited += time.perf_counter() - begun

    async def _found_full(self, bus: Bus, step: int) -> bool:
        """Whether a put that takes long waits for room; that is told."""
        await asyncio.sleep(self.ROOM_SECONDS)
        full = (await bus.usage()).waiting_puts > 0
        if full:
            limit = self._context.config.queue.max_bytes
            self._reports.add("event", event="waiting for room", step=step, max_bytes=limit)
        return full

    async def _episodes(self, start: Start) -> list[Episode]:
        party = Party(start.name, start.prompt.ordinal, start.slot.step, self._members)
        opening, task = Opening(self._encoder), task_of(start.prompt)
        members = [
            asyncio.create_task(
                self._episode(
                    start, task, opening, Seat(self._pool, party, start.replica, self._placed), member
                )
            )
            for member in range(self._members)
        ]
        try:
            return list(await asyncio.gather(*members))
        except BaseException:
            for member in members:
                member.cancel()
            await asyncio.gather(*members, return_exceptions=True)
            raise

    async def _episode(self, start: Start, task: Task, opening: Opening, seat: Seat, member: int) -> Episode:
        try:
            return await run_episode(
                self._environments(),
                task,
                SeatPolicy(self._encoder, opening, seat),
                limits=self._limits,
                sampling=self._sampling,
                request_id=f"{start.name}-{member:03d}",
                seed=derive_seed(self._context.config.seed, start.prompt.ordinal, member),
            )
        finally:
            seat.leave()

    def _routes(self, episodes: Sequence[Episode]) -> Sequence[Routes | None]:
        if self._routing is None:
            return [None] * len(episodes)
        return routes_of([episode.transcript for episode in episodes], self._routing)

    def _failed(self, start: Start, error: EpisodeError | EmptyEpisode | InvalidRoutes) -> None:
        if self._pool.failure is not None:  # nothing is wrong with the group
            raise self._pool.failure
        if self._context.replay is not None:
            raise RolloutFailed(f"group {start.prompt.ordinal} failed in a replay: {error}") from error
        self._pacer.failed(start.prompt.ordinal)
        self._bad_routes += self._members * isinstance(error, InvalidRoutes)
        self._drop(start.prompt.ordinal, start.slot, error)
        self._check_failures(self._pacer.failures_in_a_row, error)

    def _drop(self, ordinal: int, slot: Slot, error: Exception) -> None:
        """Record that a group is given up, and why; the slot it was for goes to the next prompt."""
        self._record.write(event="drop", ordinal=ordinal, step=slot.step, reason=str(error))
        self._reports.add("event", event="group dropped", ordinal=ordinal, step=slot.step, reason=str(error))

    def _check_failures(self, in_a_row: int, last: Exception) -> None:
        allowed = self._context.config.rollout.max_failures
        if in_a_row > allowed:
            raise RolloutFailed(
                f"{in_a_row} groups failed in a row (rollout.max_failures = {allowed}); the last one: {last}"
            ) from last

    def _sample(self, start: Start, member: int, episode: Episode, routes: Routes | None) -> Sample:
        transcript = episode.transcript
        return Sample(
            prompt_key=start.prompt.key,
            group=start.name,
            ordinal=start.prompt.ordinal,
            member=member,
            tokens=transcript.tokens,
            prompt_length=transcript.prompt_length,
            loss_mask=transcript.loss_mask,
            rollout_logprobs=transcript.logprobs,
            policy_versions=transcript.versions,
            reward=episode.reward,
            reward_parts=episode.reward_parts,
            truncated=episode.truncated,
            turns=episode.turns,
            media=transcript.media,
            routes=routes,
        )

    async def _report_totals(self) -> None:
        """What the engines say they have generated, whether or not it reached the bus."""
        self._reports.add(
            "rollout",
            generated_tokens=await self._pool.generated_tokens(),
            waited=self._waited,
            moved=self._pool.moved,
            bad_routes=self._bad_routes,
        )

    def _report(self, start: Start, samples: list[Sample], age: int) -> None:
        sampled = sum(int(np.sum(sample.loss_mask)) for sample in samples)
        self._generated += sampled
        self._reports.add(
            "rollout",
            generated_tokens=self._generated,
            running_groups=len(self._pacer.running),
            age=age,
            waited=self._waited,
            moved=self._pool.moved,
            bad_routes=self._bad_routes,
        )
        if start.slot.index >= self._context.config.log.samples_per_step:
            return
        sample = samples[0]
        self._reports.add(
            "sample",
            step=start.slot.step,
            ordinal=sample.ordinal,
            member=0,
            prompt=self._processor.decode(sample.tokens[: sample.prompt_length], skip_special_tokens=False),
            response=self._processor.decode(sample.tokens[sample.prompt_length :], skip_special_tokens=False),
            answer=_text(start.prompt.answer),
            reward=sample.reward,
            reward_parts=dict(sample.reward_parts),
            turns=sample.turns,
            versions=np.asarray(sample.policy_versions).tolist(),
        )


def _text(answer: object) -> str | None:
    return None if answer is None else str(answer)
