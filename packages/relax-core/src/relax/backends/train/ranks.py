"""What one rank of a trainer with many ranks does; `gang` makes one `TrainBackend` of all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from relax.algorithms.spec import LossOutputs
from relax.backends.train.base import LossFn, Packed, StepStats
from relax.backends.train.settings import TrainerSettings

if TYPE_CHECKING:
    import dcs

    from relax.config.roles import ActorSettings


@dataclass(frozen=True)
class RankSpec:
    """What a rank is made from. A rank backend is a callable `(spec) -> RankBackend`; when it is called,
    torch.distributed's default group spans all ranks of the trainer.

    Attributes:
        folder: the Hugging Face model folder; without weights they are drawn from `seed`.
        settings: optimizer, schedule, temperature.
        actor: the whole `actor` section: the split (`actor.parallel`), and what a backend has of its own.
        device: of this rank, such as `cpu` or `cuda:0`.
        seed: of weights that the folder does not hold, and of random states.
        torch_threads: intra-op threads of this process; None leaves them as they are.
        trains: False for one that only scores, as the Reference role's: no optimizer is needed.
        timeout: seconds that a collective of groups that the backend makes may take, as one of the default
            group: a rank that falls silent is found out by it.
    """

    folder: Path
    settings: TrainerSettings
    actor: "ActorSettings"
    device: str = "cpu"
    seed: int = 0
    torch_threads: int | None = 1
    trains: bool = True
    timeout: float = 1800.0


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands.

    Attributes:
        rank: global rank, 0 to `world_size` - 1.
        world_size: ranks of the trainer.
        data_rank: which of the data-parallel replicas it belongs to, 0 to `data_size` - 1. Ranks of one
            replica (tensor, context and pipeline parallel) are given the same micro-batches.
        data_size: data-parallel replicas.
        speaks: whether this rank returns results for its replica: tensor and context rank 0 of the last
            pipeline stage. One rank a replica does.
    """

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    speaks: bool


class RankBackend(Protocol):
    """One rank. All ranks are called with the same verb at the same time; every rank of a data-parallel
    replica with the same micro-batches, and all replicas with equally many.

    Results for samples come from the rank that speaks for its replica; the others return None.
    """

    @property
    def coordinates(self) -> Coordinates: ...

    def forward(self, batches: Sequence[Packed]) -> list[Tensor] | None:
        """For each micro-batch float32 [total response]: logprobs as `TrainBackend.forward` gives them."""
        ...

    def forward_backward(self, batches: Sequence[Packed], loss: LossFn) -> LossOutputs | None:
        """Accumulate the gradient of the unscaled loss sum of all micro-batches; their sums and counts."""
        ...

    def optim_step(self, scale: float) -> StepStats:
        """Sum gradients over replicas, finish those of replicated parameters, scale, clip by the norm over
        all shards, step. The same answer on every rank.
        """
        ...

    def discard_gradient(self) -> None: ...

    def supervised_step(self, batches: Sequence[Packed], lr: float, count: int) -> float | None:
        """One step of cross-entropy; `count` is the number of marked tokens over all replicas. The loss
        sum.
        """
        ...

    def layout(self) -> "dcs.Layout":
        """Which boxes of which Hugging Face tensors `tensors` holds."""
        ...

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """This rank's shards by local name, as `layout` names them; live memory."""
        ...

    def save(self, folder: Path) -> None:
        """Write this rank's part of weights, optimizer, schedule and random state; all into one folder."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from a folder that ranks wrote, perhaps split otherwise; bit for bit under the same split."""
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder together; never a whole model on one rank."""
        ...

    def close(self) -> None: ...
