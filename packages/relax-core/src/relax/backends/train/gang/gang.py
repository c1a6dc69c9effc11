"""The leader's trainer: a `TrainBackend` over all ranks, of which its own is rank 0."""

import contextlib
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from relax.algorithms.spec import LossOutputs
from relax.backends.train.admission import TRAINED, admission_of
from relax.backends.train.base import LossFn, Packed, StepStats
from relax.backends.train.errors import (
    BatchError,
    RankFailed,
    StateFileError,
    StateMissingError,
    StepOrderError,
)
from relax.backends.train.export import export_folder
from relax.backends.train.gang.control import Control, distributed
from relax.backends.train.gang.failures import is_consequence
from relax.backends.train.gang.processes import RankProcess, first_failure
from relax.backends.train.gang.rounds import Piece, cut, in_row_order
from relax.backends.train.gang.seat import Seat
from relax.backends.train.gang.verbs import Member, added, build, shallow
from relax.backends.train.padding import marked
from relax.backends.train.settings import TrainerSettings
from relax.config.system import WeightSettings
from relax.distributed.bus import Endpoint
from relax.distributed.weights import WeightPublisher

_CAUSE_SECONDS = 5.0
"""For the reason to arrive after a collective has failed."""


class Gang:
    """Trains with many ranks as if they were one. One thread calls it at a time.

    A rank that raises, dies or falls silent breaks the gang: the call at hand and all after it raise
    `RankFailed`, and every other rank ends. A batch that does not fit the model is refused before any rank
    is told of it, and breaks nothing.

    Args:
        seat: where the ranks come to.
        loss: what `forward_backward` will be called with; the ranks build it anew from the task's algorithm.
        processes: ranks that were started on this machine for this gang; it ends them.

    Raises:
        RankFailed: a rank did not come, or failed to build its part.
        TrainError: what this rank's own backend refuses.
    """

    def __init__(self, seat: Seat, loss: LossFn, processes: Sequence[RankProcess] = ()) -> None:
        self._seat = seat
        self._leash = seat.leash
        self._task = seat.task
        self._loss = loss
        self._processes = tuple(processes)
        self._calls = 0
        self._accumulated = 0
        self._broken: str | None = None
        self._closed = False
        self._member: Member | None = None
        self._control: Control | None = None
        try:
            with self._guard():
                self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        seconds = self._task.start_seconds
        if distributed.is_initialized():
            raise RankFailed(
                "this process belongs to a process group of torch.distributed already; a gang needs the "
                "default one: start each in a process of its own"
            )
        self._leash.begin()
        self._leash.wait_here(seconds, self._exited)
        self._control = Control(
            self._seat.store,
            0,
            self._task.ranks,
            device=self._task.device,
            timeout=self._task.timeout,
            host=self._seat.host,
        )
        backend, _ = build(self._seat.job(0))
        ready = self._leash.wait_ready(seconds, self._exited)
        self._member = Member(backend, self._loss)
        self._admission = admission_of(self._task.folder)
        own = backend.coordinates
        places = [(own.data_rank, own.speaks), *((at.data_rank, at.speaks) for at in ready)]
        self._data_rank = [place for place, _ in places]
        self._replicas = own.data_size
        self._speakers = [
            next(rank for rank, at in enumerate(places) if at == (replica, True))
            for replica in range(self._replicas)
        ]

    def _exited(self) -> str | None:
        return first_failure(self._processes)

    @property
    def settings(self) -> TrainerSettings:
        """Optimizer, schedule and temperature."""
        return self._task.settings

    # The verbs of a TrainBackend

    @property
    def pids(self) -> list[int]:
        """Processes of the ranks from 1 on that were started here."""
        return [process.pid for process in self._processes]

    def forward(self, batch: Packed) -> Tensor:
        """float32 [total response]: the logprob of each response token, no gradient.

        Raises:
            BatchError: the batch contradicts itself or does not fit the model.
            RankFailed: a rank failed.
        """
        pieces = self._cut(batch)
        answers = self._batches("forward", {}, pieces, lambda own: self._own.forward(own))
        return in_row_order(batch, pieces, [answers[rank] for rank in self._speakers])

    def forward_backward(self, batch: Packed, loss: LossFn) -> LossOutputs:
        """Accumulate the gradient of the unscaled loss sum of one micro-batch; sums over all ranks.

        Raises:
            BatchError: the batch contradicts itself or does not fit the model, or the loss is not the one
                that the ranks know.
            RankFailed: a rank failed.
        """
        if loss != self._loss:
            raise BatchError(
                f"a gang trains with the loss of its algorithm, {self._task.algorithm[0]}: the ranks cannot "
                "be sent another one"
            )
        pieces = self._cut(batch, TRAINED)
        answers = self._batches(
            "forward_backward", {}, pieces, lambda own: self._own.forward_backward(own, loss)
        )
        self._accumulated += 1
        return added([answers[rank] for rank in self._speakers])

    def optim_step(self, scale: float) -> StepStats:
        """Scale the gradient once, clip, step, zero it; on every rank.

        Raises:
            StepOrderError: no gradient was accumulated.
            BatchError: the scale is not a finite number above 0, as when the global count was 0.
        """
        if not self._accumulated:
            raise StepOrderError(
                "optim_step without a gradient: call forward_backward at least once before it"
            )
        if not (math.isfinite(scale) and scale > 0):
            raise BatchError(f"scale is {scale}; it has to be 1 / a global count above 0")
        stats = self._call("optim_step", {"scale": scale}, lambda: self._own.backend.optim_step(scale))[0]
        self._accumulated = 0
        return stats

    def discard_gradient(self) -> None:
        """Forget the accumulated gradient: the step at hand is given up."""
        self._call("discard_gradient", {}, lambda: self._own.backend.discard_gradient())
        self._accumulated = 0

    def supervised_step(self, batch: Packed, lr: float) -> float:
        """One step of cross-entropy on the tokens `loss_mask` marks, before RL; returns the mean loss."""
        if self._accumulated:
            raise StepOrderError(
                f"supervised_step between {self._accumulated} forward_backward and their optim_step"
            )
        pieces = self._cut(batch, ("loss_mask",))
        count = marked(batch)
        answers = self._batches(
            "supervised_step",
            {"lr": lr, "count": count},
            pieces,
            lambda own: self._own.supervised_step(own, lr, count),
        )
        return sum(answers[rank] for rank in self._speakers) / count

    def save(self, folder: Path) -> None:
        """Every rank writes its part into the folder, which the ranks make."""
        if self._accumulated:
            raise StepOrderError(f"save between {self._accumulated} forward_backward and their optim_step")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StateFileError(
                f"state folder {folder} is already there; states are never overwritten, name a new one"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._on_disk("save", folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, perhaps by ranks that were split otherwise."""
        if not folder.is_dir():
            raise StateMissingError(f"there is no state folder {folder}")
        self._on_disk("load", folder)
        self._accumulated = 0

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder, whole or not at all; the ranks write their weights together."""
        with export_folder(source=self._task.folder, target=Path(folder)) as made:
            self._on_disk("export", made)

    def close(self) -> None:
        """Let the ranks end and leave the groups. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._member is not None and self._broken is None:
            with contextlib.suppress(RankFailed):  # they end in any case
                self.close_publisher()
        self._leash.end("" if self._broken is None else f"the gang is broken: {self._broken}")
        if self._member is not None:
            self._member.close()
        for process in self._processes:
            process.end()
        self._seat.close()
        if self._control is not None:
            self._control.close()

    # Weights

    def publish_to(
        self, endpoint: Endpoint, run: str, settings: WeightSettings, dtype: str | None = None
    ) -> "GangPublisher":
        """Have every rank publish its shards of a run, in a dtype or their own."""
        plain = {
            "endpoint": {
                "address": endpoint.address,
                "token": endpoint.token,
                "transport": endpoint.transport,
            },
            "run": run,
            "settings": settings.model_dump(mode="json"),
            "session": uuid.uuid4().hex,
            "dtype": dtype,
        }
        self._call("open_publisher", plain, lambda: self._own.open_publisher(plain))
        return GangPublisher(self)

    def freeze(self, version: int) -> list[tuple[int, float]]:
        """Every rank freezes and announces its shards of a version: bytes and seconds of each."""
        plain = {"version": version}
        return self._call("publish", plain, lambda: self._own.publish(version))

    def close_publisher(self) -> None:
        """Every rank leaves the run that it publishes to, if any."""
        self._call("close_publisher", {}, lambda: self._own.close_publisher())

    @property
    def own_publisher(self) -> WeightPublisher:
        """What rank 0 publishes with; an acknowledgement of a version reaches every rank alike."""
        assert self._own.publisher is not None, "no publisher was opened"
        return self._own.publisher

    # How a call goes

    @property
    def _own(self) -> Member:
        assert self._member is not None, "the gang has not come together"
        return self._member

    def _cut(self, batch: Packed, columns: Sequence[str] = ()) -> list[list[Piece]]:
        """The pieces of a batch that fits the model and has the columns."""
        batch = self._admission.admit(batch, columns)
        actor = self._task.actor
        stages = actor.pipeline_parallel
        return cut(
            batch,
            self._replicas,
            tokens=actor.rank_tokens,
            least=stages,
            multiple=stages if actor.virtual_pipeline > 1 else 1,
        )

    def _batches(
        self,
        verb: str,
        plain: Mapping[str, Any],
        pieces: Sequence[Sequence[Piece]],
        own: Callable[[list[Packed]], Any],
    ) -> list[Any]:
        parts = [[shallow(piece.batch) for piece in replica] for replica in pieces]
        given = [None if rank == 0 else parts[at] for rank, at in enumerate(self._data_rank)]
        mine = [piece.batch for piece in pieces[self._data_rank[0]]]
        return self._call(verb, plain, lambda: own(mine), given)

    def _on_disk(self, verb: str, folder: Path) -> None:
        self._call(verb, {"folder": str(folder)}, lambda: getattr(self._own.backend, verb)(folder))

    def _call(
        self,
        verb: str,
        plain: Mapping[str, Any],
        own: Callable[[], Any],
        parts: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Have all ranks do a verb; what each answers, this one's first."""
        if self._broken is not None:
            raise RankFailed(f"{verb} in a gang that is broken: {self._broken}")
        with self._guard():
            assert self._control is not None
            self._calls += 1
            self._leash.call(self._calls)
            self._control.give({"verb": verb, **plain}, parts or [None] * self._task.ranks)
            mine = own()
            return [mine, *self._control.collect()]

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Whatever is raised breaks the gang; where it follows from another rank, that one is named."""
        try:
            yield
        except Exception as error:
            found: Exception = error
            if not isinstance(error, RankFailed) and is_consequence(error):
                found = self._leash.failure(wait=_CAUSE_SECONDS)
                if (told := self._exited()) is not None and isinstance(found, RankFailed):
                    found = RankFailed(f"{found}\n{told}", found.rank)
            self._broken = str(found)
            self._leash.end(f"rank 0 failed: {found}")
            if found is error:
                raise
            raise found from error


class GangPublisher:
    """The ranks' versions as one, for the Actor."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._frozen: list[tuple[int, float]] = []

    @property
    def away(self) -> frozenset[str]:
        return self._gang.own_publisher.away

    @away.setter
    def away(self, names: frozenset[str]) -> None:
        self._gang.own_publisher.away = names

    def publish(self, version: int) -> Any:
        """Freeze and announce a version on every rank; how the one before went, as `WeightPublisher` says."""
        before = self.settle()
        self._frozen = self._gang.freeze(version)
        return before

    def settle(self) -> Any:
        """Wait until the newest version is in every live engine; its bytes are those of all ranks."""
        stats = self._gang.own_publisher.settle()
        if stats is None:
            return None
        return msgspec.structs.replace(
            stats,
            nbytes=sum(nbytes for nbytes, _ in self._frozen),
            freeze_seconds=max(seconds for _, seconds in self._frozen),
        )

    def close(self) -> None:
        """The ranks leave the run when the gang is closed."""
