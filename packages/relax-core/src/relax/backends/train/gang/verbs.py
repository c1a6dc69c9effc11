"""What every rank does on a verb of the leader, the leader's own rank included."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from relax import algorithms
from relax.algorithms.spec import LossOutputs
from relax.backends.train.base import LossFn, Packed
from relax.backends.train.gang.flat import packed_of
from relax.backends.train.gang.messages import Job
from relax.backends.train.ranks import RankBackend, RankSpec
from relax.backends.train.registry import rank_backend
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.sums import add
from relax.config.roles import ActorSettings
from relax.config.system import WeightSettings
from relax.distributed.bus import Endpoint
from relax.distributed.weights import WeightPublisher


def build(job: Job) -> tuple[RankBackend, LossFn]:
    """The rank backend of a job, and the loss it trains with."""
    device = job.device
    if device == "cuda":
        local = job.rank % max(1, torch.cuda.device_count())
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    spec = RankSpec(
        folder=Path(job.folder),
        settings=msgspec.convert(job.settings, TrainerSettings),
        actor=ActorSettings.model_validate(job.actor),
        device=device,
        seed=job.seed,
        torch_threads=job.torch_threads,
        trains=job.trains,
        timeout=job.timeout,
    )
    name, settings = job.algorithm
    return rank_backend(job.backend)(spec), algorithms.build(name, settings).loss


class Member:
    """One rank: its backend, and where it publishes its shards."""

    def __init__(self, backend: RankBackend, loss: LossFn) -> None:
        self.backend = backend
        self._loss = loss
        self.publisher: WeightPublisher | None = None

    def do(self, plain: Mapping[str, Any], part: Any) -> Any:
        """Do one verb; what the leader is answered."""
        backend = self.backend
        match plain["verb"]:
            case "forward":
                return self.forward(_batches(part))
            case "forward_backward":
                return self.forward_backward(_batches(part), self._loss)
            case "optim_step":
                backend.optim_step(plain["scale"])
            case "discard_gradient":
                backend.discard_gradient()
            case "supervised_step":
                return self.supervised_step(_batches(part), plain["lr"], plain["count"])
            case "save" | "load" | "export" as verb:
                getattr(backend, verb)(Path(plain["folder"]))
            case "open_publisher":
                self.open_publisher(plain)
            case "publish":
                return self.publish(plain["version"])
            case "close_publisher":
                self.close_publisher()
            case verb:
                raise ValueError(f"there is no verb {verb!r}")
        return None

    def forward(self, batches: Sequence[Packed]) -> Any:
        return self.backend.forward(batches)

    def forward_backward(self, batches: Sequence[Packed], loss: LossFn) -> Any:
        outputs = self.backend.forward_backward(batches, loss)
        return None if outputs is None else (float(outputs.loss), outputs.count, outputs.metrics)

    def supervised_step(self, batches: Sequence[Packed], lr: float, count: int) -> float | None:
        return self.backend.supervised_step(batches, lr, count)

    def open_publisher(self, plain: Mapping[str, Any]) -> None:
        at = self.backend.coordinates
        self.publisher = WeightPublisher(
            Endpoint(**plain["endpoint"]),
            plain["run"],
            dict(self.backend.tensors()),
            WeightSettings.model_validate(plain["settings"]),
            rank=at.rank,
            world_size=at.world_size,
            session=plain["session"],
            layout=self.backend.layout(),
            dtype=plain["dtype"],
        )

    def publish(self, version: int) -> tuple[int, float]:
        """Bytes and seconds of freezing."""
        assert self.publisher is not None, "publish before open_publisher"
        return self.publisher.freeze(version, dict(self.backend.tensors()))

    def close_publisher(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def close(self) -> None:
        self.close_publisher()
        self.backend.close()


def added(answers: Sequence[tuple[float, float, Mapping[str, tuple[float, float]]]]) -> LossOutputs:
    """What ranks answered to `forward_backward`, together."""
    return add(
        LossOutputs(torch.tensor(loss, dtype=torch.float64), count, dict(metrics))
        for loss, count, metrics in answers
    )


def _batches(part: Sequence[Mapping[str, Any]]) -> list[Packed]:
    return [packed_of(batch) for batch in part]


def shallow(batch: Packed) -> dict[str, Any]:
    """A micro-batch as plain data with its tensors; media stay what they are."""
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
