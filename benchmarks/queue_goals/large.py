"""The large batch on one host: put and get against memcpy, the peer, Ray and Redis."""

import time
from collections.abc import Sequence

import numpy as np
from claims import at_least, figure, load_note, median, print_claim, ratio_of_medians
from measure.child import Child
from measure.cpu_clock import Meanwhile
from measure.rounds import Figures, Round, in_turn
from queue_sides.batches import Rows, rows
from queue_sides.buffers import touched

from .sides import TRANSFER_QUEUE, Sides
from .store import Store

ANSWER_SECONDS = 60.0


def measure(sides: Sides) -> None:
    """Print the claims."""
    batch = rows(sides.samples, images=True)
    others = Meanwhile()
    with Store() as store:
        measured: dict[str, Round] = {
            "ours": lambda: store.round(batch),
            "memcpy": memcpy(batch.nbytes),
        }
        peer, ray, redis = sides.transfer_queue(), sides.ray(), sides.redis()
        if peer is not None:
            measured["peer"] = asked(peer, container="dense")
            measured["peer, rows"] = asked(peer, container="rows")
        if ray is not None:
            measured["ray"] = asked(ray)
        if redis is not None:
            measured["redis"] = asked(redis)
        rounds, warm_up = (4, 2) if sides.quick else (12, 3)
        figures = in_turn(measured, rounds, warm_up)
    sides.end_ray()
    report(batch, rounds, figures, load_note(others.others()))


def memcpy(nbytes: int) -> Round:
    """Copies so many bytes from one buffer to another, both touched before."""
    source, target = touched(nbytes), touched(nbytes)

    def copy() -> dict[str, float]:
        begun, cpu = time.perf_counter(), time.process_time()
        np.copyto(target, source)
        return {"copy": time.perf_counter() - begun, "cpu": time.process_time() - cpu}

    return copy


def asked(child: Child, **words: str) -> Round:
    """A round that a child does."""
    return lambda: child.ask(ANSWER_SECONDS, do="bulk", **words)


def report(batch: Rows, rounds: int, figures: dict[str, Figures], load: str) -> None:
    """The claims of what was measured."""
    size = f"{len(batch)} samples x 6 fields, {batch.nbytes / 1e6:.0f} MB"
    how = (
        f"{size}: five ragged text fields as one array a sample, images as one dense array; {rounds} rounds, "
        f"all sides in turn; medians; {load}"
    )
    ours, copies = figures["ours"], figures["memcpy"]["copy"]
    both = [put + get for put, get in zip(ours["put"], ours["get"], strict=True)]
    print_claim(
        at_least(
            "large batch: put + get, as a share of memcpy's speed",
            1 / ratio_of_medians(both, copies),
            "x",
            0.5,
            f"{how}; seconds of one memcpy of those bytes, warm, over seconds of a put from one client and a "
            "get by another: in with one copy, out as views with none",
        )
    )
    print_claim(
        figure(
            "large batch: put + get, as a share of memcpy's speed by CPU",
            ratio_of_medians(figures["memcpy"]["cpu"], ours["cpu"]),
            "x",
            f"{how}; CPU-seconds, ours of every process of the store and the client",
        )
    )
    for call, goal in (("put", 10), ("get", 20)):
        if "peer" in figures:
            print_claim(
                at_least(
                    f"large batch: {call}, times as fast as {TRANSFER_QUEUE}",
                    ratio_of_medians(figures["peer"][call], ours[call]),
                    "x",
                    goal,
                    f"{how}; its tensordict built beforehand, images dense; its get without its get_meta",
                )
            )
    print_claim(figure("large batch: memcpy", median(copies), "s", how))
    named: list[tuple[str, str, Sequence[str], str]] = [
        ("ours", "ours", ("put", "get", "copy"), "get: read-only views; copy: writable ones, on top"),
        ("ours", "ours", ("cpu",), "put + get, every process of the store and the client"),
        ("peer", TRANSFER_QUEUE, ("put", "get"), "jagged text, dense images"),
        ("peer, rows", f"{TRANSFER_QUEUE}, a tensor a row", ("put", "get"), "its quickest container here"),
        ("ray", "ray.put/get", ("put", "get", "copy"), "get: read-only views; copy: writable ones, on top"),
        (
            "redis",
            "Redis",
            ("put", "get"),
            "one MSET and one MGET of 1 value a sample and field, Unix socket",
        ),
    ]
    for side, name, shown, note in named:
        for what in shown if side in figures else ():
            unit = "CPU-s" if what == "cpu" else "s"
            print_claim(
                figure(f"large batch: {name}, {what}", median(figures[side][what]), unit, f"{how}; {note}")
            )
