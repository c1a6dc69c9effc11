"""One small put and one small get, against a bare ZMQ round trip and a Redis SET."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from claims import at_most, figure, load_note, median, print_claim, ratio_of_medians
from measure.child import Child
from measure.cpu_clock import Meanwhile, cpu_seconds
from measure.rounds import Figures, Round, in_turn
from queue_sides.batches import small

from .sides import TRANSFER_QUEUE, Sides
from .store import Store

NBYTES = small().nbytes
CALLS = 100
"""Calls of a side in a round."""
PEER_CALLS = 20
ANSWER_SECONDS = 60.0


def measure(sides: Sides) -> None:
    """Print the claims."""
    path = str(sides.folder / "echo")
    rounds, warm_up = (5, 1) if sides.quick else (20, 2)
    others = Meanwhile()
    with (
        Store() as store,
        sides.child("zmq_echo.py", ipc=path) as echo,
        zmq.Context() as context,
        context.socket(zmq.REQ) as tcp,
        context.socket(zmq.REQ) as ipc,
    ):
        tcp.connect(echo.ready["tcp"])
        ipc.connect(f"ipc://{path}")
        measured: dict[str, Round] = {
            "ours": lambda: ours(store),
            "zmq": lambda: round_trips(tcp),
            "zmq ipc": lambda: round_trips(ipc),
        }
        redis = sides.redis()
        if redis is not None:
            measured["redis"] = lambda: by_medians(redis, CALLS, nbytes=NBYTES)
        peer = None if sides.quick else sides.transfer_queue()
        if peer is not None:
            measured["peer"] = lambda: by_medians(peer, PEER_CALLS)
        figures = in_turn(measured, rounds, warm_up)
    report(rounds, figures, load_note(others.others()))


def ours(store: Store) -> dict[str, float]:
    """One sample a put, then one a get."""
    sample = small().fields()
    cpu = cpu_seconds(store.pids)
    ids: list[Any] = []
    puts = timed(CALLS, lambda at: ids.append(store.writer.put(sample)))
    between = cpu_seconds(store.pids)
    gets = timed(CALLS, lambda at: store.reader.get(ids[at]))
    after = cpu_seconds(store.pids)
    store.writer.drop([int(one[0]) for one in ids], "measured")
    return {
        "put": median(puts),
        "get": median(gets),
        "put cpu": (between - cpu) / CALLS,
        "get cpu": (after - between) / CALLS,
    }


def round_trips(request: "zmq.Socket[bytes]") -> dict[str, float]:
    """A message there and back."""
    message = bytes(NBYTES)

    def call(_: int) -> None:
        request.send(message)
        request.recv()

    return {"trip": median(timed(CALLS, call))}


def by_medians(child: Child, calls: int, **words: int) -> dict[str, float]:
    """The median of each list that a child answers with."""
    answer = child.ask(ANSWER_SECONDS, do="small", calls=calls, **words)
    return {name: median(seconds) for name, seconds in answer.items()}


def timed(calls: int, call: Callable[[int], Any]) -> Sequence[float]:
    """Seconds of each call."""
    seconds: list[float] = []
    for at in range(calls):
        begun = time.perf_counter()
        call(at)
        seconds.append(time.perf_counter() - begun)
    return seconds


def report(rounds: int, figures: dict[str, Figures], load: str) -> None:
    """The claims of what was measured."""
    how = (
        f"{NBYTES} bytes in 2 fields of 1 sample; {rounds} rounds of {CALLS} calls, all sides in turn; "
        f"median of the rounds' medians; {load}"
    )
    for call in ("put", "get"):
        print_claim(
            at_most(
                f"one small {call}, against a bare ZMQ round trip",
                ratio_of_medians(figures["ours"][call], figures["zmq"]["trip"]),
                "x",
                2,
                f"{how}; REQ and ROUTER between two processes, tcp on 127.0.0.1, as many bytes both ways",
            )
        )
        if "redis" in figures:
            print_claim(
                at_most(
                    f"one small {call}, against a Redis SET",
                    ratio_of_medians(figures["ours"][call], figures["redis"]["set"]),
                    "x",
                    10,
                    f"{how}; redis-py with hiredis over a Unix socket, no persistence",
                )
            )
    for side, name, unit, shown in (
        ("ours", "ours", "s", ("put", "get")),
        ("ours", "ours", "CPU-s", ("put cpu", "get cpu")),
        ("zmq", "bare ZMQ over tcp", "s", ("trip",)),
        ("zmq ipc", "bare ZMQ over ipc", "s", ("trip",)),
        ("redis", "Redis", "s", ("set", "get")),
        ("peer", TRANSFER_QUEUE, "s", ("put", "get")),
    ):
        for what in shown if side in figures else ():
            print_claim(figure(f"one small call: {name}, {what}", median(figures[side][what]), unit, how))
