"""A rank's side of one keeper: a thread that watches what it holds, and a connection that shards go over."""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Protocol

from dcs.errors import Closed, DcsError, ProtocolError
from dcs.replicas.channel import Channel, connect, connect_local, parse, ranges_of
from dcs.replicas.errors import KeeperLost, from_refusal
from dcs.replicas.messages import (
    Answer,
    Done,
    Drop,
    Dropped,
    Fetch,
    Floor,
    Found,
    Hand,
    Held,
    Hello,
    Inventory,
    Need,
    Offer,
    Refused,
    Request,
    Shard,
    Watch,
    Welcome,
)
from dcs.wire.machine import machine_id
from dcs.wire.tls import wrap

CONNECT_SECONDS = 3.0
WATCH_SECONDS = 2.0  # between two signs of life from a keeper of which nothing changes
SILENCE_SECONDS = 5.0  # more than that, and it counts as lost
RETRY_SECONDS = 0.5
MAX_RESUMES = 8  # in a row, without a chunk getting through


class Watcher(Protocol):
    """Who a link belongs to."""

    def watch(self, generation: int, seconds: float) -> Watch:
        """What to ask the keeper for."""
        ...

    def changed(self) -> None:
        """The keeper holds something else, or was found or lost."""
        ...

    def awaiting(self) -> None:
        """Somebody waits for the answer to what was posted."""
        ...


