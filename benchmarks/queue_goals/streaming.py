"""A producer and a consumer, each a process: samples a second, against the peer's."""

import time
from dataclasses import dataclass

import transferqueue
from claims import at_least, figure, load_note, median, print_claim, ratio_of_medians
from measure.child import Child
from measure.cpu_clock import Meanwhile, cpu_seconds
from measure.rounds import Figures, Round, in_turn

from .sides import TRANSFER_QUEUE, Sides

ANSWER_SECONDS = 120.0
BEFORE_SECONDS = 0.2
"""From telling both processes when to begin, to that moment."""


@dataclass(frozen=True)
class Stream:
    """What flows.

    Attributes:
        name: in the claims.
        batch: samples a put, and a fetch.
        images: with the dense images.
        samples: of ours in a round; the peer, which is slower, moves `peer_samples`.
        goal: times the peer's rate, None for a figure.
        dataset: whether the peer's own streaming dataset is measured, too.
    """

    name: str
    batch: int
    images: bool
    samples: int
    peer_samples: int
    goal: float | None
    dataset: bool = False


STREAMS = (
    Stream("text, 32 at once", 32, False, 6400, 640, 20, dataset=True),
    Stream("text, 1 at once", 1, False, 1000, 60, None),
    Stream("text and images, 32 at once", 32, True, 640, 128, None),
)
QUICK_STREAMS = (Stream("text, 32 at once", 32, False, 1600, 160, 20),)


def measure(sides: Sides) -> None:
    """Print the claims."""
    rounds, warm_up = (2, 1) if sides.quick else (5, 1)
    peer, guest = sides.transfer_queue(), sides.transfer_queue_guest()
    with (
        transferqueue.serve(storage_units=2) as server,
        sides.child("our_user.py", address=server.address) as producer,
        sides.child("our_user.py", address=server.address) as consumer,
    ):
        for stream in QUICK_STREAMS if sides.quick else STREAMS:
            others = Meanwhile()
            parts = {
                "producer": [producer.pid],
                "consumer": [consumer.pid],
                "controller": [server.processes[0].pid],
                "storage units": [process.pid for process in server.processes[1:]],
            }
            measured: dict[str, Round] = {"ours": ours(stream, producer, consumer, parts)}
            if peer is not None and guest is not None:
                measured["peer"] = theirs(stream, peer, guest)
                if stream.dataset:
                    measured["peer's dataset"] = theirs(stream, peer, guest, dataset=True)
            figures = in_turn(measured, rounds, warm_up)
            report(stream, rounds, figures, load_note(others.others()))


def ours(stream: Stream, producer: Child, consumer: Child, parts: dict[str, list[int]]) -> Round:
    """A fresh partition a round; the producer closes it, which ends the consumer's loop. Beside the rate,
    CPU-seconds of a batch by part.
    """
    made = 0

    def flow() -> dict[str, float]:
        nonlocal made
        made += 1
        partition = f"{stream.name} {made}"
        for child in (producer, consumer):
            child.ask(
                ANSWER_SECONDS, do="open", partition=partition, images=stream.images, batch=stream.batch
            )
        before = {part: cpu_seconds(pids) for part, pids in parts.items()}
        found = rate(stream, stream.samples, partition, producer, consumer)
        spent = {part: cpu_seconds(pids) - before[part] for part, pids in parts.items()}
        batches = stream.samples / stream.batch
        return {"rate": found} | {part: seconds / batches for part, seconds in spent.items()}

    return flow


def theirs(stream: Stream, producer: Child, consumer: Child, *, dataset: bool = False) -> Round:
    """The same, the consumer by the client's calls or by its dataset; what was moved is forgotten outside the
    clock.
    """
    made = 0

    def flow() -> dict[str, float]:
        nonlocal made
        made += 1
        partition = f"{stream.name} {made} {dataset}"
        found = rate(stream, stream.peer_samples, partition, producer, consumer, dataset=dataset)
        producer.ask(ANSWER_SECONDS, do="clear", partition=partition)
        return {"rate": found}

    return flow


def rate(
    stream: Stream, samples: int, partition: str, producer: Child, consumer: Child, **options: bool
) -> float:
    """Samples a second, from the moment both begin to when the consumer has the last."""
    at = time.monotonic() + BEFORE_SECONDS
    shape = {"partition": partition, "samples": samples, "batch": stream.batch, "images": stream.images}
    consumer.tell(do="consume", at=at, **shape, **options)
    producer.tell(do="produce", at=at, **shape)
    seconds = consumer.answer(ANSWER_SECONDS)["seconds"]
    producer.answer(ANSWER_SECONDS)
    return samples / seconds


def report(stream: Stream, rounds: int, figures: dict[str, Figures], load: str) -> None:
    """The claims of one stream."""
    rates = {side: found.pop("rate") for side, found in figures.items()}
    how = (
        f"producer and consumer two processes, put and fetch {stream.batch} samples at once, acked; "
        f"{stream.samples} samples a round, the peer's {stream.peer_samples}; {rounds} rounds in turn; "
        f"medians; {load}"
    )
    names = {
        "peer": f"{TRANSFER_QUEUE}, its client polled every millisecond",
        "peer's dataset": f"{TRANSFER_QUEUE}, its StreamingDataset",
    }
    for side, name in names.items():
        if side in rates:
            value = ratio_of_medians(rates["ours"], rates[side])
            claim = f"streaming, {stream.name}: times the rate of {name}"
            print_claim(
                figure(claim, value, "x", how)
                if stream.goal is None
                else at_least(claim, value, "x", stream.goal, how)
            )
    for side, name in (("ours", "ours"), *names.items()):
        if side in rates:
            print_claim(figure(f"streaming, {stream.name}: {name}", median(rates[side]), "samples/s", how))
    parts = {part: median(seconds) for part, seconds in figures["ours"].items()}
    shown = ", ".join(f"{part} {1e6 * seconds:.0f}" for part, seconds in parts.items())
    batch = f"streaming, {stream.name}: CPU of a batch, ours"
    print_claim(figure(batch, sum(parts.values()), "CPU-s", f"{how}; in microseconds: {shown}"))
