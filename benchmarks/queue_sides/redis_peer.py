"""Redis through redis-py with hiredis over a Unix socket: a batch as MSET and MGET, a value as SET and GET.

    python redis_peer.py '{"server": PATH, "folder": PATH, "samples": N}'

Starts the server itself, for as long as it runs: without a port, and without persistence.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import redis  # pyright: ignore[reportMissingImports] - lives in the environment of `make bench-peers`
from answering import answer, work
from batches import rows
from redis.backoff import ConstantBackoff  # pyright: ignore[reportMissingImports] - as redis
from redis.retry import Retry  # pyright: ignore[reportMissingImports] - as redis

START_SECONDS, LOOK_SECONDS = 10.0, 0.02


def main() -> None:
    words = work()
    socket = f"{words['folder']}/redis.sock"
    settings = [
        "--port",
        "0",
        "--unixsocket",
        socket,
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        words["folder"],
    ]
    server = subprocess.Popen([words["server"], *settings], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        serve(socket, words["samples"])
    finally:
        server.terminate()
        server.wait(10)


def serve(socket: str, samples: int) -> None:
    """Answer the parent's lines."""
    client = redis.Redis(
        unix_socket_path=socket, retry=Retry(ConstantBackoff(LOOK_SECONDS), int(START_SECONDS / LOOK_SECONDS))
    )
    client.ping()  # repeated until the server listens
    batch = rows(samples, images=True)
    values: dict[str, Any] = {
        f"{name}:{row}": memoryview(value).cast("B")
        for name, column in batch.fields().items()
        for row, value in enumerate(column)
    }

    def bulk() -> dict[str, float]:
        begun = time.perf_counter()
        client.mset(values)
        put = time.perf_counter()
        read = client.mget(list(values))
        got = time.perf_counter()
        if any(len(one) != len(value) for one, value in zip(read, values.values(), strict=True)):
            raise RuntimeError("Redis gave back other values than it was given")
        client.delete(*values)
        return {"put": put - begun, "get": got - put}

    def small(calls: int, nbytes: int) -> dict[str, list[float]]:
        value = bytes(nbytes)
        return {
            "set": timed(calls, lambda at: client.set(f"small:{at}", value)),
            "get": timed(calls, lambda at: client.get(f"small:{at}")),
        }

    answer({"bulk": bulk, "small": small})
    client.close()


def timed(calls: int, call: Callable[[int], Any]) -> list[float]:
    """Seconds of each of `calls` calls."""
    seconds: list[float] = []
    for at in range(calls):
        begun = time.perf_counter()
        call(at)
        seconds.append(time.perf_counter() - begun)
    return seconds


if __name__ == "__main__":
    main()
