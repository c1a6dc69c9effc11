"""A storage unit's stand-in that is reached over UCX on loopback, in a process of its own or in this one."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from transferqueue.errors import Corrupt, UnknownSample
from transferqueue.transport import ucx

os.environ.setdefault("UCX_NET_DEVICES", "lo")
os.environ.setdefault("UCX_TLS", "tcp,self")

MIB = 1 << 20
TOKEN = "the token of these tests"


class Arenas:
    """Memory with one arena, 7. Grant 1 is good, 2 ends before its bytes are there, any other is unknown."""

    def __init__(self) -> None:
        self.bytes = np.arange(16 * MIB, dtype=np.uint64).view(np.uint8)[: 64 * MIB].copy()
        self.seen: list[tuple[int, int, int, int]] = []
        self.refused: set[int] = set()

    def room(self, grant: int, arena: int, start: int, stop: int) -> np.ndarray:
        if grant not in (1, 2) or arena != 7 or grant in self.refused:
            raise UnknownSample(f"there is no grant {grant} in arena {arena}", ids=[grant])
        return self.bytes[start:stop]

    def written(self, grant: int, arena: int, start: int, stop: int) -> None:
        if grant == 2:
            raise UnknownSample("grant 2 is over", ids=[2])
        self.seen.append((grant, arena, start, stop))

    def bytes_of(self, arena: int, start: int, stop: int) -> np.ndarray:
        if arena != 7 or not 0 <= start <= stop <= len(self.bytes):
            raise Corrupt(f"there are no bytes {start} to {stop} of arena {arena}")
        return self.bytes[start:stop]


def serve(port: int) -> None:
    """The main function of the server's process: says its port, and serves until stdin ends."""
    server = ucx.UcxServer(Arenas(), token=TOKEN, port=port, max_bytes=48 * MIB)
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()
    server.close()
    print("threads", [thread.name for thread in threading.enumerate()], flush=True)


class ServerProcess:
    """A storage unit's stand-in in a process of its own."""

    def __init__(self, port: int = 0) -> None:
        code = f"import runpy; runpy.run_path({__file__!r})['serve']({port})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def end(self) -> str:
        """What it says after an orderly close."""
        said, _ = self.process.communicate(timeout=60)
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def unit() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.kill()


@pytest.fixture
def own_unit() -> Iterator[ServerProcess]:
    """One that the test may stop or kill."""
    process = ServerProcess()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def transport(unit: ServerProcess) -> Iterator[ucx.UcxTransport]:
    one = ucx.UcxTransport("127.0.0.1", unit.port, token=TOKEN, unit=3)
    yield one
    one.close()


class Writer:
    """A client that has proved the token and then does as the test says."""

    def __init__(self, port: int) -> None:
        self.transport = ucx.UcxTransport("127.0.0.1", port, token=TOKEN)
        self.runtime = self.transport._runtime
        self.connection = self.do(lambda: self.transport._connection(self.until()))

    def until(self) -> float:
        return self.runtime.loop.time() + 30

    def do(self, work: Callable[[], Any]) -> Any:
        return self.runtime.submit(work()).result(40)

    def tell(self, message: Any) -> None:
        self.do(lambda: self.connection.tell(message, self.until()))

    def hear(self, seconds: float = 30) -> Any:
        return self.do(lambda: self.connection.hear(self.runtime.loop.time() + seconds))

    def send(self, data: bytes) -> None:
        self.do(lambda: self.connection.send(np.frombuffer(data, np.uint8), self.until()))


@pytest.fixture
def served() -> Iterator[tuple[ucx.UcxServer, Arenas, Writer]]:
    """A server in this process, and a writer connected to it."""
    arenas = Arenas()
    server = ucx.UcxServer(arenas, token=TOKEN)
    writer = Writer(server.port)
    yield server, arenas, writer
    writer.transport.close()
    server.close()


@pytest.fixture
def arenas() -> Arenas:
    return Arenas()


@pytest.fixture
def start_unit() -> Callable[[int], ServerProcess]:
    """Starts one at a port."""
    return ServerProcess


@pytest.fixture
def writer_to() -> Callable[[int], Writer]:
    """Connects a writer to a port."""
    return Writer
