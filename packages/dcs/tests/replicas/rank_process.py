"""Ranks in processes of their own, for the tests that kill one.

Run as `rank_process.py FD`, where FD is a Unix socket: for each JSON list of keepers and options that comes
with a descriptor it forks a rank, which talks over that descriptor, and answers its process id. A rank says
"ready", and then answers each line that it hears:

    save STEP FLOATS    freezes a tree of that step: "saved"
    keep STEP FLOATS    the same, and waits until it can be restored: "kept"
    freeze STEP FLOATS  stops in the middle of freezing: "half"
    restore             "STEP SUM", or "nothing"

or with the name of what was raised, and its message.
"""

import json
import os
import signal
import socket
import sys
import threading
from typing import Any

import torch
from dcs.errors import DcsError
from dcs.replicas import Replicas
from dcs.replicas.arenas import Arena


def state(step: int, floats: int) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((floats // 2,), float(step)),
        "b": torch.full((floats - floats // 2,), float(step)),
    }


def stop_half_way(connection: socket.socket) -> None:
    fill = Arena.fill

    def half(arena: Arena, flat: Any) -> None:
        count = len(flat.places) // 2
        fill(arena, type(flat)(flat.structure, flat.places[:count], flat.sources[:count], flat.nbytes))
        connection.sendall(b"half\n")
        threading.Event().wait(60)

    Arena.fill = half  # pyright: ignore[reportAttributeAccessIssue]


def answer(replicas: Replicas, connection: socket.socket, words: list[str]) -> str:
    verb, *rest = words
    if verb == "restore":
        restored = replicas.restore(timeout=20.0)
        if restored is None:
            return "nothing"
        step, tree = restored
        return f"{step} {float(tree['a'].sum() + tree['b'].sum()):.0f}"
    step, floats = map(int, rest)
    if verb == "freeze":
        stop_half_way(connection)
    saving = replicas.save(step, state(step, floats))
    if verb == "keep":
        saving.wait(20.0)
        return "kept"
    return "saved"


def run(connection: socket.socket, keepers: list[str], options: dict[str, Any]) -> None:
    with Replicas(keepers, "actor", connect_seconds=10.0, **options) as replicas:
        connection.sendall(b"ready\n")
        for line in connection.makefile("r"):
            try:
                said = answer(replicas, connection, line.split())
            except DcsError as error:
                said = f"{type(error).__name__} {error}"
            connection.sendall(f"{said}\n".encode())


def serve(requests: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by themselves
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 4096, 1)
        if not request:
            return
        pid = os.fork()
        if pid:
            os.close(descriptors[0])
            requests.sendall(str(pid).encode())
            continue
        requests.close()
        with socket.socket(fileno=descriptors[0]) as connection:
            run(connection, *json.loads(request))
        return


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(socket.socket(fileno=int(sys.argv[1])))
