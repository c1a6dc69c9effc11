"""Each role built from a run's context: the one place that knows what a role is made of."""

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import agentic
from agentic.environments import environment_factory
from omni_processor import Budget, OmniProcessor

from relax.backends.routes import routing_of
from relax.components.context import Closes, RunContext
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

if TYPE_CHECKING:
    from relax.distributed.weights import Publishing


def rollout(context: RunContext, engines: Mapping[str, ReplicaEngine], reports: Reports) -> Any:
    """The Rollout role over engines that already run."""
    from relax.components.rollout import Rollout

    config = context.config
    clock = VersionClock(config.max_staleness, actor=context.first_step)
    pool = engine_pool(context, engines, clock)
    return Rollout(
        context,
        OmniProcessor.from_pretrained(
            context.model,
            family=config.model.family,
            # What cannot leave room for an answer is refused before it is decoded.
            budget=Budget(max_sample_tokens=context_length(context)),
        ),
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


def reference(context: RunContext, seat: Any = None) -> Any:
    """The Reference role, with the policy as it was before the first step."""
    from relax.components.advantages import algorithm_of
    from relax.components.reference import Reference
    from relax.components.trainers import role_trainer

    folder = initial_folder(context.folder)
    loss = algorithm_of(context.config).loss
    return Reference(context, lambda: role_trainer(context, "reference", folder, loss, seat))


def actor(context: RunContext, reports: Reports, seat: Any = None) -> Any:
    """The Actor role, restored from the context's checkpoint or warmed up. Ranks of its trainer come to the
    seat, where a launcher starts them.
    """
    from relax.components.actor import Actor
    from relax.components.advantages import algorithm_of
    from relax.components.trainers import role_trainer
    from relax.components.warm_up import warm_up
    from relax.engine.checkpoints import Checkpoints, restore

    config = context.config
    algorithm = algorithm_of(config)
    backend = role_trainer(context, "actor", context.model, algorithm.loss, seat)
    try:
        if context.checkpoint is not None:
            restore(context.checkpoint, backend)
        else:
            if config.actor.supervised.steps:
                warm_up(context, backend, reports)
            if config.reference:
                backend.export(initial_folder(context.folder))
        publisher = weight_publisher(context, backend)
    except BaseException:
        if isinstance(backend, Closes):
            backend.close()
        raise
    checkpoints = Checkpoints(context.folder, config.checkpoint.keep)
    return Actor(context, backend, algorithm, checkpoints, publisher, reports)


def weight_publisher(context: RunContext, backend: Any) -> "Publishing":
    """What publishes the versions of a trainer, in the dtype that engines compute in."""
    from relax.distributed.adapters import AdapterPublisher
    from relax.distributed.weights import LivePublisher

    config = context.config
    adapters = getattr(backend, "adapters", None)
    if adapters is not None and config.actor.travelling_adapter is not None:
        return AdapterPublisher(
            context.weights,
            context.run,
            backend.base_tensors,
            adapters.matrices,
            config.weights,
            config.model.dtype,
        )
    publish_to = getattr(backend, "publish_to", None)
    if publish_to is not None:
        return publish_to(context.weights, context.run, config.weights, config.model.dtype)
    return LivePublisher(
        context.weights, context.run, backend.tensors, config.weights, dtype=config.model.dtype
    )


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


def _as_agentic(reward: Reward) -> Callable[..., Any]:
    async def score(task: agentic.Task, response: str, transcript: agentic.Transcript) -> agentic.Score:
        found = await reward(
            RewardInput(messages=task.prompt, response=response, answer=task.answer, row=task.data)
        )
        return agentic.Score(found.value, dict(found.parts), found.reason or "")

    return score
