"""The trainer of a role: a backend in this process, or the leader of a gang of ranks.

Where ranks live is the launcher's choice. With `local` the leader starts them as processes of its own; under
Ray they are workers of the role, started beside it, and come to a seat that the leader's worker has opened.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax.components.context import RunContext
from relax.config.lora import LoraSettings
from relax.config.parallel import ParallelSettings
from relax.config.roles import ActorSettings
from relax.config.run import RunConfig
from relax.distributed.bus import Endpoint

if TYPE_CHECKING:  # Ray's workers of other roles need no torch
    from relax.backends.train.base import LossFn


def is_gang(actor: ActorSettings) -> bool:
    """Whether these settings ask for ranks: more than one, or a backend that only knows ranks."""
    from relax.backends.train.registry import BACKENDS, RANK_BACKENDS

    return actor.ranks > 1 or (
        actor.backend in RANK_BACKENDS.entries and actor.backend not in BACKENDS.entries
    )


def trainer(config: RunConfig, folder: Path, *, trains: bool = True) -> Any:
    """The training backend in this process, on the weights of a folder or on random ones where it has none.

    With `trains` False it only scores: there are neither adapters nor master weights.
    """
    import torch

    from relax.backends.train.registry import train_backend

    actor = config.actor
    more: dict[str, Any] = {}
    if actor.backend == "torch_native":
        from relax.backends.train.torch_native.trainer import options_of

        more["options"] = options_of(actor if trains else scoring(actor))
        more["dtype"] = getattr(torch, actor.dtype)
    if actor.device != "cpu":
        more["device"] = actor.device
    return train_backend(actor.backend)(folder, settings=settings_of(config), seed=config.seed, **more)


def alone(config: RunConfig) -> RunConfig:
    """The same run with the trainer on one rank."""
    parallel = ParallelSettings().model_dump()
    return config.model_copy(update={"actor": config.actor.model_copy(update=parallel)})


def scoring(actor: ActorSettings) -> ActorSettings:
    """What a trainer that only scores is told: its folder holds merged weights, and nothing is stepped."""
    return actor.model_copy(update={"lora": LoraSettings(), "master_weights": False})


def settings_of(config: RunConfig) -> Any:
    """Optimizer, schedule and temperature."""
    from relax.backends.train.settings import TrainerSettings

    return TrainerSettings(
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


def open_seat(config: RunConfig, folder: Path, *, trains: bool = True, host: str = "127.0.0.1") -> Any:
    """Where the ranks of a role's trainer come to; see `Seat`."""
    from relax.backends.train.gang.seat import Seat, Task
    from relax.components.assembly import algorithm_settings

    actor = config.actor if trains else scoring(config.actor)
    task = Task(
        folder=folder,
        settings=settings_of(config),
        actor=actor,
        algorithm=(config.algorithm.name, algorithm_settings(config)),
        device=actor.device,
        seed=config.seed,
        trains=trains,
        timeout=actor.rank_seconds,
        start_seconds=config.ray.start_seconds,
    )
    return Seat(task, host)


def seated(seat: Any, loss: "LossFn", role: str, logs: Path, *, start: bool) -> Any:
    """The gang of a seat, once all its ranks have come.

    Args:
        seat: of `open_seat`; closed with the gang.
        loss: of the run's algorithm, the very one that the gang will be called with.
        role: whose ranks they are; names their logs.
        logs: folder of logs.
        start: start the ranks as processes of this one; otherwise a launcher does.
    """
    from relax.backends.train.gang.gang import Gang
    from relax.backends.train.gang.processes import RankProcess

    ranks = range(1, seat.task.ranks) if start else ()
    processes = [RankProcess(seat.address, seat.token, rank, logs / f"{role}-{rank}.log") for rank in ranks]
    return Gang(seat, loss, processes)


def role_trainer(context: RunContext, role: str, folder: Path, loss: "LossFn", seat: Any = None) -> Any:
    """What the actor or the reference computes with.

    Raises:
        RankFailed: a rank did not come, or failed to build its part.
    """
    config, trains = context.config, role == "actor"
    if not is_gang(config.actor):
        return trainer(config, folder, trains=trains)
    if seat is None and not trains:
        # One process holds one gang, and with `local` it is the actor's: the reference is scored alone.
        single = alone(config)
        plain = single.actor.model_copy(update={"backend": "torch_native"})
        return trainer(single.model_copy(update={"actor": plain}), folder, trains=False)
    start = seat is None
    seat = seat or open_seat(config, folder, trains=trains)
    return seated(seat, loss, role, context.folder / "logs", start=start)


class RankHost:
    """A rank that a launcher started beside its leader: a process on this machine, watched."""

    def __init__(self, context: RunContext, worker: str, leader: Endpoint) -> None:
        from relax.backends.train.gang.processes import RankProcess

        rank = int(worker.rpartition("-")[2])
        log = context.folder / "logs" / f"{worker}.log"
        self._process = RankProcess(leader.address, leader.token or "", rank, log)

    async def run(self) -> None:
        """Until the leader lets it go; raises ChildProcessError when it ends otherwise."""
        await asyncio.to_thread(self._process.wait)

    async def close(self) -> None:
        """End the process, if it has not. Idempotent."""
        await asyncio.to_thread(self._process.end)
