"""The keeper: a listener, and a thread for every connection, over the `Holdings` of this process."""

import hmac
import os
import secrets
import socket
import threading
import time
from types import TracebackType
from typing import Self

import xxhash

from dcs.arguments import require_host, require_kind, require_label, require_port, require_whole
from dcs.control.address import require_token
from dcs.errors import Closed, CorruptChunk, DcsError, NoMemory, ProtocolError, StaleVersion, Unauthorized
from dcs.replicas.channel import Channel, ranges_of
from dcs.replicas.holdings import Arriving, Holdings
from dcs.replicas.memory import Memory
from dcs.replicas.messages import (
    Answer,
    Ask,
    Choose,
    Done,
    Drop,
    Dropped,
    Fetch,
    Forget,
    Found,
    Hand,
    Held,
    Hello,
    KeeperStatus,
    Need,
    Offer,
    Refused,
    Request,
    Shard,
    Watch,
    Welcome,
)
from dcs.scarcity import SCARCE, SCARCE_SECONDS, opening, start
from dcs.wire.machine import machine_id
from dcs.wire.tls import Tls, server_context, wrap

MAX_CONNECTIONS = 4096
HELLO_SECONDS = 5.0
STALL_SECONDS = 30.0  # without a byte from a rank that is sending or receiving
ROUNDS = 4  # how often a damaged chunk is asked for


def default_max_bytes() -> int:
    """Half of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class Keeper:
    """Holds shards of training state in the memory of this process, for ranks that may die.

    Run it outside of the ranks, one on each node: `serve_keeper` and `dcs keeper` do. Use it as a context
    manager, or call `start` and `close`; what it holds is gone when it is closed.

    Args:
        host, port: where to listen; off loopback a token is required; port 0 takes a free one.
        token: secret that every rank must show.
        max_bytes: of shards, and of buffers kept to be used again; None takes half of the machine's memory.
        domain: what fails together with this keeper, such as a rack; None takes the host's name.
        share_memory: whether ranks on this machine hand their memory over (a memfd that is mapped here,
            without a copy) rather than send it.
        tls: this keeper's certificate, to encrypt what comes over TCP; ranks have to give some, too.

    Attributes: `address` is `tcp://host:port`.
    Raises `Unauthorized` (no token off loopback) and `DcsError` (the port is taken).
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_bytes: int | None = None,
        domain: str | None = None,
        share_memory: bool = True,
        tls: Tls | None = None,
    ) -> None:
        require_host(host, "host")
        require_token(host, token, "the keeper")
        port = require_port(port, "the keeper")
        if max_bytes is not None:
            max_bytes = require_whole(max_bytes, "max_bytes", 1)
        if domain is not None:
            require_label(domain, "domain")
        require_kind(tls, Tls, "tls", "dcs.Tls(certificate, key, authority)")
        self.memory = Memory(default_max_bytes() if max_bytes is None else max_bytes)
        self.holdings = Holdings(self.memory)
        self._process = os.getpid()
        self._token = token
        self._tls = None if tls is None else server_context(tls)
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._closed = False
        self._closing = threading.Event()
        self._idle_since = time.monotonic()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with opening("the keeper"):
                listener = socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            raise DcsError(
                f"the keeper cannot bind {host}:{port}: {error}; choose another port, or 0"
            ) from error
        self.address = f"tcp://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        identity = secrets.token_hex(8)
        self._listeners = [listener]
        if share_memory:
            try:
                with opening("the keeper's Unix socket"):
                    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            except NoMemory:
                listener.close()
                raise
            local.bind(f"\0dcs-keeper-{identity}")  # abstract: no file that could be left behind
            local.listen(256)
            self._listeners.append(local)
        self.welcome = Welcome(
            identity,
            machine_id(),
            f"dcs-keeper-{identity}" if share_memory else "",
            domain or socket.gethostname(),
        )
        self._threads = [
            threading.Thread(target=self._accept, args=(each,), name="dcs-keeper-accept", daemon=True)
            for each in self._listeners
        ]

    def start(self) -> Self:
        """Start serving; returns itself."""
        if self._closed:
            raise Closed("this keeper was closed; make a new one")
        try:
            for thread in self._threads:
                if thread.ident is None:
                    start(thread, "the keeper")
        except NoMemory:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop listening, cut every connection, join the threads, let go of all shards. May be called
        twice. In a process that was forked off it does nothing.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._closing.set()
            connections = list(self._connections)
        self.holdings.close()
        for listener, thread in zip(self._listeners, self._threads, strict=True):
            if thread.ident is not None:
                listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
                thread.join()
            listener.close()
        for connection in connections:
            connection.channel.cut()
        for connection in connections:
            connection.thread.join()
        self.holdings.let_go()

    @property
    def idle_seconds(self) -> float:
        """For how long nobody has been connected."""
        with self._lock:
            return 0.0 if self._connections else time.monotonic() - self._idle_since

    @property
    def connections(self) -> int:
        """How many connections are open."""
        with self._lock:
            return len(self._connections)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def authorize(self, hello: Request) -> Welcome | Refused:
        """Whether a connection that opens like this is served."""
        if not isinstance(hello, Hello):
            return Refused(ProtocolError.code, "a connection has to open with a hello")
        if self._token is not None and not hmac.compare_digest(
            (hello.token or "").encode(), self._token.encode()
        ):
            shown = "no token" if hello.token is None else "a wrong token"
            return Refused(Unauthorized.code, f"{hello.who} showed {shown}; give it the keeper's token")
        return self.welcome

    def ended(self, connection: "_Connection") -> None:
        """A connection is over."""
        with self._lock:
            self._connections.remove(connection)
            if not self._connections:
                self._idle_since = time.monotonic()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except ConnectionAbortedError:
                continue  # it hung up before it was accepted
            except OSError as error:
                if self._closing.is_set():
                    return
                if error.errno not in SCARCE:
                    raise
                self._closing.wait(SCARCE_SECONDS)  # until somebody hangs up
                continue
            with self._lock:
                if self._closed or len(self._connections) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                try:
                    if self._tls is not None and sock.family != socket.AF_UNIX:
                        sock = wrap(sock, self._tls)
                    connection = _Connection(self, sock)
                except OSError:
                    sock.close()
                    continue  # it hung up already
                try:
                    connection.thread.start()
                except RuntimeError:  # no memory for another thread; the rank comes again
                    sock.close()
                    continue
                self._connections.append(connection)


