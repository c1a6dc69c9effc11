"""Members in processes of their own that can be stopped at an exact chunk, and what they should have."""

import importlib.util
import json
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import dcs
import pytest
import torch

CHUNK_BYTES = 64 << 10
FLOATS = 1_000_000
OVER_TCP = {"wires": ["tcp"], "chunk_bytes": CHUNK_BYTES}


class Member:
    """A `Child` with the words of an engine or a trainer; see `member_process.py`."""

    def __init__(self, child: Any, name: str) -> None:
        self.name = name
        self._child = child

    def say(self, *words: object) -> None:
        self._child.say(" ".join(map(str, words)))

    def until(self, word: str) -> list[str]:
        """What comes after `word` in the next line that begins with it; other lines are passed over."""
        while line := self._child.hear():
            if line[0] == word:
                return line[1:]
        raise AssertionError(f"{self.name} has ended; {word!r} was awaited")

    def takes(self, version: int) -> list[str]:
        """The digest, wire, and bytes from ranks and peers of a version; it has to take that one."""
        got = self.until("took")
        while int(got[0]) < version:
            got = self.until("took")
        assert int(got[0]) == version
        return got[1:]

    def ask(self, *words: object) -> list[str]:
        self.say(*words)
        answer = {"publish": "published", "check": "is"}.get(str(words[0]), str(words[0]))
        return self.until(answer)

    def stop(self) -> None:
        self._child.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._child.signal(signal.SIGCONT)

    def kill(self) -> None:
        self._child.kill()

    @property
    def pid(self) -> int:
        return self._child.pid


@pytest.fixture(scope="session")
def process_module() -> ModuleType:
    """The module `member_process.py`, for the models it makes and the digests it prints."""
    path = Path(__file__).parent.parent / "member_process.py"
    spec = importlib.util.spec_from_file_location("member_process", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(process_module: ModuleType) -> Callable[[int], dict[str, torch.Tensor]]:
    """`model(version)` is what the processes publish and expect."""
    return lambda version, floats=FLOATS: process_module.model(floats, version)


@pytest.fixture
def digest(process_module: ModuleType) -> Callable[[Any], str]:
    """Of tensors, or of a version's model."""

    def make(what: Any, floats: int = FLOATS) -> str:
        tensors = process_module.model(floats, what) if isinstance(what, int) else what
        return process_module.digest(tensors)

    return make


@pytest.fixture
def engine(child: Any) -> Callable[..., Member]:
    """`engine(address, name, how..., **options)` is a subscriber in a process that has joined."""

    def make(address: str, name: str, how: dict | None = None, **options: Any) -> Member:
        options = {**OVER_TCP, **options}
        arguments = ["engine", address, name, str(FLOATS), json.dumps(options), json.dumps(how or {})]
        member = Member(child(*arguments), name)
        member.until("ready")
        return member

    return make


@pytest.fixture
def trainer(child: Any) -> Callable[..., Member]:
    """`trainer(address, how..., **options)` is a publisher in a process that has joined."""

    def make(address: str, how: dict | None = None, **options: Any) -> Member:
        options = {**OVER_TCP, **options}
        arguments = ["trainer", address, str(FLOATS), json.dumps(options), json.dumps(how or {})]
        member = Member(child(*arguments), "trainer")
        member.until("ready")
        return member

    return make


@pytest.fixture
def member_on(child_type: Any, stack: ExitStack) -> Callable[..., Member]:
    """`member_on(zygote, role, ...)` is a member that another zygote has forked."""

    def make(zygote: Any, role: str, *arguments: str) -> Member:
        started = child_type(zygote, role, *arguments)
        stack.callback(started.close)
        return Member(started, role)

    return make


@pytest.fixture
def publisher(
    coordinator: dcs.Coordinator, stack: ExitStack, model: Callable[[int], dict[str, torch.Tensor]]
) -> dcs.Publisher:
    """In this process, over tcp."""
    layout = dcs.layout.of(model(0))
    return stack.enter_context(
        dcs.Publisher(coordinator.address, run="r", layout=layout, wires=("tcp",), chunk_bytes=CHUNK_BYTES)
    )


@pytest.fixture
def payload(model: Callable[[int], dict[str, torch.Tensor]]) -> int:
    """Bytes of a version."""
    return dcs.layout.of(model(0)).offsets()[1]


@pytest.fixture
def clock() -> Callable[[], float]:
    """`clock()` are the seconds since the call before it, or since the test began."""
    last = [time.monotonic()]

    def read() -> float:
        before, last[0] = last[0], time.monotonic()
        return last[0] - before

    return read
