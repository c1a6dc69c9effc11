"""One episode: execute, observe, decide, until something named ends it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .cancellation import to_the_end, within
from .environment import Action, Environment, Message, Task
from .episode import Episode, EpisodeEnd, Limits
from .errors import EpisodeError, InvalidValue
from .generation import Generation, GenerationRequest, Sampling, check_seed
from .policy import Policy
from .seeds import derive_seed
from .transcript import TranscriptBuilder


async def run_episode(
    environment: Environment,
    task: Task,
    policy: Policy,
    *,
    limits: Limits,
    sampling: Sampling,
    request_id: str,
    seed: int,
) -> Episode:
    """Play one task to its end.

    Turn k is the request `f"{request_id}/{k}"` with seed `derive_seed(seed, k)`; its `max_new_tokens` is the
    sampling's, clipped to what `limits.max_tokens` leaves. An observation is added to the transcript only if
    the policy then gets a turn of at least one token.

    The environment is closed whatever happens. When this call is cancelled, the request in flight is aborted
    and its generation has ended before the cancellation goes on.

    Args:
        environment: fresh, or closed after its last episode; used by this episode alone.
        task: what to play.
        policy: who plays.
        limits: bounds of the episode.
        sampling: how each turn is drawn.
        request_id: unique among the episodes in flight on the policy.
        seed: 0 <= seed < 2**64.

    Raises:
        EpisodeError: the environment or the policy raised or broke its protocol, or the prompt left no room
            for a token.
        InvalidValue: the seed or the request id is not one.
    """
    check_seed(seed)
    if not request_id:
        raise InvalidValue("request_id is empty; expected a name that is unique among the episodes in flight")
    now = asyncio.get_running_loop().time()
    deadline = None if limits.max_seconds is None else now + limits.max_seconds
    run = _Run(environment, task, policy, limits, sampling, request_id, seed, deadline)
    try:
        episode = await run.play()
    except BaseException as error:
        try:
            await run.close()
        except EpisodeError as second:
            error.add_note(f"Closing the environment failed too: {second}")
        raise
    await run.close()
    return episode


@dataclass
class _Run:
    """The state of one call of `run_episode`."""

    environment: Environment
    task: Task
    policy: Policy
    limits: Limits
    sampling: Sampling
    request_id: str
    seed: int
    deadline: float | None
    """In the event loop's time."""
    started: float = field(default_factory=time.monotonic)
    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    infos: list[dict[str, Any]] = field(default_factory=list)
    turn: int = 0

    async def play(self) -> Episode:
        transcript = await self.open()
        while True:
            generation, end = await self.decide(transcript)
            with self.stage("generate"):
                transcript.append_generation(generation)
            if end is not None:
                if len(generation.tokens):
                    self.say(generation)
                return self.finish(transcript, end)
            action = Action(
                text=self.say(generation),
                tokens=generation.tokens,
                finish_reason=generation.finish_reason,
                transcript=transcript.snapshot(),
            )
            end = await self.execute(action, transcript)
            if end is not None:
                return self.finish(transcript, end)
            self.turn += 1

    async def open(self) -> TranscriptBuilder:
        """Reset the environment and encode the prompt."""
        with self.stage("reset"):
            async with within(self.limits.max_seconds, "max_seconds"):
                observation = await self.environment.reset(self.task)
        self.messages.extend(observation.messages)
        with self.stage("encode"):
            async with within(self.limits.max_seconds, "max_seconds", self.deadline):
                prompt = await self.policy.encode(self.messages, add_generation_prompt=True)
            transcript = TranscriptBuilder(prompt)
            if len(transcript) >= self.limits.max_tokens:
                raise InvalidValue(
                    f"the prompt has {len(transcript)} tokens but max_tokens is {self.limits.max_tokens}; "
                    "expected room for at least one more: shorten or filter the prompt, or raise max_tokens"
                )
        return transcript

    async def decide(self, transcript: TranscriptBuilder) -> tuple[Generation, EpisodeEnd | None]:
        """Sample the next turn; the end is given where the environment must not be shown it."""
        room = self.limits.max_tokens - len(transcript)
        sampling = self.sampling
        if room < sampling.max_new_tokens:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room)
        request = GenerationRequest(
            id=f"{self.request_id}/{self.turn}",
            tokens=transcript.tokens(),
            sampling=sampling,
            seed=derive_seed(self.seed, self.turn),
            media=transcript.media,
        )
        generation, in_time = await self.generate(request)
        if not in_time:
            return generation, EpisodeEnd.TIME_LIMIT
        return generation, EpisodeEnd.ABORTED if generation.finish_reason == "abort" else None

    async def generate(self, request: GenerationRequest) -> tuple[Generation, bool]:
        """The generation, and whether it came in time (if not, it is what there was by then)."""
        generating = asyncio.ensure_future(self.policy.generate(request))
        try:
            done, _ = await asyncio.wait({generating}, timeout=self.seconds_left())
            if not done:
                with self.stage("abort"):
                    async with within(self.limits.grace_seconds, "grace_seconds"):
                        await self.policy.abort(request.id)
                        await asyncio.wait({generating})
        except asyncio.CancelledError as cancelled:
            try:
                await to_the_end(self.abandon(request.id, generating))
            except EpisodeError as second:
                cancelled.add_note(f"Aborting the request in flight failed: {second}")
            raise
        except EpisodeError:
            await to_the_end(_cancel(generating, self.limits.grace_seconds))
            raise
        with self.stage("generate"):
            if generating.cancelled():
                # Not our cancellation: it must not look like one to whoever awaits the episode.
                raise RuntimeError("the policy cancelled the generation itself")
            generation = generating.result()
            if len(generation.tokens) > request.sampling.max_new_tokens:
                raise InvalidValue(
                    f"request {request.id!r} was answered with {len(generation.tokens)} tokens; expected "
                    f"at most {request.sampling.max_new_tokens}, its max_new_tokens"
                )
        return generation, bool(done)

    async def abandon(self, request_id: str, generating: asyncio.Future[Generation]) -> None:
        """Abort a request whose answer nobody wants any more, and see its generation end."""
        try:
            if not generating.done():
                with self.stage("abort"):
                    async with within(self.limits.grace_seconds, "grace_seconds"):
                        await self.policy.abort(request_id)
        finally:
            await _cancel(generating, self.limits.grace_seconds)

    async def execute(self, action: Action, transcript: TranscriptBuilder) -> EpisodeEnd | None:
        """Show the environment the turn, and the policy what came of it; None when it has another turn."""
        try:
            async with asyncio.timeout_at(self.deadline):
                # Inside, so that a TimeoutError of the environment's own is its failure, not our limit.
                with self.stage("step"):
                    step = await self.environment.step(action)
        except TimeoutError:
            return EpisodeEnd.TIME_LIMIT
        self.reward += float(step.reward)
        for name, value in step.reward_parts.items():
            self.reward_parts[name] = self.reward_parts.get(name, 0.0) + float(value)
        self.infos.append(step.info)
        conversation = self.messages[:-1]
        if step.observation is not None:
            self.messages.extend(step.observation.messages)
        if action.finish_reason == "length":
            full = len(transcript) >= self.limits.max_tokens
            return EpisodeEnd.CONTEXT_FULL if full else EpisodeEnd.TRUNCATED
        if step.done or step.observation is None:
            return EpisodeEnd.DONE
        if self.turn + 1 >= self.limits.max_turns:
            return EpisodeEnd.MAX_TURNS
        try:
            async with asyncio.timeout_at(self.deadline):
                with self.stage("encode_observation"):
                    encoded = await self.policy.encode_observation(conversation, action, step.observation)
        except TimeoutError:
            return EpisodeEnd.TIME_LIMIT
        if len(transcript) + len(encoded.tokens) >= self.limits.max_tokens:
            return EpisodeEnd.CONTEXT_FULL
        if self.seconds_left() == 0:
            return EpisodeEnd.TIME_LIMIT
        transcript.append_observation(encoded)
        return None

    def say(self, generation: Generation) -> str:
        """Add the turn to the conversation; returns its text."""
        with self.stage("decode"):
            text = self.policy.decode(generation.tokens.tolist())
        self.messages.append({"role": "assistant", "content": text})
        return text

    def finish(self, transcript: TranscriptBuilder, end: EpisodeEnd) -> Episode:
        return Episode(
            task_id=self.task.id,
            request_id=self.request_id,
            seed=self.seed,
            transcript=transcript.close(),
            messages=self.messages,
            reward=self.reward,
            reward_parts=self.reward_parts,
            end=end,
            turns=self.turn + 1,
            infos=self.infos,
            seconds=time.monotonic() - self.started,
        )

    async def close(self) -> None:
        async def closing() -> None:
            async with within(self.limits.grace_seconds, "grace_seconds"):
                await self.environment.close()

        with self.stage("close"):
            await to_the_end(closing())

    def seconds_left(self) -> float | None:
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name the task, the turn and the stage of whatever goes wrong inside."""
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise EpisodeError(self.task.id, self.request_id, self.turn, name, reason) from error


async def _cancel(generating: asyncio.Future[Generation], seconds: float) -> None:
    generating.cancel()
    await asyncio.wait({generating}, timeout=seconds)
    if generating.done() and not generating.cancelled():
        generating.exception()  # Seen: asyncio need not report it as lost.
