"""A producer and a consumer, each a process: samples a second, against the peer's."""

import time
from dataclasses import dataclass

import transferqueue
from claims import at_least, figure, load_note, median, print_claim, ratio_of_medians
from measure.child import Child
from measure.cpu_clock import Meanwhile
from measure.rounds import Round, in_turn

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
    """

    name: str
    batch: int
    images: bool
    samples: int
    peer_samples: int
    goal: float | None


STREAMS = (
    Stream("text, 32 at once", 32, False, 6400, 320, 20),
    Stream("text, 1 at once", 1, False, 1000, 60, None),
    Stream("text and images, 32 at once", 32, True, 640, 128, None),
)
QUICK_STREAMS = (Stream("text, 32 at once", 32, False, 1600, 160, 20),)


def measure(sides: Sides) -> None:
    """Print the claims."""
    rounds, warm_up = (2, 1) if sides.quick else (5, 1)
    peer, guest = sides.transfer_queue(), sides.transfer_queue_guest()
    with transferqueue.serve(storage_units=2) as server:
        producer, consumer = (sides.start("our_user.py", address=server.address) for _ in range(2))
        for stream in QUICK_STREAMS if sides.quick else STREAMS:
            others = Meanwhile()
            measured: dict[str, Round] = {"ours": ours(stream, producer, consumer)}
            if peer is not None and guest is not None:
                measured["peer"] = theirs(stream, peer, guest)
            figures = in_turn(measured, rounds, warm_up)
            rates = {side: found["rate"] for side, found in figures.items()}
            report(stream, rounds, rates, load_note(others.others()))
        producer.close()
        consumer.close()


def ours(stream: Stream, producer: Child, consumer: Child) -> Round:
    """A fresh partition a round; the producer closes it, which ends the consumer's loop."""
    made = 0

    def flow() -> dict[str, float]:
        nonlocal made
        made += 1
        partition = f"{stream.name} {made}"
        for child in (producer, consumer):
            child.ask(
                ANSWER_SECONDS, do="open", partition=partition, images=stream.images, batch=stream.batch
            )
        return {"rate": rate(stream, stream.samples, partition, producer, consumer)}

    return flow


def theirs(stream: Stream, producer: Child, consumer: Child) -> Round:
    """The same; what was moved is forgotten outside the clock."""
    made = 0

    def flow() -> dict[str, float]:
        nonlocal made
        made += 1
        partition = f"{stream.name} {made}"
        found = rate(stream, stream.peer_samples, partition, producer, consumer)
        producer.ask(ANSWER_SECONDS, do="clear", partition=partition)
        return {"rate": found}

    return flow


def rate(stream: Stream, samples: int, partition: str, producer: Child, consumer: Child) -> float:
    """Samples a second, from the moment both begin to when the consumer has the last."""
    at = time.monotonic() + BEFORE_SECONDS
    shape = {"partition": partition, "samples": samples, "batch": stream.batch, "images": stream.images}
    consumer.tell(do="consume", at=at, **shape)
    producer.tell(do="produce", at=at, **shape)
    seconds = consumer.answer(ANSWER_SECONDS)["seconds"]
    producer.answer(ANSWER_SECONDS)
    return samples / seconds


def report(stream: Stream, rounds: int, rates: dict[str, list[float]], load: str) -> None:
    """The claims of one stream."""
    how = (
        f"producer and consumer two processes, put and fetch {stream.batch} samples at once, acked; "
        f"{stream.samples} samples a round, the peer's {stream.peer_samples}; {rounds} rounds in turn; "
        f"medians; {load}"
    )
    if "peer" in rates:
        value = ratio_of_medians(rates["ours"], rates["peer"])
        claim = f"streaming, {stream.name}: times the rate of {TRANSFER_QUEUE}"
        print_claim(
            figure(claim, value, "x", how)
            if stream.goal is None
            else at_least(claim, value, "x", stream.goal, how)
        )
    for side, name in (("ours", "ours"), ("peer", TRANSFER_QUEUE)):
        if side in rates:
            print_claim(figure(f"streaming, {stream.name}: {name}", median(rates[side]), "samples/s", how))