class Link:
    """One keeper, as seen by one rank.

    Attributes:
        address: as it was given.
        view: what it holds, or None while it is not reachable.
        fault: why it is not reachable.
        welcome: what it last said about itself.
    """

    def __init__(
        self, address: str, who: str, token: str | None, watcher: Watcher, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address = address
        self._host, self._port = parse(address)
        self._hello = Hello(who, token)
        self._watcher = watcher
        self._tls = tls
        self._machine = machine_id()
        self.view: Inventory | None = None
        self.fault: DcsError | None = None
        self.welcome: Welcome | None = None
        self.tried = threading.Event()  # the first attempt to reach it is over
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of the connection that shards go over
        self._data: Channel | None = None
        self._opened = False  # it answered the hello of the last connection that shards went over
        self._viewing = threading.Lock()
        self._sent: bytes = b""  # digests of the last shard that went there
        self._cuttable = threading.Lock()
        self._open: set[Channel] = set()
        self._thread = threading.Thread(target=self._watch, name="dcs-replicas-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Cut both connections and join the thread. May be called twice."""
        self._closing.set()
        self._cut_all()
        self._watcher.awaiting()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            self._lose_data()

    @property
    def up(self) -> bool:
        """Whether it answers."""
        return self.view is not None

    @property
    def local(self) -> bool:
        """Whether memory can be handed over to it."""
        return self.welcome is not None and self.welcome.machine == self._machine and self.welcome.path != ""

    def cut(self) -> None:
        """End what is being sent or received, from any thread."""
        with self._cuttable:
            data = self._data
            if data is not None and data in self._open:
                data.cut()

    def _cut_all(self) -> None:
        with self._cuttable:
            for channel in self._open:
                channel.cut()

    # -- shards --

    def post(self, message: Hand, descriptor: int) -> int | None:
        """Hand a shard over without waiting for anything: `collect` takes the answer.

        Returns the descriptor of the connection, which can be read once there is an answer, or None: it is in
        use, or there is none, and `hand` or `send` have to do it. Until `collect`, nobody else can use it.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            data = self._data
            if data is not None and data.local:
                data.send_with(message, descriptor, socket.MSG_DONTWAIT)
                return data.fileno()
        except OSError:
            self._lose_data()
        except BaseException:
            self._lock.release()
            raise
        self._lock.release()
        return None

    def collect(self) -> Held:
        """The answer to what was posted. Raises as `hand`."""
        try:
            data = self._data
            if data is None:
                raise KeeperLost(f"keeper {self.address} was lost")
            return self._accepted(Held, self._exchange(Channel.answer))
        finally:
            self._lock.release()

    def hand(self, shard: Shard, descriptor: int, floor: Floor | None) -> None:
        """Let the keeper map a memfd. Raises `KeeperLost`, and what the keeper refuses it with."""

        def hand(channel: Channel) -> Answer:
            channel.send_with(Hand(shard, floor), descriptor)
            return channel.answer()

        self.note(self._expect(Held, hand).inventory)
        self._watcher.changed()

    def send(
        self, shard: Shard, memory: memoryview, floor: Floor | None, given_up: Callable[[], bool]
    ) -> None:
        """Send a shard, going on after a cut with what is missing. Raises as `hand`."""
        missing, resumes = shard.chunks + 1, 0
        # At once, rather than ask first, where asking takes longer than sending for nothing.
        push = shard.chunks == 1 and shard.digests != self._sent

        def offer(channel: Channel) -> Answer:
            nonlocal missing, resumes, push
            if given_up():  # before there was a connection that could have been cut
                raise KeeperLost(f"{shard} is not sent to keeper {self.address} any more")
            channel.send(Offer(shard, floor, push))
            if push:
                push = False
                channel.send_chunks(shard, [(0, shard.chunks)], memory)
            answer = channel.answer()
            while isinstance(answer, Need):
                wanted = sum(count for _, count in answer.ranges)
                missing, resumes = (wanted, 0) if wanted < missing else (missing, resumes)
                channel.send_chunks(shard, answer.ranges, memory)
                answer = channel.answer()
            return answer

        while True:
            try:
                held = self._expect(Held, offer, again=False)
                break
            except KeeperLost:
                resumes += 1
                # Whoever does not even answer a hello would hold the copy up for as long as all of them take.
                unreachable = not self._opened
                if unreachable or resumes > MAX_RESUMES or given_up() or self._closing.is_set():
                    raise
        self._sent = shard.digests
        self.note(held.inventory)
        self._watcher.changed()

    def drop(self, which: Drop) -> bool:
        """Whether the keeper has let go of a shard for good. Raises as `hand`."""
        return self._expect(Dropped, lambda channel: channel.ask(which)).free

    def find(self, which: Fetch) -> Shard:
        """What a shard has to be. Raises as `hand`."""
        return self._expect(Found, lambda channel: channel.ask(which)).shard

    def fetch(self, shard: Shard, missing: set[int], memory: memoryview) -> None:
        """Receive the chunks in `missing`, taking those that came undamaged out of it. Raises as `hand`."""

        def fetch(channel: Channel) -> Answer:
            ranges = ranges_of(missing)
            answer = channel.ask(Fetch(shard.name, shard.session, shard.rank, shard.step, ranges))
            if isinstance(answer, Found):
                channel.receive_chunks(shard, ranges, memory, missing)
            return answer

        self._expect(Found, fetch)

    def tell(self, message: Request) -> None:
        """Have something done. Raises as `hand`."""
        self._expect(Done, lambda channel: channel.ask(message))

    def look(self, watch: Watch) -> Inventory:
        """What it holds now; opens the session of `watch`. Raises as `hand`."""
        view = self._expect(Inventory, lambda channel: channel.ask(watch))
        self.note(view)
        return view

    def ask[T: Answer](self, message: Request, kind: type[T]) -> T:
        """Any request with its answer. Raises as `hand`."""
        return self._expect(kind, lambda channel: channel.ask(message))

    # -- connections --

    def _expect[T](self, kind: type[T], exchange: Callable[[Channel], Answer], again: bool = True) -> T:
        if self._lock.locked():
            self._watcher.awaiting()
        with self._lock:
            used = again and self._data is not None
            try:
                answer = self._exchange(exchange)
            except KeeperLost:
                if not used:
                    raise
                answer = self._exchange(
                    exchange
                )  # it was cut while nobody used it: every request may be repeated
        return self._accepted(kind, answer)

    def _accepted[T](self, kind: type[T], answer: Answer) -> T:
        if isinstance(answer, Refused):
            raise from_refusal(answer.code, answer.message)
        if not isinstance(answer, kind):
            raise ProtocolError(f"keeper {self.address} answered with {answer!r}, expected {kind.__name__}")
        return answer

    def _exchange(self, exchange: Callable[[Channel], Answer]) -> Answer:
        try:
            if self._data is None:
                self._opened = False
                self._data = self._connect(self.local)
                self._opened = True
                opening = self._data.ask(self._watcher.watch(0, 0.0))
                if isinstance(opening, Refused):
                    raise from_refusal(opening.code, opening.message)
            return exchange(self._data)
        except DcsError:
            self._lose_data()  # in the middle of something
            raise
        except OSError as error:
            self._lose_data()
            raise KeeperLost(f"keeper {self.address} was lost: {error}") from error

    def _lose_data(self) -> None:
        if self._data is not None:
            self._close(self._data)
            self._data = None

    def _connect(self, local: bool) -> Channel:
        """A connection, welcomed. Raises `KeeperLost`, `Unauthorized`, `ProtocolError`,
        `ProtocolMismatch`.
        """
        welcome = self.welcome
        try:
            if local and welcome is not None:
                sock = connect_local(welcome.path, CONNECT_SECONDS)
            else:
                sock = connect(self._host, self._port, CONNECT_SECONDS)
                if self._tls is not None:
                    sock = wrap(sock, self._tls, self._host)
        except OSError as error:
            raise KeeperLost(f"keeper {self.address} cannot be reached: {error}") from error
        channel = Channel(sock, CONNECT_SECONDS, f"keeper {self.address}")
        with self._cuttable:
            self._open.add(channel)
        try:
            if self._closing.is_set():
                raise Closed("the replicas were closed")
            channel.shake_hands(CONNECT_SECONDS)
            channel.set_deadline(CONNECT_SECONDS)
            answer = channel.ask(self._hello)
            if isinstance(answer, Refused):
                raise from_refusal(answer.code, answer.message)
            if not isinstance(answer, Welcome):
                raise ProtocolError(f"keeper {self.address} answered a hello with {answer!r}")
        except DcsError:
            self._close(channel)
            raise
        except OSError as error:
            self._close(channel)
            raise KeeperLost(f"keeper {self.address} was lost: {error}") from error
        self.welcome = answer
        channel.set_deadline(SILENCE_SECONDS)
        return channel

    def _close(self, channel: Channel) -> None:
        with self._cuttable:
            self._open.discard(channel)
            channel.close()

    def _watch(self) -> None:
        while not self._closing.is_set():
            try:
                channel = self._connect(local=False)
                try:
                    self._follow(channel)
                finally:
                    self._close(channel)
            except DcsError as error:
                self._lost(error)
            except OSError as error:
                self._lost(KeeperLost(f"keeper {self.address} was lost: {error}"))
            self._closing.wait(RETRY_SECONDS)

    def _follow(self, channel: Channel) -> None:
        channel.set_deadline(WATCH_SECONDS + SILENCE_SECONDS)
        generation, seconds = 0, 0.0
        while not self._closing.is_set():
            answer = channel.ask(self._watcher.watch(generation, seconds))
            if isinstance(answer, Refused):
                self._lost(from_refusal(answer.code, answer.message))
                return
            if not isinstance(answer, Inventory):
                raise ProtocolError(f"keeper {self.address} answered a watch with {answer!r}")
            self.note(answer, first=not seconds)
            view = self.view
            generation, seconds = answer.generation if view is None else view.generation, WATCH_SECONDS
            self.fault = None
            self.tried.set()
            self._watcher.changed()

    def note(self, view: Inventory, *, first: bool = False) -> None:
        """What the keeper holds, unless it is older than what is known: answers come over two connections.

        The `first` one of a connection always counts: the keeper may have started to count anew.
        """
        with self._viewing:
            if first or (self.view is not None and view.generation >= self.view.generation):
                self.view = view

    def _lost(self, fault: DcsError) -> None:
        with self._viewing:
            self.view = None
        self.fault = fault
        self.cut()  # a shard that is on its way there goes elsewhere
        self.tried.set()
        self._watcher.changed()


def await_first(links: list[Link], seconds: float) -> None:
    """Wait until every link has been tried.

    Raises what a keeper refuses us with (a wrong token, another protocol), and `KeeperLost` when none is
    reachable.
    """
    deadline = time.monotonic() + seconds
    for link in links:
        link.tried.wait(max(0.0, deadline - time.monotonic()))
    for link in links:
        if link.fault is not None and not isinstance(link.fault, KeeperLost):
            raise link.fault
    if not any(link.up for link in links):
        reasons = "; ".join(str(link.fault or f"{link.address} did not answer") for link in links)
        raise KeeperLost(f"none of {len(links)} keepers can be reached within {seconds} s: {reasons}")
