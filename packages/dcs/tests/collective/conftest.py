"""Ranks of collective groups as processes of their own; see `rank_process.py`."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from dcs.wire.collective import CollectiveStore


class Rank:
    """A process that takes part in groups; ask, or tell and hear, so that several act at once."""

    def __init__(self, zygote: socket.socket) -> None:
        near, far = socket.socketpair()
        with far:
            socket.send_fds(zygote, [b"fork"], [far.fileno()])
            self.pid = int(zygote.recv(64))
        near.settimeout(30)
        self._socket, self._lines = near, near.makefile("r")

    def tell(self, do: str, **command) -> None:
        self._socket.sendall(f"{json.dumps({'do': do, **command})}\n".encode())

    def hear(self) -> dict:
        return json.loads(self._lines.readline())

    def ask(self, do: str, **command) -> dict:
        self.tell(do, **command)
        return self.hear()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def gone(self) -> bool:
        """Waits for its end."""
        return self._lines.readline() == ""

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._lines.close()
        self._socket.close()


@pytest.fixture(scope="session")
def rank_zygote() -> Iterator[socket.socket]:
    near, far = socket.socketpair()
    command = [sys.executable, str(Path(__file__).parent / "rank_process.py"), str(far.fileno())]
    with subprocess.Popen(command, pass_fds=[far.fileno()]), near:
        far.close()
        near.settimeout(60)
        yield near
        near.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ranks(rank_zygote: socket.socket) -> Iterator[Callable[[int], list[Rank]]]:
    """`ranks(n)` are n processes."""
    with ExitStack() as stack:

        def start(count: int) -> list[Rank]:
            started = [Rank(rank_zygote) for _ in range(count)]
            for rank in started:
                stack.callback(rank.close)
            return started

        yield start


@pytest.fixture
def store() -> Iterator[CollectiveStore]:
    with CollectiveStore() as serving:
        yield serving


@pytest.fixture
def gather(store: CollectiveStore) -> Callable[..., list[dict]]:
    """`gather(ranks, key, deadline)` makes one group of all of them."""

    def make(ranks: list[Rank], key: str = "v1", deadline: float = 20.0) -> list[dict]:
        for number, rank in enumerate(ranks):
            rank.tell("make", port=store.port, key=key, rank=number, size=len(ranks), deadline=deadline)
        answers = [rank.hear() for rank in ranks]
        assert not any(answers), answers
        return answers

    return make


@pytest.fixture
def together() -> Callable[..., list[dict]]:
    """`together(ranks, do, **command)`: all at once, and their answers."""

    def ask(ranks: list[Rank], do: str, **command) -> list[dict]:
        for rank in ranks:
            rank.tell(do, **command)
        return [rank.hear() for rank in ranks]

    return ask
