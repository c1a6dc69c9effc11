"""Samplers: which of the ready samples a `get_meta` takes, and which of them count as consumed.

A sampler runs where `init` was called first, in the catalog's thread, and keeps its state there.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .balance import get_seqlen_balanced_partitions
from .errors import InvalidRequest

Chosen = tuple[list[int], list[int]]


class BaseSampler(ABC):
    """Base of samplers; a user's own implements `sample`.

    What `_states[partition_id][task_name][dp_rank][batch_index]` holds is served again to whoever asks for
    the same batch, also when nothing is ready.

    Attributes:
        by_rank: whether it keeps batches so. The workers of a loader then take a rank's batches in order.
    """

    by_rank = False

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Chosen:
        """Chooses among the samples that are ready and not consumed by the task.

        Args:
            ready_indexes: their global indexes, ascending.
            batch_size: how many are wanted.
            **kwargs: the ``sampling_config`` of the call, and ``partition``, whose
                ``get_custom_meta(indexes)`` gives the samples' tags.

        Returns:
            The indexes taken, and those that are consumed by it (usually the same; none to sample with
            replacement). Two empty lists: not enough yet.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Chosen:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether this ``dp_rank`` and ``batch_index`` were served before."""
        config = sampling_config or {}
        ranks = self._states.get(partition_id, {}).get(task_name, {})
        return config.get("dp_rank") is not None and config.get("batch_index") in ranks.get(
            config["dp_rank"], {}
        )

    def clear_cache(self, partition_id: str) -> None:
        """Forgets what was served of a partition, which is being cleared."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """What `load_checkpoint` needs; plain data."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Takes up the state that `save_checkpoint` gave."""
        self._states = state["_states"]

    def _served(self, partition_id: str, task_name: str, dp_rank: int) -> dict[Any, list[int]]:
        """Batches of a rank by ``batch_index``."""
        tasks = self._states.setdefault(partition_id, {})
        return tasks.setdefault(task_name, {}).setdefault(dp_rank, {})


