"""The large batch over ZeroMQ and TCP: CPU-seconds against two hops of raw TCP."""

import os
import socket
import time

from claims import at_least, figure, load_note, median, print_claim, ratio_of_medians
from measure.child import Child
from measure.cpu_clock import Meanwhile, cpu_seconds
from measure.rounds import Round, in_turn
from queue_sides.batches import rows
from queue_sides.buffers import touched

from .sides import Sides
from .store import Store

ANSWER_SECONDS = 60.0


def measure(sides: Sides) -> None:
    """Print the claims."""
    batch = rows(sides.samples, images=True)
    rounds, warm_up = (4, 3) if sides.quick else (10, 3)  # each unit warms its own memory
    others = Meanwhile()
    with (
        Store(transport="zmq") as store,
        sides.child("tcp_relay.py", nbytes=batch.nbytes) as relay,
        socket.create_connection(("127.0.0.1", relay.ready["port"])) as connection,
    ):
        hops = two_hops(connection, relay, batch.nbytes)
        figures = in_turn({"ours": lambda: store.round(batch), "tcp": hops}, rounds, warm_up)
    ours, tcp = figures["ours"], figures["tcp"]
    how = (
        f"{len(batch)} samples x 6 fields, {batch.nbytes / 1e6:.0f} MB over 127.0.0.1; medians of {rounds} "
        f"rounds in turn; {load_note(others.others())}"
    )
    print_claim(
        at_least(
            "zmq over tcp: put + get, as a share of raw TCP's speed by CPU",
            ratio_of_medians(tcp["cpu"], ours["cpu"]),
            "x",
            0.4,
            f"{how}; CPU-seconds of two raw hops (this process to a relay's memory and back: reused buffers "
            "in huge pages, one send, receives into place) over those of a put and a get in every process",
        )
    )
    print_claim(figure("zmq over tcp: CPU of put + get", median(ours["cpu"]), "CPU-s", how))
    print_claim(figure("zmq over tcp: put", median(ours["put"]), "s", how))
    print_claim(figure("zmq over tcp: get", median(ours["get"]), "s", how))
    print_claim(figure("raw TCP: CPU of two hops", median(tcp["cpu"]), "CPU-s", how))
    print_claim(figure("raw TCP: two hops", median(tcp["hops"]), "s", how))


def two_hops(connection: socket.socket, relay: Child, nbytes: int) -> Round:
    """To the relay's memory, and back from there."""
    outgoing, incoming = touched(nbytes), touched(nbytes)
    pids = [os.getpid(), relay.pid]

    def hops() -> dict[str, float]:
        cpu, begun = cpu_seconds(pids), time.perf_counter()
        relay.tell(do="take")
        connection.sendall(outgoing)
        relay.answer(ANSWER_SECONDS)
        relay.tell(do="give")
        view, at = memoryview(incoming), 0
        while at < nbytes:
            at += connection.recv_into(view[at:])
        relay.answer(ANSWER_SECONDS)
        return {"hops": time.perf_counter() - begun, "cpu": cpu_seconds(pids) - cpu}

    return hops