class _Connection:
    """A connection, and the thread that serves it."""

    def __init__(self, keeper: Keeper, sock: socket.socket) -> None:
        self._keeper = keeper
        self._holdings = keeper.holdings
        self._who = "a peer"
        self.channel = Channel(sock, HELLO_SECONDS, self._who)
        self.thread = threading.Thread(target=self._run, name="dcs-keeper-serve", daemon=True)

    def _run(self) -> None:
        try:
            if self._welcome():
                self._serve()
        except Closed:
            return
        except DcsError as error:
            self._say_goodbye(error)
        except OSError:
            return  # gone, stalled, or cut: it connects again and goes on, or its shard stays incomplete
        finally:
            self._keeper.ended(self)
            self.channel.close()

    def _say_goodbye(self, error: DcsError) -> None:
        """The stream cannot be read any further; say why, if there is still somebody to hear it."""
        try:
            self.channel.send(Refused(error.code, str(error)))
        except OSError:
            return

    def _welcome(self) -> bool:
        self.channel.shake_hands(HELLO_SECONDS)
        self.channel.set_deadline(HELLO_SECONDS)
        answer = self._keeper.authorize(self.channel.hello(HELLO_SECONDS))
        self.channel.send(answer)
        self.channel.set_deadline(STALL_SECONDS)
        return isinstance(answer, Welcome)

    def _serve(self) -> None:
        while True:
            request = self.channel.idle_request()
            if isinstance(request, Offer):
                self._receive(request)
            elif isinstance(request, Fetch):
                self._give(request)
            else:
                try:
                    answer = self._answer(request)
                except Closed:
                    raise
                except DcsError as error:
                    answer = Refused(error.code, str(error))
                self.channel.send(answer)

    def _answer(self, request: Request) -> Answer:
        holdings = self._holdings
        if isinstance(request, Watch):
            if request.session:
                holdings.open(request.name, request.session, request.attempt, request.world_size)
            holdings.retain(request.name, request.session, request.floor)
            source = (request.session, request.rank)
            return holdings.inventory(request.name, request.generation, request.seconds, source)
        if isinstance(request, Hand):
            return self._take(request)
        if isinstance(request, Drop):
            return Dropped(holdings.drop(request))
        if isinstance(request, Choose):
            holdings.choose(request.name, request.session, request.choice)
            return Done()
        if isinstance(request, Forget):
            holdings.forget(request.name)
            return Done()
        if isinstance(request, Ask):
            memory, keeper = self._keeper.memory, self._keeper
            names = holdings.status()
            return KeeperStatus(
                keeper.welcome.keeper, memory.used_bytes, memory.max_bytes, keeper.connections, names
            )
        raise ProtocolError(f"a {type(request).__name__} was not expected here")

    def _held(self, shard: Shard, dropped: tuple[bool, ...] = ()) -> Held:
        return Held(self._holdings.inventory(shard.name, 0, 0.0), dropped)

    def _take(self, request: Hand) -> Held:
        shard, holdings = request.shard, self._holdings
        if not self.channel.local:
            raise ProtocolError(f"{shard} was handed over where memory cannot be passed")
        if not shard.intact:
            raise CorruptChunk(f"the description of {shard} was damaged on its way")
        holdings.retain(shard.name, shard.session, request.floor)
        dropped = tuple(holdings.drop(which) for which in request.drops)
        if request.copy:
            self._copy(shard)
        else:
            region = self._keeper.memory.lend(self.channel.descriptor(), shard.nbytes, str(shard))
            holdings.hold(shard, region)
        return self._held(shard, dropped)

    def _copy(self, shard: Shard) -> None:
        arriving = self._holdings.begin(shard)
        if arriving is None:
            return
        memory = arriving.region.memory
        arriving.missing.update(range(shard.chunks))  # also what is here already is written again
        try:
            self._keeper.memory.copy(self.channel.descriptor(), arriving.region, shard.nbytes, str(shard))
            for chunk in range(shard.chunks):
                start, end = shard.span(chunk)
                if xxhash.xxh3_128_digest(memory[start:end]) != shard.digest(chunk):
                    # Given up meanwhile, and its memory used again for a newer step.
                    raise CorruptChunk(f"chunk {chunk} of {shard} was not in its memory any more")
                arriving.missing.discard(chunk)
            self._holdings.finish(arriving)
        except DcsError:
            self._holdings.abandon(arriving)
            raise
        finally:
            arriving.guard.release()

    def _receive(self, request: Offer) -> None:
        shard = request.shard
        try:
            if not shard.intact:
                raise CorruptChunk(f"the description of {shard} was damaged on its way")
            self._holdings.retain(shard.name, shard.session, request.floor)
            arriving = self._holdings.begin(shard)
        except DcsError as error:
            if request.pushed:
                self.channel.skip_chunks(shard)
            self.channel.send(Refused(error.code, str(error)))
            return
        if arriving is None:
            if request.pushed:
                self.channel.skip_chunks(shard)
            self.channel.send(self._held(shard))
            return
        try:
            if request.pushed:
                self.channel.receive_chunks(
                    shard, [(0, shard.chunks)], arriving.region.memory, arriving.missing
                )
            else:
                self._reuse(shard, arriving)
            answer = self._chunks(shard, arriving)
        finally:
            arriving.guard.release()
        self.channel.send(answer)

    def _chunks(self, shard: Shard, arriving: Arriving) -> Held | Refused:
        memory = arriving.region.memory
        rounds = ROUNDS
        while arriving.missing:
            if rounds == 0:
                # The part that is good stays, for whoever offers the shard again.
                return Refused(
                    CorruptChunk.code,
                    f"{len(arriving.missing)} chunks of {shard} were damaged on their way {ROUNDS} times",
                )
            rounds -= 1
            ranges = ranges_of(arriving.missing)
            self.channel.send(Need(ranges))
            self.channel.receive_chunks(shard, ranges, memory, arriving.missing)
        try:
            self._holdings.finish(arriving)
        except DcsError as error:
            return Refused(error.code, str(error))
        return self._held(shard)

    def _reuse(self, shard: Shard, arriving: Arriving) -> None:
        """Copy the chunks that this rank's last shard has in common with this one: frozen layers, say."""
        older = self._holdings.older(shard)
        if older is None:
            return
        same = [chunk for chunk in arriving.missing if older.digest(chunk) == shard.digest(chunk)]
        if not same:
            return
        try:
            with self._holdings.reading(older) as kept:
                for chunk in same:
                    start, end = shard.span(chunk)
                    part = arriving.region.memory[start:end]
                    part[:] = kept.region.memory[start:end]
                    if xxhash.xxh3_128_digest(part) == shard.digest(chunk):
                        arriving.missing.discard(chunk)
        except StaleVersion:
            return  # dropped a moment ago: all of the shard comes over the wire

    def _give(self, request: Fetch) -> None:
        try:
            with self._holdings.reading(request) as kept:
                shard = kept.shard
                ranges = [(0, shard.chunks)] if request.ranges is None else request.ranges
                self.channel.send(Found(shard))
                self.channel.send_chunks(shard, ranges, kept.region.memory)
        except ProtocolError:
            raise
        except DcsError as error:
            self.channel.send(Refused(error.code, str(error)))
