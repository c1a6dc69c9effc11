"""Loaders: a task's samples as batches to iterate over, in the manner of torch's DataLoader."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import Closed, InvalidArgument, QueueError
from ..samplers import Balanced, Groups, InOrder, Sampler, TokenBudget, group_size
from .aio import AsyncBatch, AsyncPartition
from .blocking import Batch, Partition
from .calls import Choose, Ranks

_UNCAPPED = 1 << 20  # samples, where only a token budget limits a batch

_ALONE = {
    "rank": 0, "world_size": 1, "sharers": 1, "member": None, "key": None, "global_batch": None,
}  # fmt: skip

Ack = Literal["auto", "batch", "step", "manual"]


@dataclass(frozen=True)
class _Plan:
    """What every fetch of a loader asks for, and when it acks."""

    task: str
    batch_size: int
    options: dict[str, Any]
    by_step: bool
    manual: bool


def _plan(
    task: str,
    batch_size: int | None,
    token_budget: int | None,
    n: int | None,
    balanced: bool,
    sampler: Sampler | Choose | None,
    ranks: Ranks,
    ack: Ack,
    options: dict[str, Any],
) -> _Plan:
    if sampler is not None and (token_budget is not None or n is not None or balanced):
        raise InvalidArgument(
            f"sampler={sampler} with token_budget={token_budget}, group_size={n}, balanced={balanced}: give "
            "a sampler, or what to make one of"
        )
    if sampler is None:
        if balanced:
            sampler = Balanced(token_budget, n)
        elif token_budget is not None:
            sampler = TokenBudget(token_budget, n)
        else:
            sampler = InOrder() if n is None else Groups(n)
    if batch_size is None:
        if not isinstance(sampler, TokenBudget):
            raise InvalidArgument(
                "a loader needs a batch_size; only with a token_budget (and not balanced) can it be left out"
            )
        unit = group_size(sampler) or 1
        batch_size = max(1, _UNCAPPED // unit) * unit
    if ack not in ("auto", "batch", "step", "manual"):
        raise InvalidArgument(f'ack is {ack!r}; it is "auto", "batch", "step" or "manual"')
    given = {name: value for name, value in ranks.items() if value != _ALONE[name]}
    steps = "global_batch" in given or isinstance(sampler, Balanced)
    if ack == "step" and not steps:
        raise InvalidArgument('ack="step" needs to know the steps: give a global_batch, or balanced=True')
    options = options | given | {"sampler": sampler}
    return _Plan(task, batch_size, options, ack == "step" or (ack == "auto" and steps), ack == "manual")


class _Pending[B: (Batch, AsyncBatch)]:
    """The batches that a loop has been given and that are not settled yet."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._batches: list[B] = []
        self._step_is_complete = False

    def give(self, batch: B) -> None:
        self._step_is_complete = batch.is_last
        if not self._plan.manual and not batch.dummy:  # which has no lease
            self._batches.append(batch)

    def due(self, ended: bool) -> Iterator[B]:
        """The batches to ack when the loop asks for the next one (`ended`: there is none)."""
        if ended or self._step_is_complete or not self._plan.by_step:
            return self.take()
        return iter(())

    def take(self) -> Iterator[B]:
        """All of them, each taken when it is reached: what is left where one fails is still pending."""
        while self._batches:
            batch = self._batches.pop(0)
            if not batch.settled:  # by the loop itself
                yield batch


