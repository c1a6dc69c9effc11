"""Encoding a batch: CPU-seconds against memcpy of its bytes, and messages on the wire."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transferqueue
import zmq
from claims import at_most, figure, load_note, median, print_claim, ratio_of_medians
from measure.cpu_clock import Meanwhile
from measure.rounds import Round, in_turn
from queue_sides.batches import Rows, rows
from queue_sides.buffers import touched
from transferqueue.values.block import block_nbytes, write_block
from transferqueue.values.encode import plan_fields
from transferqueue.values.frame import layout

from .large import memcpy
from .sides import SAMPLES, Sides

PATCHES = 8
"""Rows of `patches`, on average, a sample: with the text, 1,536 arrays and about 14 MB."""
PAYLOAD_BYTES = 1 << 16
"""A message of so many bytes carries payload; questions and answers about the batch are shorter."""


def measure(sides: Sides) -> None:
    """Print the claims."""
    rounds, warm_up = (8, 2) if sides.quick else (30, 3)
    ragged = rows(SAMPLES, patches=PATCHES)
    batches = {
        "1,536 arrays": (ragged, 2.0),
        "text and dense images": (rows(sides.samples, images=True), 2.0),
        "text alone": (rows(SAMPLES), None),
    }
    for name, (batch, goal) in batches.items():
        others = Meanwhile()
        figures = in_turn({"ours": encode(batch), "memcpy": memcpy(batch.nbytes)}, rounds, warm_up)
        how = (
            f"{len(batch)} samples, {batch.nbytes / 1e6:.1f} MB; from the columns that a user gives to the "
            f"bytes of a block in warm memory, no checksum, as on one host; {rounds} rounds in turn, "
            f"medians of CPU-seconds; {load_note(others.others())}"
        )
        claim = f"encode of {name}, against memcpy of the same bytes"
        value = ratio_of_medians(figures["ours"]["cpu"], figures["memcpy"]["cpu"])
        print_claim(figure(claim, value, "x", how) if goal is None else at_most(claim, value, "x", goal, how))
        print_claim(figure(f"encode of {name}", median(figures["ours"]["cpu"]), "CPU-s", how))
    messages = messages_of_a_put(ragged)
    how = (
        f"{len(ragged)} samples x 6 fields, 1,536 arrays, {ragged.nbytes / 1e6:.1f} MB over zmq: parts of "
        f"each message of the put that carries payload, as sockets send them; most of {len(messages)}"
    )
    print_claim(at_most("frames of a message of a put", max(map(len, messages)), "frames", 3, how))
    print_claim(figure("messages that the payload of a put takes", len(messages), "messages", how))


def encode(batch: Rows) -> Round:
    """From fields to a block."""
    fields = batch.fields()
    _, plans = plan_fields(fields)
    out = touched(block_nbytes(layout(len(batch), plans)).nbytes)

    def once() -> dict[str, float]:
        begun = time.process_time()
        count, columns = plan_fields(fields)
        block = block_nbytes(layout(count, columns))
        write_block(out, 1, block, columns, checksum=False)
        return {"cpu": time.process_time() - begun}

    return once


def messages_of_a_put(batch: Rows) -> list[list[int]]:
    """Puts the batch over zmq; the bytes of each part of each message that carries payload."""
    fields = batch.fields()
    with transferqueue.serve() as server, transferqueue.connect(server, transport="zmq") as queue:
        partition = queue.partition("train", tasks={"train": ["tokens"]})
        with sent_messages() as messages:
            partition.put(fields)
    carrying = [parts for parts in messages if sum(parts) >= PAYLOAD_BYTES]
    sent = sum(sum(parts) for parts in carrying)
    if sent < batch.nbytes - PAYLOAD_BYTES:
        raise RuntimeError(f"messages of {sent} bytes went out for a batch of {batch.nbytes}")
    return carrying


@contextmanager
def sent_messages() -> Iterator[list[list[int]]]:
    """The bytes of each part of each message that any ZMQ socket of this process sends meanwhile."""
    messages: list[list[int]] = []
    parts: dict[int, list[int]] = {}
    send: Callable[..., Any] = zmq.Socket.send

    def counted(socket: "zmq.Socket[bytes]", data: Any, flags: int = 0, *rest: Any, **words: Any) -> Any:
        sent = send(socket, data, flags, *rest, **words)
        parts.setdefault(id(socket), []).append(memoryview(data).nbytes)
        if not flags & zmq.SNDMORE:
            messages.append(parts.pop(id(socket)))
        return sent

    zmq.Socket.send = counted  # type: ignore[method-assign]
    try:
        yield messages
    finally:
        zmq.Socket.send = send  # type: ignore[method-assign]
