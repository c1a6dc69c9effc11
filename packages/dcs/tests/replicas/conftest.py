"""Keepers, ranks and a proxy that damages, cuts and holds what passes through it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from dcs.replicas import Keeper, Replicas


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def keeper(cleanup: ExitStack) -> Callable[..., Keeper]:
    """`keeper(...)` is a running `Keeper` in this process."""
    return lambda **options: cleanup.enter_context(Keeper(**options))


@pytest.fixture
def replicas(cleanup: ExitStack) -> Callable[..., Replicas]:
    """`replicas(keepers, ...)` is a `Replicas` of name "actor"."""

    def make(keepers: list[Any], **options: Any) -> Replicas:
        addresses = [getattr(each, "address", each) for each in keepers]
        options.setdefault("copies", len(addresses))
        options.setdefault("connect_seconds", 10.0)
        return cleanup.enter_context(Replicas(addresses, "actor", **options))

    return make


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], float], None]:
    """`eventually(condition, seconds)` waits for what no event announces to the outside."""

    def wait(condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline, pause = time.monotonic() + seconds, threading.Event()
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            pause.wait(0.01)

    return wait


class Proxy:
    """Passes bytes between ranks and a keeper. What ranks send can be damaged, cut or held.

    `damage` and `cut_after` count down over bytes that come in large pieces, which are those of chunks.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.damage = 0  # how many large pieces have one byte flipped
        self.cut_after: int | None = None  # bytes in large pieces, after which every connection is cut, once
        self.passed = 0  # bytes in large pieces
        self.go = threading.Event()  # cleared: what comes in large pieces is held
        self.go.set()
        self.held = threading.Event()  # something is being held
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                try:
                    far = socket.create_connection(self._target, timeout=5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._sockets += [near, far]
                for source, target, up in ((near, far, True), (far, near, False)):
                    thread = threading.Thread(target=self._pass, args=(source, target, up), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if up and len(data) > 16_000 and not self._let_through(data):
                    break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _let_through(self, data: bytearray) -> bool:
        if not self.go.is_set():
            self.held.set()
            self.go.wait(60)
        with self._lock:
            self.passed += len(data)
            if self.damage:
                self.damage -= 1
                data[-1] ^= 1
            if self.cut_after is not None and self.passed > self.cut_after:
                self.cut_after = None
                return False
        return True

    def close(self) -> None:
        with suppress(OSError):  # it may have been closed
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.go.set()
        self._threads[0].join()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


@pytest.fixture
def proxy(cleanup: ExitStack) -> Callable[[Keeper], Proxy]:
    """`proxy(keeper)` is a `Proxy` before it."""

    def make(keeper: Keeper) -> Proxy:
        made = Proxy(keeper.address)
        cleanup.callback(made.close)
        return made

    return make


class Rank:
    """A rank in a process of its own; `rank_process.py` says what it can be told."""

    def __init__(self, zygote: socket.socket, *arguments: Any) -> None:
        near, far = socket.socketpair()
        socket.send_fds(zygote, [json.dumps(arguments).encode()], [far.fileno()])
        far.close()
        self.pid = int(zygote.recv(64))
        self._socket = near
        near.settimeout(60)
        self._lines = near.makefile("r")

    def say(self, *words: Any) -> None:
        self._socket.sendall(f"{' '.join(map(str, words))}\n".encode())

    def hear(self) -> str:
        return self._lines.readline().strip()

    def ask(self, *words: Any) -> str:
        self.say(*words)
        return self.hear()

    def kill(self) -> None:
        """SIGKILL, and wait until it has had its effect."""
        os.kill(self.pid, signal.SIGKILL)
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
def rank_zygote() -> Iterator[socket.socket]:
    """A process that has imported torch once and forks the ranks of all tests."""
    near, far = socket.socketpair()
    command = [sys.executable, str(Path(__file__).parent / "rank_process.py"), str(far.fileno())]
    with subprocess.Popen(command, pass_fds=[far.fileno()]), near:
        far.close()
        near.settimeout(60)
        yield near
        near.shutdown(socket.SHUT_RDWR)  # ends it


@pytest.fixture
def rank_process(rank_zygote: socket.socket, cleanup: ExitStack) -> Callable[..., Rank]:
    """`rank_process(keepers, options)` is a running `Rank`."""

    def make(keepers: list[Any], **options: Any) -> Rank:
        started = Rank(rank_zygote, [getattr(each, "address", each) for each in keepers], options)
        cleanup.callback(started.close)
        assert started.hear() == "ready"
        return started

    return make
