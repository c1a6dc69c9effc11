"""Publishers and subscribers in processes of their own, for the tests that kill one.

Run as `member_process.py FD`, where FD is a Unix socket: for each JSON list of arguments that comes with a
descriptor it forks a child, which talks over that descriptor, and answers the child's process id. Importing
torch once is enough.

    ["subscriber", ADDRESS, NAME, FLOATS]   says "ready", then "VERSION HASH" for each version it took
    ["plain", ADDRESS, NAME, FLOATS, OPTIONS] the same with a model of one tensor, and options in JSON
    ["publisher", ADDRESS, FLOATS]          says "ready EPOCH"; publishes each version whose number it hears,
                                            and says "published VERSION EPOCH"
"""

import json
import os
import signal
import socket
import sys

import dcs
import torch
import xxhash


def model(floats: int, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    half = floats // 2
    return {
        "a": torch.randn(half, generator=generator),
        "b": torch.randn(floats - half, generator=generator).to(torch.bfloat16),
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    state = xxhash.xxh3_64()
    for name in sorted(tensors):
        state.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()


def subscribe(connection: socket.socket, address: str, name: str, tensors: dict, **options) -> None:
    layout = dcs.layout.of(tensors)
    with dcs.Subscriber(address, run="r", name=name, layout=layout, **options) as subscriber:
        connection.sendall(b"ready\n")
        version = -1
        while (staged := subscriber.next(after=version, timeout=120)) is not None:
            version = staged.version
            line = f"{version} {digest(staged.tensors)}\n"
            staged.ack()
            connection.sendall(line.encode())


def publish(connection: socket.socket, address: str, floats: int) -> None:
    layout = dcs.layout.of(model(floats, 0))
    with dcs.Publisher(address, run="r", layout=layout) as publisher:
        connection.sendall(f"ready {publisher.epoch}\n".encode())
        for line in connection.makefile("r"):
            publisher.publish(int(line), model(floats, int(line)))
            connection.sendall(f"published {int(line)} {publisher.epoch}\n".encode())


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
            role, address, *rest = json.loads(request)
            if role == "subscriber":
                subscribe(connection, address, rest[0], model(int(rest[1]), 0))
            elif role == "plain":
                tensors = {"a": torch.zeros(int(rest[1]))}
                subscribe(connection, address, rest[0], tensors, **json.loads(rest[2]))
            else:
                publish(connection, address, int(rest[0]))
        return


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(socket.socket(fileno=int(sys.argv[1])))
