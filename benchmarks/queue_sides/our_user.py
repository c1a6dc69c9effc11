"""A producer or a consumer of ours, with a connection of its own.

python our_user.py '{"address": ADDRESS}'
"""

import time

import transferqueue
from answering import answer, work
from batches import TEXT, Rows, rows

POOL = 8
"""Batches that a producer puts again and again."""


def main() -> None:
    with transferqueue.connect(work()["address"]) as queue:
        side = Side(queue)
        answer({"open": side.open, "produce": side.produce, "consume": side.consume})


class Side:
    """What one process does."""

    def __init__(self, queue: transferqueue.Client) -> None:
        self._queue = queue
        self._pools: dict[tuple[int, bool], list[Rows]] = {}
        self._partitions: dict[str, transferqueue.Partition] = {}

    def open(self, partition: str, images: bool, batch: int) -> dict[str, float]:
        """Open the partition and build what will be put, before the clock runs."""
        fields = [*TEXT, *(["pixel_values"] if images else [])]
        self._partitions[partition] = self._queue.partition(partition, tasks={"train": fields})
        if (batch, images) not in self._pools:
            self._pools[batch, images] = [rows(batch, images=images) for _ in range(POOL)]
        return {}

    def produce(self, partition: str, samples: int, batch: int, images: bool, at: float) -> dict[str, float]:
        """Put numbered samples, `batch` a put, from the moment `at` on; then close the stream."""
        pool, stream = self._pools[batch, images], self._partitions[partition]
        time.sleep(max(at - time.monotonic(), 0.0))
        for turn, first in enumerate(range(0, samples, batch)):
            data = pool[turn % POOL]
            data.number(first)
            stream.put(data.fields())
        stream.close()
        return {"seconds": time.monotonic() - at}

    def consume(self, partition: str, samples: int, batch: int, images: bool, at: float) -> dict[str, float]:
        """Take `samples`, `batch` at once, and ack them; raises unless each came exactly once."""
        numbers: list[int] = []
        time.sleep(max(at - time.monotonic(), 0.0))
        for taken in self._partitions[partition].stream("train", batch_size=batch, prefetch=1):
            tokens = taken["tokens"]
            numbers += tokens.values[tokens.offsets[:-1]].tolist()
            if images and len(taken["pixel_values"]) != len(tokens):
                raise RuntimeError(f"{len(tokens)} rows of tokens, {len(taken['pixel_values'])} of images")
            taken.ack()
        seconds = time.monotonic() - at
        if sorted(numbers) != list(range(samples)):
            raise RuntimeError(f"{len(set(numbers))} of {samples} samples came")
        return {"seconds": seconds}


if __name__ == "__main__":
    main()
