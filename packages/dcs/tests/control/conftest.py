"""A registry without sockets or time, and links to coordinators that are real."""

import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from dcs.control.link import Link
from dcs.control.messages import (
    Acked,
    Announce,
    Endpoint,
    FromCoordinator,
    Heartbeat,
    Join,
    Joined,
    Known,
    Leave,
    Receipt,
    RunState,
)
from dcs.control.registry import Registry
from dcs.errors import DcsError
from dcs.layout import Layout, TensorSpec

LEASE = 5.0
LAYOUT = Layout((TensorSpec("w", (2,), "float32"),))
PLACE = Endpoint("192.0.2.1", 9)


class Talk:
    """A registry, whose members are named by the strings of their connections.

    Attributes:
        now: the time, in seconds.
        heard: what each connection was sent, in order.
        ids: the member number that each connection was given last.
        epochs: the epoch likewise.
    """

    def __init__(self, **options) -> None:
        self.registry = Registry(LEASE, options.pop("token", None), **options)
        self.now = 0.0
        self.heard: dict[str, list[FromCoordinator]] = {}
        self.ids: dict[str, int] = {}
        self.epochs: dict[str, int] = {}
        self._requests = 0

    def tell(self, who: str, message) -> FromCoordinator | None:
        """Let a connection say something; the answer to it, if there is one."""
        before = len(self.heard.setdefault(who, []))
        self._note(self.registry.handle(who.encode(), message, self.now))
        self._note(self.registry.flush())
        request = getattr(message, "request", None)
        answers = [m for m in self.heard[who][before:] if getattr(m, "request", None) == request]
        return answers[0] if answers else (self.heard[who][before:] or [None])[0]

    def _note(self, outgoing) -> None:
        for identity, message in outgoing:
            who = identity.decode()
            self.heard.setdefault(who, []).append(message)
            if isinstance(message, Joined):
                self.ids[who], self.epochs[who] = message.member, message.epoch

    def join(self, who: str, role: str, name: str = "", layout: Layout = LAYOUT, **options):
        """Join under the name `who` unless another one is given."""
        self._requests += 1
        known = options.pop("known", None)
        endpoint = options.pop("endpoint", PLACE if role == "publisher" else None)
        return self.tell(
            who,
            Join(
                options.pop("request", self._requests),
                role,  # pyright: ignore[reportArgumentType]
                options.pop("run", "r"),
                name or who,
                layout,
                options.pop("token", None),
                endpoint,
                known=None if known is None else Known(*known),
                **options,
            ),
        )

    def rank(self, who: str, rank: int = 0, of: int = 1, session: str = "", **options):
        """Join as a publisher's rank; a session of its own unless one is given."""
        return self.join(
            who,
            "publisher",
            f"rank-{rank}",
            rank=rank,
            world_size=of,
            session=session or f"of {who}",
            **options,
        )

    def announce(self, who: str, version: int, root: int | None = None, epoch: int | None = None):
        """Announce a part, whose root is that of the version unless it is given."""
        self._requests += 1
        value = version if root is None else root
        epoch = self.epochs[who] if epoch is None else epoch
        return self.tell(
            who, Announce(self._requests, self.ids[who], epoch, version, root_of(value), 100, 0.5)
        )

    def beat(self, who: str, **options):
        return self.tell(who, Heartbeat(self.ids[who], **options))

    def stage(self, who: str, version: int, epoch: int = 1, wire: str = "tcp", **options):
        return self.beat(who, staged=Receipt(epoch, version, wire, 10, 20), **options)

    def ack(self, who: str, version: int, epoch: int = 1):
        return self.beat(who, acked=Acked(epoch, version, 0.5, 0.25))

    def leave(self, who: str):
        return self.tell(who, Leave(self.ids[who], "done"))

    def wait(self, seconds: float, *hearts: str) -> None:
        """Let time go by; these connections beat just before its end."""
        self.now += seconds
        for who in hearts:
            self.beat(who)
        self._note(self.registry.expire(self.now))
        self._note(self.registry.flush())

    def last(self, who: str, kind):
        """The newest message of a kind that this connection was sent."""
        return next((m for m in reversed(self.heard.get(who, [])) if isinstance(m, kind)), None)

    def announced(self, who: str) -> tuple[int, int] | None:
        """(epoch, version) that a subscriber was told last."""
        state = next(m for m in reversed(self.heard[who]) if isinstance(m, RunState | Joined))
        found = state.state.announcement if isinstance(state, Joined) else state.announcement
        return None if found is None else (found.epoch, found.version)


def root_of(value: int) -> bytes:
    return bytes([value % 256]) * 16


@pytest.fixture
def talk() -> Callable[..., Talk]:
    """`talk(**options of Registry)` is a fresh `Talk`."""
    return Talk


class Ear:
    """A link, and what it has delivered; its thread hangs while it is not `listening`."""

    def __init__(self, address: str, **options) -> None:
        self._changed = threading.Condition()
        self.heard: list[FromCoordinator] = []
        self.silences: list[DcsError | None] = []
        self.on_joined: Callable[[Joined], None] = lambda joined: None
        self.listening = threading.Event()
        self.listening.set()
        self.link = Link(address, self._receive, self._silence, **options)

    def _receive(self, message: FromCoordinator) -> None:
        assert self.listening.wait(20)
        if isinstance(message, Joined):
            self.on_joined(message)
        with self._changed:
            self.heard.append(message)
            self._changed.notify_all()

    def _silence(self, error: DcsError | None) -> None:
        with self._changed:
            self.silences.append(error)
            self._changed.notify_all()

    def await_message(self, wanted: Callable[[FromCoordinator], bool], seconds: float = 10.0):
        """The first message that is wanted; fails when there is none in time."""
        with self._changed:
            found = self._changed.wait_for(lambda: [m for m in self.heard if wanted(m)], seconds)
            assert found, f"not among {self.heard}"
            return found[0]

    def await_silence(self, seconds: float = 10.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(error is not None for error in self.silences), seconds)

    def join(self, role: str, name: str, layout: Layout = LAYOUT, timeout: float = 10.0, **options) -> Joined:
        endpoint = options.pop("endpoint", PLACE if role == "publisher" else None)
        token = options.pop("token", None)
        join = Join(0, role, "r", name, layout, token, endpoint, **options)  # pyright: ignore[reportArgumentType]
        return self.link.join(join, timeout)


@pytest.fixture
def ear(stack: ExitStack) -> Callable[..., Ear]:
    """`ear(address)` is an `Ear`, closed at the end."""

    def make(address: str, **options) -> Ear:
        made = Ear(address, **options)
        stack.callback(made.link.close)
        return made

    return make
