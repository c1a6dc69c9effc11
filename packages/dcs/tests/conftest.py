"""Real parts for the tests: a coordinator with a short lease, members that get closed, a damaging proxy."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import dcs
import psutil
import pytest
import torch

torch.set_num_threads(1)

LEASE_SECONDS = 1.0


@pytest.fixture
def coordinator() -> Iterator[dcs.Coordinator]:
    with dcs.Coordinator(lease_seconds=LEASE_SECONDS) as running:
        yield running


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def publish_to(coordinator: dcs.Coordinator, stack: ExitStack) -> Callable[..., dcs.Publisher]:
    """`publish_to(tensors, **options)` is a publisher with the layout of these tensors."""

    def make(tensors: dict[str, torch.Tensor], **options) -> dcs.Publisher:
        options.setdefault("run", "r")
        return stack.enter_context(
            dcs.Publisher(coordinator.address, layout=dcs.layout.of(tensors), **options)
        )

    return make


@pytest.fixture
def subscribe(coordinator: dcs.Coordinator, stack: ExitStack) -> Callable[..., dcs.Subscriber]:
    """`subscribe(tensors, name, **options)` is a subscriber with the layout of these tensors."""

    def make(tensors: dict[str, torch.Tensor], name: str = "engine-0", **options) -> dcs.Subscriber:
        options.setdefault("run", "r")
        return stack.enter_context(
            dcs.Subscriber(coordinator.address, name=name, layout=dcs.layout.of(tensors), **options)
        )

    return make


@pytest.fixture
def no_leak() -> Iterator[None]:
    """Fails when the test leaves a thread or a file descriptor behind. A thread may take a moment to end."""
    process = psutil.Process()
    gc.collect()
    threads, descriptors = set(threading.enumerate()), process.num_fds()

    def left() -> tuple[set[threading.Thread], int]:
        return set(threading.enumerate()) - threads, max(0, process.num_fds() - descriptors)

    yield
    gc.collect()
    deadline, pause = time.monotonic() + 10, threading.Event()
    while left() != (set(), 0) and time.monotonic() < deadline:
        pause.wait(0.01)
    assert left() == (set(), 0), sorted(os.listdir("/proc/self/fd"))


class Proxy:
    """Stands between subscribers and a publisher, and damages what the publisher says.

    Args:
        publisher: has to advertise 127.0.0.2, where the proxy takes over the same port.
        flip: of each connection in turn, the offsets at which to flip a bit; none for further connections.
        cut: of each connection in turn, the offset at which to cut it; never for further connections.
        always_flip: flip a bit this often, in bytes, in every connection.

    Attributes:
        connections: how many there were.
        passed: bytes passed on from the publisher, all connections together.
    """

    def __init__(
        self,
        publisher: dcs.Publisher,
        flip: Sequence[int] = (),
        cut: Sequence[int] = (),
        always_flip: int = 0,
    ) -> None:
        self._flip, self._cut, self._always = list(flip), list(cut), always_flip
        self.connections = 0
        self.passed = 0
        self._flip_next = -1
        self._upstream = ("127.0.0.1", publisher.endpoint.port)
        self._listener = socket.create_server((publisher.endpoint.host, publisher.endpoint.port))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def flip_next(self, offset: int) -> None:
        """Flip a bit of what the publisher says next, this many bytes from now, in whatever connection."""
        self._flip_next = offset

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._upstream)
            self._sockets += [near, far]
            flip = self._flip[self.connections] if self.connections < len(self._flip) else -1
            cut = self._cut[self.connections] if self.connections < len(self._cut) else -1
            self.connections += 1
            pumps = [
                threading.Thread(target=self._pump, args=(near, far, -1, -1, False)),
                threading.Thread(target=self._pump, args=(far, near, flip, cut, True)),
            ]
            self._threads += pumps
            for pump in pumps:
                pump.start()

    def _pump(self, source: socket.socket, sink: socket.socket, flip: int, cut: int, damage: bool) -> None:
        offset = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if 0 <= flip - offset < len(data):
                    data[flip - offset] ^= 4
                if damage and self._flip_next >= 0:
                    if self._flip_next < len(data):
                        data[self._flip_next] ^= 16
                    self._flip_next = max(-1, self._flip_next - len(data))
                if damage and self._always:
                    for place in range(self._always - 1 - offset % self._always, len(data), self._always):
                        data[place] ^= 1
                if 0 <= cut <= offset + len(data):
                    sink.sendall(data[: cut - offset])
                    self.passed += cut - offset
                    break
                sink.sendall(data)
                offset += len(data)
                self.passed += len(data) if damage else 0
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(stack: ExitStack) -> Callable[..., Proxy]:
    """`proxy(publisher, ...)` is a running `Proxy`."""

    def make(publisher: dcs.Publisher, **options) -> Proxy:
        return stack.enter_context(Proxy(publisher, **options))

    return make


class Child:
    """A member of a run in a process of its own, told what to do line by line; see `member_process.py`."""

    def __init__(self, zygote: socket.socket, *arguments: str) -> None:
        near, far = socket.socketpair()
        socket.send_fds(zygote, [json.dumps(arguments).encode()], [far.fileno()])
        far.close()
        self.pid = int(zygote.recv(64))
        self._socket = near
        near.settimeout(60)
        self._lines = near.makefile("r")

    def say(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())

    def hear(self) -> list[str]:
        """The next line it prints, split at spaces; nothing when it has ended."""
        return self._lines.readline().split()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it has had its effect."""
        self.signal(signal.SIGKILL)
        with suppress(ConnectionError):
            while self._lines.readline():
                pass
        self.pid = 0

    def close(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                self.kill()
        self._lines.close()
        self._socket.close()


@pytest.fixture(scope="session")
def zygote() -> Iterator[socket.socket]:
    """A process that has imported torch once and forks the children of all tests."""
    near, far = socket.socketpair()
    script = Path(__file__).parent / "member_process.py"
    command = [sys.executable, str(script), str(far.fileno())]
    with subprocess.Popen(command, pass_fds=[far.fileno()]), near:
        far.close()
        near.settimeout(60)
        yield near
        near.shutdown(socket.SHUT_RDWR)  # ends it


@pytest.fixture
def child(zygote: socket.socket, stack: ExitStack) -> Callable[..., Child]:
    """`child(role, address, ...)` is a running `Child`."""

    def make(*arguments: str) -> Child:
        started = Child(zygote, *arguments)
        stack.callback(started.close)
        return started

    return make


@pytest.fixture
def child_type() -> type[Child]:
    """For who has another zygote."""
    return Child


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], float], None]:
    """`eventually(condition, seconds)` waits for what no event announces to the outside."""

    def wait(condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline, pause = time.monotonic() + seconds, threading.Event()
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            pause.wait(0.01)

    return wait
