"""The leader's seat: where ranks come to, opened before they are started, and before anything is built."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from relax.backends.train.gang.control import serve_store
from relax.backends.train.gang.leash import Leash
from relax.backends.train.gang.messages import Job
from relax.backends.train.settings import TrainerSettings
from relax.config.roles import ActorSettings


@dataclass(frozen=True)
class Task:
    """What all ranks of a gang do; see `Job` and `RankSpec`.

    Attributes:
        algorithm: name and settings, for `relax.algorithms.build`: its loss is what the gang trains with.
        device: kind of device, `cpu` or `cuda`.
        timeout: seconds that a collective, or silence, may last.
        start_seconds: until all ranks are built.
    """

    folder: Path
    settings: TrainerSettings
    actor: ActorSettings
    algorithm: tuple[str, dict[str, Any]]
    device: str = "cpu"
    seed: int = 0
    torch_threads: int | None = 1
    trains: bool = True
    timeout: float = 600.0
    start_seconds: float = 180.0

    @property
    def ranks(self) -> int:
        return self.actor.ranks

    def job(self, rank: int, store: tuple[str, int]) -> Job:
        """What one rank is told."""
        return Job(
            rank=rank,
            world_size=self.ranks,
            store=store,
            backend=self.actor.backend,
            folder=str(self.folder),
            settings=msgspec.to_builtins(self.settings),
            actor=self.actor.model_dump(mode="json"),
            algorithm=self.algorithm,
            device=self.device,
            seed=self.seed,
            torch_threads=self.torch_threads,
            trains=self.trains,
            timeout=self.timeout,
        )


class Seat:
    """Listens for the ranks of a gang.

    Args:
        task: what they will do.
        host: this machine's address as the ranks know it; loopback where all of them are here.
    """

    def __init__(self, task: Task, host: str = "127.0.0.1", token: str | None = None) -> None:
        self.task = task
        self.host = host
        self.token = token or secrets.token_hex(16)
        self.store, port = serve_store(host, task.timeout)
        self.job: Callable[[int], Job] = lambda rank: task.job(rank, (host, port))
        self.leash = Leash(host, self.token, task.ranks, self.job)

    @property
    def address(self) -> str:
        """Where ranks connect to."""
        return self.leash.address

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.leash.close()
        self.store = None
