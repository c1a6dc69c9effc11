"""`StreamingDataset` and `StreamingDataLoader`: batches as they become ready, the same ones for every process
of a data-parallel rank. Needs torch and tensordict.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from .batch_metadata import BatchMeta
from .client import TransferQueueClient
from .errors import InvalidRequest
from .tensors import tensordict

_NEWS_SECONDS = 0.5  # how late a worker sees that the loop which it feeds was left


class StreamingDataset(IterableDataset):
    """Iterates over micro-batches of one task: pairs of a TensorDict and its `BatchMeta`.

    In a `DataLoader` with several workers, worker w of n takes the rank's batches w, w + n, ...: none comes
    twice, and they come in order.

    Args:
        config: what `init` returned, in this process or another.
        batch_size: samples taken at once.
        micro_batch_size: samples of what it yields; the last of a batch may have fewer.
        data_fields: which fields.
        partition_id: where from.
        task_name: for which task.
        dp_rank: which data-parallel rank's batches, with `RankAwareSampler` and others that go by it.
        should_check_consumption_status: end when the task has consumed all samples of the partition (those
            that ``TQ_PRE_ALLOC_SAMPLE_NUM`` announces among them); otherwise it waits for more for ever.
        fetch_batch_fn: in place of `default_fetch_batch_fn`.
        process_batch_fn: in place of `chunk_batch_fn`.

    Attributes:
        buffer: batches taken so far, so that `reset` can start over with the same.
        batch_index: position in `buffer` of the next batch.
        ended: not 0 ends the worker processes of a loader, which share it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        batch_size: int,
        micro_batch_size: int,
        data_fields: Sequence[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        if micro_batch_size < 1 or batch_size < 1:
            raise InvalidRequest(f"batch sizes must be positive, got {batch_size} and {micro_batch_size}")
        if not data_fields:
            raise InvalidRequest("data_fields is empty; name at least one field")
        if dp_rank < 0:
            raise InvalidRequest(f"dp_rank {dp_rank} must not be negative")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = list(data_fields)
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer: list[tuple[Any, BatchMeta]] = []
        self.batch_index = 0
        self.ended = torch.zeros(1, dtype=torch.uint8).share_memory_()  # workers see when the loop is left
        self._client: tuple[int, TransferQueueClient] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}  # a worker process connects by itself

    def _connected(self) -> TransferQueueClient:
        if self._client is None or self._client[0] != os.getpid():
            info = self.config["controller"]["zmq_info"]
            self._client = os.getpid(), TransferQueueClient(f"StreamingDataset-{os.getpid()}", info)
        return self._client[1]

    def close(self) -> None:
        """Disconnects: the batches taken count as consumed. Idempotent; iterating again connects anew."""
        client, self._client = self._client, None
        if client is not None and client[0] == os.getpid():
            client[1].close()

    def __iter__(self) -> Iterator[Any]:
        client = self._connected()
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while worker is None or not self.ended.item():
            if self.batch_index < len(self.buffer):
                batch, meta = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(batch, meta, micro_batch_size=self.micro_batch_size)
                continue
            index = start + step * self.batch_index
            if self._ended(client, index):
                return
            seen = client.changes(self.partition_id)
            if step > 1 and not client.in_turn(*self._batch_of(index)):
                client.changes(self.partition_id, seen, _NEWS_SECONDS)
                continue
            batch, meta = self.fetch_batch_fn(
                tq_client=client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=index,
            )
            if batch is not None:
                self.buffer.append((batch, meta))
            elif not self._ended(client, index):
                client.changes(self.partition_id, seen, _NEWS_SECONDS)

    def _ended(self, client: TransferQueueClient, index: int) -> bool:
        return self.should_check_consumption_status and client.drained(*self._batch_of(index))

    def _batch_of(self, index: int) -> tuple[str, str, dict[str, Any]]:
        return self.partition_id, self.task_name, self.sampling_config | {"batch_index": index}

    def reset(self) -> None:
        """Starts over with the batches taken so far."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Goes on with another partition, and forgets the batches taken."""
        self.buffer = []
        self.batch_index = 0
        self.partition_id = partition_id


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: Sequence[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[Any, BatchMeta]:
    """The next batch and its metadata; None in place of the batch if there is not enough."""
    config = dict(sampling_config) | {"batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(
        data_fields=data_fields,
        batch_size=batch_size,
        partition_id=partition_id,
        task_name=task_name,
        sampling_config=config,
    )
    return (tq_client.get_data(meta) if meta.size else None), meta


def chunk_batch_fn(td: Any, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[tuple[Any, BatchMeta]]:
    """Micro-batches of consecutive samples, each with its metadata; the last may have fewer.

    Raises:
        TypeError: `td` is no TensorDict.
        InvalidRequest: `micro_batch_size` is not positive, or larger than the batch.
    """
    kind = tensordict().TensorDict
    if not isinstance(td, kind):
        raise TypeError(f"a TensorDict is expected, got a {type(td).__name__}")
    if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise InvalidRequest(f"micro_batch_size must be a positive integer, got {micro_batch_size!r}")
    if not td.batch_size:
        raise InvalidRequest("the TensorDict has no batch dimension")
    rows = int(td.batch_size[0])
    if micro_batch_size > rows:
        raise InvalidRequest(f"micro_batch_size {micro_batch_size} exceeds the batch of {rows}")
    nested = {
        name: value for name, value in td.items() if isinstance(value, torch.Tensor) and value.is_nested
    }
    dense = td.exclude(*nested)
    unbound = {name: value.unbind() for name, value in nested.items()}
    chunks = []
    for start in range(0, rows, micro_batch_size):
        stop = min(start + micro_batch_size, rows)
        chunk = dense[start:stop] if len(dense.keys()) else kind({}, batch_size=[stop - start])
        for name, tensors in unbound.items():
            chunk[name] = torch.nested.as_nested_tensor(list(tensors[start:stop]), layout=nested[name].layout)
        chunks.append((chunk, batch_meta[start:stop]))
    return chunks


def _unchanged(data: Any) -> Any:
    return data


class StreamingDataLoader(DataLoader):
    """A torch `DataLoader` over a `StreamingDataset`, which makes the batches itself."""

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[..., Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        self._streaming = dataset
        super().__init__(
            dataset=dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _unchanged,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    def __iter__(self) -> Any:
        self._streaming.ended.zero_()
        batches = super().__iter__()
        try:
            yield from batches
        finally:
            self._streaming.ended.fill_(1)  # before the workers are joined: they may be waiting for more
            del batches

    def reset(self) -> None:
        """See `StreamingDataset.reset`."""
        self._streaming.reset()

    def step(self, partition_id: str) -> None:
        """See `StreamingDataset.step`."""
        self._streaming.step(partition_id)

    def get_buffer(self) -> list[tuple[Any, BatchMeta]]:
        """The batches that the dataset of this process has taken so far."""
        return self._streaming.buffer
