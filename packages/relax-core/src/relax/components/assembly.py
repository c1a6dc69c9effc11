"""Each role built from a run's context: the one place that knows what a role is made of."""

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import agentic
from agentic.environments import environment_factory
from omni_processor import OmniProcessor

from relax.backends.routes import routing_of
from relax.components.context import RunContext
from relax.config.base import ConfigError
from relax.config.run import RunConfig
from relax.distributed.schedule import placements
from relax.distributed.version_clock import VersionClock
from relax.engine.batching import Coalescing, Lockstep
from relax.engine.pool import EnginePool, ReplicaEngine
from relax.engine.prompts import PromptSource, read_rows
from relax.engine.rewards import registry as rewards
from relax.engine.rewards.base import Reward, RewardInput
from relax.engine.router import Placement, RecordedPlacement, Router, StaticPlacement
from relax.ops.reports import Reports


def rollout(context: RunContext, engines: Mapping[str, ReplicaEngine], reports: Reports) -> Any:
    """The Rollout role over engines that already run."""
    from relax.components.rollout import Rollout

    config = context.config
    clock = VersionClock(config.max_staleness, actor=context.first_step)
    pool = engine_pool(context, engines, clock)
    return Rollout(
        context,
        OmniProcessor.from_pretrained(context.model),
        PromptSource(read_rows(config.data), config.data, config.seed),
        pool,
        clock,
        Environments(config),
        context_length(context),
        reports,
        routing_of(json.loads((context.model / "config.json").read_text()))
        if config.actor.routing_replay
        else None,
    )


def engine_pool(context: RunContext, engines: Mapping[str, ReplicaEngine], clock: VersionClock) -> EnginePool:
    """The pool of a mode: `async` routes by load and prefix, `colocate` by ordinal, a replay as recorded."""
    config = context.config
    placement: Placement = Router(affinity=config.rollout.router == "affinity")
    if context.replay is not None:
        placement = RecordedPlacement(*placements(context.replay / "rollout.jsonl"))
    elif config.mode == "colocate":
        placement = StaticPlacement()
    lockstep = config.mode == "colocate" and context.replay is None
    return EnginePool(
        engines,
        Lockstep if lockstep else Coalescing,
        clock,
        config.weights.timeout_seconds,
        placement=placement,
        stall_seconds=config.rollout.stall_seconds if context.replay is None else None,
        failover=context.replay is None,
    )


def advantages(context: RunContext) -> Any:
    """The Advantages role."""
    from relax.components.advantages import Advantages

    return Advantages(context)


def reference(context: RunContext) -> Any:
    """The Reference role, with the policy as it was before the first step."""
    from relax.components.reference import Reference

    return Reference(context, lambda: trainer(context.config, initial_folder(context.folder)))


def actor(context: RunContext, reports: Reports) -> Any:
    """The Actor role, restored from the context's checkpoint or warmed up."""
    from relax.components.actor import Actor
    from relax.components.advantages import algorithm_of
    from relax.components.warm_up import warm_up
    from relax.distributed.weights import WeightPublisher
    from relax.engine.checkpoints import Checkpoints, read_checkpoint

    config = context.config
    backend = trainer(config, context.model)
    if context.checkpoint is not None:
        state, _ = read_checkpoint(context.checkpoint)
        backend.load_state(state)
    else:
        if config.actor.supervised.steps:
            warm_up(context, backend, reports)
        if config.reference:
            backend.export(initial_folder(context.folder))
    publisher = WeightPublisher(context.weights, context.run, dict(backend.tensors()), config.weights)
    checkpoints = Checkpoints(context.folder, config.checkpoint.keep)
    return Actor(context, backend, algorithm_of(config), checkpoints, publisher, reports)


def initial_folder(run_folder: Path) -> Path:
    """Where the actor leaves the policy as it was before the first step, for the Reference role."""
    return run_folder / "initial"


class Environments:
    """What makes the environment of each episode; one that takes a `reward` is given the run's."""

    def __init__(self, config: RunConfig) -> None:
        self._factory = environment_factory(config.environment.name)
        self._kwargs = dict(config.environment.kwargs)
        self._reward: Reward | None = None
        if "reward" in inspect.signature(self._factory).parameters:
            self._reward = rewards.build(config.reward.name, config.reward.kwargs)
            self._kwargs["reward"] = _as_agentic(self._reward)
        try:
            self._factory(**self._kwargs)
        except TypeError as error:
            raise ConfigError(f"environment.kwargs = {config.environment.kwargs}: {error}") from error

    def __call__(self) -> agentic.Environment:
        return self._factory(**self._kwargs)

    async def close(self) -> None:
        """Let go of what the reward holds (worker processes)."""
        close = getattr(self._reward, "close", None)
        if close is not None:
            found = close()
            if inspect.isawaitable(found):
                await found


def algorithm_settings(config: RunConfig) -> dict[str, object]:
    """What is laid over the named algorithm's own settings."""
    settings = config.algorithm.overrides()
    if config.algorithm.name == "dr_grpo" or config.algorithm.aggregation == "fixed":
        settings["max_length"] = config.rollout.max_new_tokens * config.rollout.max_turns
    return settings


def context_length(context: RunContext) -> int:
    """Tokens of prompt and response together: the configuration's, at most the model's own."""
    content = json.loads((context.model / "config.json").read_text())
    own = (content.get("text_config") or content).get("max_position_embeddings")
    wanted = context.config.model.context_length
    return min(length for length in (own, wanted, 1 << 20) if length)


def trainer(config: RunConfig, folder: Path) -> Any:
    """The training backend on the weights of a folder, or on random ones where it has none."""
    from relax.backends.train.registry import train_backend
    from relax.backends.train.settings import TrainerSettings

    settings = TrainerSettings(
        lr=config.actor.lr,
        betas=config.actor.betas,
        eps=config.actor.eps,
        weight_decay=config.actor.weight_decay,
        clip_grad_norm=config.actor.clip_grad_norm,
        lr_schedule=config.actor.lr_schedule,
        warmup_steps=config.actor.lr_warmup_steps,
        total_steps=config.steps,
        temperature=config.rollout.temperature,
    )
    return train_backend(config.actor.backend)(folder, settings=settings, seed=config.seed)


def _as_agentic(reward: Reward) -> Callable[..., Any]:
    async def score(task: agentic.Task, response: str, transcript: agentic.Transcript) -> agentic.Score:
        found = await reward(
            RewardInput(messages=task.prompt, response=response, answer=task.answer, row=task.data)
        )
        return agentic.Score(found.value, dict(found.parts), found.reason or "")

    return score