class StreamingDataLoader:
    """Batches of a task until its partition is closed and drained, for one data-parallel rank.

    Each batch is a `Batch` (or what `collate_fn` makes of it). All ranks get equally many, so collectives in
    the loop stay in step: see `transferqueue.scheduling.rounds` for what is promised, also when samples come
    back. ``batch.is_last`` marks the last micro-batch of an optimizer step; a ``batch.dummy`` is a copy of
    another rank's samples, to be run with a loss of zero weight. Its length is not known, as the stream goes
    on while producers put.

    Iterating again goes on where the last loop has left. One loop at a time.

    Args:
        partition: where the samples are.
        task: whose samples.
        batch_size: samples of a batch. With `token_budget`, at most; None: any number. With `balanced`, of
            all batches of one optimizer step on all ranks.
        token_budget: the sum of lengths in a batch (the partition names its ``length_field``).
        group_size: serve whole groups of so many members.
        balanced: split each global batch over the ranks by length, as `samplers.Balanced` does.
        sampler: in place of the three above; also a function, as in `Partition.fetch`.
        rank, world_size: of the data-parallel group.
        sharers, member: ranks of a tensor or pipeline group that each get the same batches, and which of
            them this is (None: every client is one of them).
        key: a name for the sequence of batches; ranks that start again in a new run take a new one.
        global_batch: samples of one optimizer step on all ranks: batches end with it.
        ack: when samples are done. "batch": when the loop asks for the next batch. "step": when it asks for
            the batch after ``is_last``, so that a step that fails half way gives all of its samples back.
            "auto" is "step" where steps are known (`global_batch`, `balanced`), else "batch". "manual": the
            loop calls ``batch.ack()``.
        collate_fn: what the loop gets for a batch, in place of the batch itself.
        fields, max_priority, min_version, max_staleness, lease_seconds, timeout: as in `Partition.fetch`.

    Leaving the loop early, by ``break`` or an error, gives back what is not acked; call `ack` before a
    ``break`` to keep it.

    Raises:
        InvalidArgument: arguments that do not go together.
    """

    def __init__(
        self,
        partition: Partition,
        task: str,
        *,
        batch_size: int | None = None,
        token_budget: int | None = None,
        group_size: int | None = None,
        balanced: bool = False,
        sampler: Sampler | Choose | None = None,
        rank: int = 0,
        world_size: int = 1,
        sharers: int = 1,
        member: int | None = None,
        key: str | None = None,
        global_batch: int | None = None,
        ack: Ack = "auto",
        collate_fn: Callable[[Batch], Any] | None = None,
        fields: Sequence[str] | None = None,
        max_priority: int | None = None,
        min_version: int | None = None,
        max_staleness: int | None = None,
        lease_seconds: float = 600.0,
        timeout: float = 86_400.0,
    ) -> None:
        ranks: Ranks = {
            "rank": rank, "world_size": world_size, "sharers": sharers, "member": member, "key": key,
            "global_batch": global_batch,
        }  # fmt: skip
        options = {
            "fields": fields, "max_priority": max_priority, "min_version": min_version,
            "max_staleness": max_staleness, "lease_seconds": lease_seconds, "timeout": timeout,
        }  # fmt: skip
        self._partition = partition
        self._collate = collate_fn
        self._plan = _plan(task, batch_size, token_budget, group_size, balanced, sampler, ranks, ack, options)
        self._pending: _Pending[Batch] = _Pending(self._plan)

    def ack(self) -> None:
        """Acks every batch that the loop has been given.

        Raises:
            StaleLease: a lease has lapsed; its samples went back.
        """
        for batch in self._pending.take():
            batch.ack()

    def __iter__(self) -> Iterator[Any]:
        plan, pending = self._plan, self._pending
        try:
            while True:
                for batch in pending.due(ended=False):
                    batch.ack()
                try:
                    batch = self._partition.fetch(plan.task, plan.batch_size, **plan.options)
                except Closed:
                    for batch in pending.due(ended=True):
                        batch.ack()
                    return
                pending.give(batch)
                yield batch if self._collate is None else self._collate(batch)
        finally:
            for batch in pending.take():
                try:
                    batch.nack()
                except QueueError:
                    continue  # lapsed, or the client is closed: they return without being given back


class AsyncStreamingDataLoader:
    """`StreamingDataLoader` for ``async for``, over an `AsyncPartition`. Use ``contextlib.aclosing`` around
    its iterator to have batches given back at once when the loop is left.
    """

    def __init__(
        self,
        partition: AsyncPartition,
        task: str,
        *,
        batch_size: int | None = None,
        token_budget: int | None = None,
        group_size: int | None = None,
        balanced: bool = False,
        sampler: Sampler | Choose | None = None,
        rank: int = 0,
        world_size: int = 1,
        sharers: int = 1,
        member: int | None = None,
        key: str | None = None,
        global_batch: int | None = None,
        ack: Ack = "auto",
        collate_fn: Callable[[AsyncBatch], Any] | None = None,
        fields: Sequence[str] | None = None,
        max_priority: int | None = None,
        min_version: int | None = None,
        max_staleness: int | None = None,
        lease_seconds: float = 600.0,
        timeout: float = 86_400.0,
    ) -> None:
        ranks: Ranks = {
            "rank": rank, "world_size": world_size, "sharers": sharers, "member": member, "key": key,
            "global_batch": global_batch,
        }  # fmt: skip
        options = {
            "fields": fields, "max_priority": max_priority, "min_version": min_version,
            "max_staleness": max_staleness, "lease_seconds": lease_seconds, "timeout": timeout,
        }  # fmt: skip
        self._partition = partition
        self._collate = collate_fn
        self._plan = _plan(task, batch_size, token_budget, group_size, balanced, sampler, ranks, ack, options)
        self._pending: _Pending[AsyncBatch] = _Pending(self._plan)

    async def ack(self) -> None:
        """See `StreamingDataLoader.ack`."""
        for batch in self._pending.take():
            await batch.ack()

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        return self._batches()

    async def _batches(self) -> AsyncGenerator[Any, None]:
        plan, pending = self._plan, self._pending
        try:
            while True:
                for batch in pending.due(ended=False):
                    await batch.ack()
                try:
                    batch = await self._partition.fetch(plan.task, plan.batch_size, **plan.options)
                except Closed:
                    for batch in pending.due(ended=True):
                        await batch.ack()
                    return
                pending.give(batch)
                yield batch if self._collate is None else self._collate(batch)
        finally:
            for batch in pending.take():
                try:
                    await batch.nack()
                except QueueError:
                    continue  # lapsed, or the client is closed: they return without being given back
