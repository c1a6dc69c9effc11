"""A fetch costs the same with a thousand samples ready and with a million."""

import time

import numpy as np
import transferqueue
from claims import at_most, figure, load_note, median, print_claim, ratio_of_medians
from measure.cpu_clock import Meanwhile, cpu_seconds
from measure.rounds import Round, in_turn

from .sides import Sides

DEPTHS = (1_000, 100_000, 1_000_000)
QUICK_DEPTHS = (1_000, 100_000)
BLOCK = 1024
"""Samples of a put; what a round takes is put back in one."""
BATCH = 32


def measure(sides: Sides) -> None:
    """Print the claims."""
    depths = QUICK_DEPTHS if sides.quick else DEPTHS
    rounds, warm_up = (6, 1) if sides.quick else (20, 2)
    others = Meanwhile()
    with transferqueue.serve(storage_units=2) as server, transferqueue.connect(server) as queue:
        controller = server.processes[0].pid
        begun = time.perf_counter()
        partitions = {depth: filled(queue, depth) for depth in depths}
        building = time.perf_counter() - begun
        figures = in_turn(
            {str(depth): fetches(partition, controller) for depth, partition in partitions.items()},
            rounds,
            warm_up,
        )
    size = f"{BATCH} of {', '.join(f'{depth:,}' for depth in depths)} ready samples, partitions of one store"
    how = (
        f"{size}; {rounds} rounds of {BLOCK // BATCH} fetches in turn, acked and put back off the clock; "
        f"median of the rounds' medians; {load_note(others.others())}"
    )
    shallow, *deep = (figures[str(depth)] for depth in depths)
    print_claim(
        at_most(
            f"fetch of {BATCH}: deepest against shallowest",
            max(ratio_of_medians(figures["fetch"], shallow["fetch"]) for figures in deep),
            "x",
            1.3,
            f"{how}; the worst of the depths over the first",
        )
    )
    for depth in depths:
        at = f"at {depth:,} samples"
        print_claim(figure(f"fetch of {BATCH} {at}", median(figures[str(depth)]["fetch"]), "s", how))
        cpu = median(figures[str(depth)]["cpu"])
        print_claim(figure(f"fetch of {BATCH} and ack {at}: controller's CPU", cpu, "CPU-s", how))
        put = median(figures[str(depth)]["put"])
        print_claim(figure(f"put of {BLOCK} scalars {at}", put, "s", how))
    total = sum(depths)
    print_claim(figure(f"putting {total:,} samples, {BLOCK} a put", building, "s", "each partition once"))


def filled(queue: transferqueue.Client, depth: int) -> transferqueue.Partition:
    """A partition with at least `depth` samples ready, and one block more, which a round may take."""
    partition = queue.partition(f"depth-{depth}", tasks={"train": ["reward"]})
    for _ in range(-(-depth // BLOCK) + 1):
        partition.put({"reward": np.zeros(BLOCK, np.float32)})
    return partition


def fetches(partition: transferqueue.Partition, controller: int) -> Round:
    """Takes one block, `BATCH` at a time, and puts it back."""

    def block() -> dict[str, float]:
        seconds: list[float] = []
        cpu = cpu_seconds([controller])
        for _ in range(BLOCK // BATCH):
            begun = time.perf_counter()
            batch = partition.fetch("train", BATCH)
            seconds.append(time.perf_counter() - begun)
            batch.ack()
        spent = (cpu_seconds([controller]) - cpu) / len(seconds)
        begun = time.perf_counter()
        partition.put({"reward": np.zeros(BLOCK, np.float32)})
        return {"fetch": median(seconds), "cpu": spent, "put": time.perf_counter() - begun}

    return block
