"""Our side: a store of two storage units, a client that puts and another that gets."""

import os
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np
import transferqueue
from measure.cpu_clock import cpu_seconds
from queue_sides.batches import Rows


class Store:
    """A store with two connections of this process. A context manager that ends it, and raises when a part of
    it has ended before.

    Args:
        transport: of both clients; None: what the host offers.

    Attributes:
        server: the processes.
        writer, reader: the partition as each client sees it.
        pids: this process and those of the store: all that a put or get costs CPU in.
    """

    def __init__(self, transport: str | None = None) -> None:
        self._options: dict[str, Any] = {} if transport is None else {"transport": transport}
        self._exits = ExitStack()
        self._rounds = 0

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            self.server = exits.enter_context(transferqueue.serve(storage_units=2))
            self.pids = [os.getpid(), *(process.pid for process in self.server.processes)]
            writer, reader = (
                exits.enter_context(transferqueue.connect(self.server, **self._options)) for _ in range(2)
            )
            self.writer = writer.partition("train", tasks={"train": ["tokens"]})
            self.reader = reader.partition("train")
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = [process.pid for process in self.server.processes if process.poll() is not None]
        self._exits.close()
        if ended and error is None:
            raise RuntimeError(f"{len(ended)} processes of the store ended by themselves, so nothing counts")

    def round(self, batch: Rows) -> dict[str, float]:
        """Put the batch, get it by its ids, look at what came outside the clock, and free it.

        Returns:
            Seconds of `put` and `get`, and `cpu`-seconds of both in every process; seconds of a `copy` of
            what was read, which a user who writes to it makes.
        """
        self._rounds += 1
        batch.number(self._rounds * len(batch))
        fields = batch.fields()
        cpu, begun = cpu_seconds(self.pids), time.perf_counter()
        ids = self.writer.put(fields)
        put = time.perf_counter()
        columns = self.reader.get(ids)
        got, spent = time.perf_counter(), cpu_seconds(self.pids) - cpu
        copies = [column.values.copy() for column in columns.values()]
        copied = time.perf_counter() - got
        _compare(columns, batch, whole=self._rounds == 1)
        del columns, copies
        self.writer.drop(ids, "measured")
        return {"put": put - begun, "get": got - put, "cpu": spent, "copy": copied}


def _compare(columns: dict[str, Any], batch: Rows, *, whole: bool) -> None:
    tokens = columns["tokens"]
    found = {"tokens": tokens.values[tokens.offsets[:-1]]}
    expected = {"tokens": np.array([row[0] for row in batch.ragged["tokens"]])}
    if batch.images is not None:
        images = columns["pixel_values"].values.reshape(batch.images.shape)
        found["pixel_values"], expected["pixel_values"] = images[:, 0, 0, 0], batch.images[:, 0, 0, 0]
        if whole:
            found["every pixel"], expected["every pixel"] = images, batch.images
    if whole:
        for name, column in batch.ragged.items():
            found[f"all {name}"], expected[f"all {name}"] = columns[name].values, np.concatenate(column)
    wrong = [name for name in expected if not np.array_equal(found[name], expected[name])]
    if wrong:
        raise RuntimeError(f"the store gave back other values than it was given: {', '.join(wrong)}")
