"""Gangs of two processes on the tiny model, each started once and set back to its beginning for each test."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from relax import algorithms
from relax.backends.train.base import LossFn
from relax.backends.train.gang.gang import Gang
from relax.backends.train.gang.processes import RankProcess
from relax.backends.train.gang.seat import Seat, Task
from relax.backends.train.settings import TrainerSettings
from relax.config.roles import ActorSettings

SETTINGS = TrainerSettings(lr=3e-3, temperature=0.8, clip_grad_norm=None)
Start = Callable[..., "contextlib.AbstractContextManager[Gang]"]


@pytest.fixture(scope="session")
def loss() -> LossFn:
    return algorithms.build("grpo", {}).loss


@pytest.fixture(scope="session")
def start(text_folder: Path, tmp_path_factory, loss) -> Start:
    """Starts a gang: start(data_parallel=2, fsdp=False) is one of two replicas."""

    @contextlib.contextmanager
    def started(
        folder: Path = text_folder, settings: TrainerSettings = SETTINGS, timeout: float = 60.0, **actor
    ) -> Iterator[Gang]:
        task = Task(
            folder, settings, ActorSettings(**actor), ("grpo", {}), timeout=timeout, start_seconds=110
        )
        logs = tmp_path_factory.mktemp("gang")
        seat = Seat(task)
        ranks = [
            RankProcess(seat.address, seat.token, rank, logs / f"rank-{rank}.log")
            for rank in range(1, task.ranks)
        ]
        gang = Gang(seat, loss, ranks)
        try:
            yield gang
        finally:
            gang.close()

    return started
