"""The PyPI package `transferqueue`, through its own client: `put`, `get_meta`, `get_data`.

    python transfer_queue_peer.py '{"folder": SHORT_PATH, "samples": N}'      starts Ray and the queue
    python transfer_queue_peer.py '{"address": "HOST:PORT"}'                  a second process of the same

What it is given for its best: batches as tensordicts that are built beforehand (jagged nested tensors, dense
images); reads by the metadata that the put returned; its controller in polling mode, where a read of what is
not there returns at once (else it sleeps for 5 s), and a consumer that asks again after a millisecond (its
`StreamingDataset`, which is measured too, does so after a second); nothing logged. What was read is cleared
outside the clock.
"""

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

os.environ |= {"TQ_NUM_THREADS": str(len(os.sched_getaffinity(0))), "TQ_LOGGING_LEVEL": "ERROR"}
os.environ["RAY_AUTH_MODE"] = "disabled"  # both processes have to agree
os.environ.pop("RAY_ADDRESS", None)

import ray
import torch
import transfer_queue  # pyright: ignore[reportMissingImports] - lives in the environment of `make bench-peers`
from answering import answer, work
from batches import TEXT, Rows, rows, small
from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports] - as transfer_queue
from tensordict import TensorDict  # pyright: ignore[reportMissingImports] - as transfer_queue
from tensordict.tensorclass import NonTensorStack  # pyright: ignore[reportMissingImports] - as transfer_queue

AGAIN_SECONDS = 0.001
"""Between two looks of a consumer that found nothing."""
POOL = 8
"""Batches that a producer puts again and again."""


def main() -> None:
    words = work()
    guest = "address" in words
    if guest:
        ray.init(address=words["address"], log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(
            num_cpus=len(os.sched_getaffinity(0)) + 2,  # its actors ask for a CPU each
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=200 << 20,
            _temp_dir=words["folder"],
        )
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    side = Side(transfer_queue.get_client())
    handlers = {"produce": side.produce, "consume": side.consume, "clear": side.clear}
    if not guest:
        handlers |= {"bulk": Bulk(side, words["samples"]).round, "small": side.small}
    answer(handlers, {"address": ray.get_runtime_context().gcs_address})
    if not guest:
        transfer_queue.close()
    ray.shutdown()


class Side:
    """What one process does."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._pools: dict[tuple[int, bool], list[Any]] = {}

    def produce(self, partition: str, samples: int, batch: int, images: bool, at: float) -> dict[str, float]:
        """Put numbered samples, `batch` a put, from the moment `at` on."""
        pool = self._pool(batch, images)
        _wait_until(at)
        for turn, first in enumerate(range(0, samples, batch)):
            data = pool[turn % POOL]
            _number(data, first)
            self.client.put(data, partition_id=partition)
        return {"seconds": time.monotonic() - at}

    def consume(
        self, partition: str, samples: int, batch: int, images: bool, at: float, dataset: bool
    ) -> dict[str, float]:
        """Take `samples`, `batch` at once, by the client's calls or by the streaming dataset; raises unless
        each came exactly once.
        """
        fields = [*TEXT, *(["pixel_values"] if images else [])]
        flow = (_dataset if dataset else self._calls)(partition, batch, fields)
        numbers: list[int] = []
        _wait_until(at)
        while len(numbers) < samples:
            numbers += [int(tokens[0]) for tokens in next(flow)["tokens"].unbind()]
        seconds = time.monotonic() - at
        if sorted(numbers) != list(range(samples)):
            raise RuntimeError(f"{len(set(numbers))} of {samples} samples came")
        return {"seconds": seconds}

    def clear(self, partition: str) -> dict[str, float]:
        """Forget a partition."""
        self.client.clear_partition(partition)
        return {}

    def small(self, calls: int) -> dict[str, list[float]]:
        """One small sample at a time."""
        data = _jagged(small())
        puts: list[float] = []
        gets: list[float] = []
        for _ in range(calls):
            begun = time.perf_counter()
            meta = self.client.put(data, partition_id="small")
            put = time.perf_counter()
            self.client.get_data(meta)
            gets.append(time.perf_counter() - put)
            puts.append(put - begun)
            self.client.clear_samples(meta)
        return {"put": puts, "get": gets}

    def _calls(self, partition: str, batch: int, fields: list[str]) -> Iterator[Any]:
        while True:
            meta = self.client.get_meta(
                data_fields=fields, batch_size=batch, partition_id=partition, mode="fetch", task_name="train"
            )
            if meta.size:
                yield self.client.get_data(meta)
            else:
                time.sleep(AGAIN_SECONDS)

    def _pool(self, batch: int, images: bool) -> list[Any]:
        if (batch, images) not in self._pools:
            built = rows(batch * POOL, images=images)
            parts = [_part(built, first, batch) for first in range(0, batch * POOL, batch)]
            self._pools[batch, images] = [_jagged(part) for part in parts]
        return self._pools[batch, images]


class Bulk:
    """The large batch, in two containers."""

    def __init__(self, side: Side, samples: int) -> None:
        self._client = side.client
        batch = rows(samples, images=True)
        self._bytes_of_one = batch.images[0].nbytes if batch.images is not None else 0
        self._containers: dict[str, Any] = {"dense": _jagged(batch), "rows": _rows(batch)}

    def round(self, container: str) -> dict[str, float]:
        """Put it, get it, clear it."""
        data = self._containers[container]
        begun = time.perf_counter()
        meta = self._client.put(data, partition_id="bulk")
        put = time.perf_counter()
        read = self._client.get_data(meta)
        got = time.perf_counter()
        images = read["pixel_values"]
        if images.shape[0] != data.batch_size[0] or images[0].numel() * 4 != self._bytes_of_one:
            raise RuntimeError(f"put {data.batch_size[0]} images, read {images.shape[0]}")
        del read, images
        self._client.clear_samples(meta)
        return {"put": put - begun, "get": got - put}


def _dataset(partition: str, batch: int, fields: list[str]) -> Iterator[Any]:
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    dataset = transfer_queue.StreamingDataset(
        config=ray.get(controller.get_config.remote()),
        batch_size=batch,
        micro_batch_size=batch,
        data_fields=fields,
        partition_id=partition,
        task_name="train",
        dp_rank=0,
    )
    return (data for data, _ in dataset)


def _part(whole: Rows, first: int, count: int) -> Rows:
    images = None if whole.images is None else whole.images[first : first + count]
    return Rows({name: column[first : first + count] for name, column in whole.ragged.items()}, images)


def _jagged(batch: Rows) -> Any:
    columns: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([torch.from_numpy(row) for row in column], layout=torch.jagged)
        for name, column in batch.ragged.items()
    }
    if batch.images is not None:
        columns["pixel_values"] = torch.from_numpy(batch.images)
    return TensorDict(columns, batch_size=len(batch))


def _rows(batch: Rows) -> Any:
    columns: dict[str, Any] = {
        name: NonTensorStack(*(torch.from_numpy(row) for row in column))
        for name, column in batch.fields().items()
    }
    return TensorDict(columns, batch_size=len(batch))


def _number(data: Any, first: int) -> None:
    tokens = data["tokens"]
    count = len(tokens.offsets()) - 1
    tokens.values()[tokens.offsets()[:-1]] = torch.arange(first, first + count)


def _wait_until(at: float) -> None:
    time.sleep(max(at - time.monotonic(), 0.0))


if __name__ == "__main__":
    main()