class SequentialSampler(BaseSampler):
    """In order of the indexes; the default."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Chosen:
        chosen = list(ready_indexes[:batch_size])
        return chosen, chosen


class RankAwareSampler(BaseSampler):
    """In order, and the same batch for every process of a data-parallel rank: the first to ask for a
    ``batch_index`` gets the next samples, the others the same.
    """

    by_rank = True

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Chosen:
        """As `BaseSampler.sample`; the ``sampling_config`` has to name the rank, its batch and the task."""
        _check_rank(dp_rank)
        served = self._served(partition_id, task_name, dp_rank)
        if batch_index not in served:
            chosen = list(ready_indexes[:batch_size])
            if len(chosen) < batch_size:
                return [], []
            served[batch_index] = chosen
        return served[batch_index], served[batch_index]


class GRPOGroupNSampler(BaseSampler):
    """Whole groups: the ``n_samples_per_prompt`` answers of a prompt, put one after the other.

    A group is served when all of it is ready, and never mixed with another: the samples of a partition are
    counted in the order in which they were put, and each n of them are a group.
    """

    by_rank = True

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise InvalidRequest(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Chosen:
        """As `BaseSampler.sample`. With a ``dp_rank`` in the ``sampling_config``, the processes of a rank get
        the same batch for a ``batch_index``.

        Raises:
            InvalidRequest: `batch_size` is no multiple of the group's size.
        """
        dp_rank, batch_index = kwargs.get("dp_rank"), kwargs.get("batch_index")
        if self.has_cached_result(partition_id, task_name, kwargs):
            chosen = self._served(partition_id, task_name, kwargs["dp_rank"])[batch_index]
            return chosen, chosen
        n = self.n_samples_per_prompt
        if batch_size % n:
            raise InvalidRequest(f"batch_size {batch_size} is no multiple of n_samples_per_prompt {n}")
        chosen = _whole_groups(sorted(ready_indexes), n, batch_size // n, kwargs.get("partition"))
        if len(chosen) < batch_size:
            return [], []
        if dp_rank is not None:
            self._served(partition_id, task_name, dp_rank)[batch_index] = chosen
        return chosen, list(chosen)


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups, dealt to ``dp_size`` ranks so that their sums of ``total_lengths`` (a tag that every
    sample needs) are close. Every rank gets the same number of groups.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise InvalidRequest(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Chosen:
        """As `BaseSampler.sample`, with `batch_size` samples for each rank. The first rank to ask for a
        ``batch_index`` has the batches of all ranks dealt. The samples of all of them are consumed at once.
        """
        dp_rank, batch_index = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        _check_rank(dp_rank)
        if batch_index not in self._served(partition_id, task_name, 0):
            total = batch_size * self.dp_size
            partition = kwargs.get("partition")
            chosen, _ = super().sample(ready_indexes, total, task_name, partition_id, partition=partition)
            if not chosen:
                return [], []
            shares = self._deal(chosen, partition)
            for rank, share in enumerate(shares):
                self._served(partition_id, task_name, rank)[batch_index] = share
            mine = shares[dp_rank] if dp_rank < self.dp_size else []
            return mine, chosen
        mine = self._served(partition_id, task_name, dp_rank).get(batch_index, [])
        return mine, mine

    def _deal(self, chosen: list[int], partition: Any) -> list[list[int]]:
        n = self.n_samples_per_prompt
        groups = [chosen[start : start + n] for start in range(0, len(chosen), n)]
        if len(groups) % self.dp_size:
            raise InvalidRequest(
                f"{len(groups)} groups cannot be dealt to {self.dp_size} ranks alike; a rank's batch_size "
                f"must be a multiple of n_samples_per_prompt {n}"
            )
        tags = {} if partition is None else partition.get_custom_meta(chosen)
        weights = [sum(int(tags.get(at, {}).get("total_lengths", 1)) for at in group) for group in groups]
        shares = get_seqlen_balanced_partitions(weights, self.dp_size, equal_size=True)
        return [[at for group in share for at in groups[group]] for share in shares]


def _check_rank(dp_rank: int) -> None:
    if dp_rank < 0:
        raise InvalidRequest(f"dp_rank {dp_rank} must not be negative")


def _whole_groups(ready: Sequence[int], n: int, wanted: int, partition: Any) -> list[int]:
    """The first `wanted` whole groups; all of them that are there if they are fewer.

    Without a partition (a sampler called by hand), a group is a run of n consecutive indexes.
    """
    places = ready if partition is None else [partition.ordinal(at) for at in ready]
    chosen: list[int] = []
    start = 0
    while start + n <= len(ready) and len(chosen) < wanted * n:
        whole = places[start + n - 1] - places[start] == n - 1
        if whole and (partition is None or places[start] % n == 0):
            chosen += ready[start : start + n]
            start += n
        else:
            start += 1
    return chosen


_BUILT_IN = (SequentialSampler, RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler)
_NAMED = {sampler.__name__: sampler for sampler in _BUILT_IN}


def made(sampler: Any) -> BaseSampler:
    """The sampler that a configuration means: an instance, a class, or the name of one of this module.

    Raises:
        InvalidRequest: it is none of them.
    """
    if isinstance(sampler, str):
        if sampler not in _NAMED:
            raise InvalidRequest(
                f"there is no sampler {sampler!r}; pass one of {sorted(_NAMED)}, a class or an instance"
            )
        sampler = _NAMED[sampler]
    if isinstance(sampler, type) and issubclass(sampler, BaseSampler):
        sampler = sampler()
    if not isinstance(sampler, BaseSampler):
        raise InvalidRequest(
            f"controller.sampler is a {type(sampler).__name__}; pass a BaseSampler, a class of it or a name"
        )
    return sampler


def may_borrow(sampler: BaseSampler) -> bool:
    """Whether the list of ready samples can be lent to it, as it only reads: true of those of this module."""
    return type(sampler) in _BUILT_IN
