"""A source's end: listeners, and one thread a connection that answers requests for chunks of what is held."""

import hmac
import os
import socket
import ssl
import struct
import threading
import time

from dcs.control.messages import Endpoint
from dcs.errors import DcsError, NoMemory, ProtocolError, ProtocolMismatch, Unauthorized
from dcs.memory.shelf import Copy, NotYet, Shelf, Superseded
from dcs.scarcity import SCARCE, SCARCE_SECONDS, opening, start
from dcs.wire import frames, streams, tls
from dcs.wire.chunks import Selected, Selection, read_rows
from dcs.wire.machine import machine_id
from dcs.wire.tls import Tls

MAX_CONNECTIONS = 1024
MAX_SELECTIONS = 32  # of one connection
_SEND_SECONDS = 30.0  # without a single byte taken by the reader
_PEER_CREDENTIALS = struct.Struct("3i")


class ChunkServer:
    """Serves the copies on one shelf.

    Args:
        shelf: what is served.
        host, port: where to listen; port 0 takes a free one.
        run, token: what a reader's hello has to show.
        fingerprint, chunk_bytes: of the layout and the copies here.
        mappable: also listen on a Unix socket, where processes of the same user may map what is held.
        patience: seconds to wait for a version that is not here yet, as a relay does.
        unit: bytes of most elements, for differences between versions.
        identity: for TLS with readers of other machines; they have to speak it then.
        who: how to call this side in errors.
    """

    def __init__(
        self,
        shelf: Shelf,
        host: str,
        port: int,
        *,
        run: str,
        fingerprint: str,
        chunk_bytes: int,
        token: str | None,
        mappable: bool,
        patience: float,
        unit: int,
        identity: Tls | None,
        who: str,
    ) -> None:
        self.shelf = shelf
        self.run = run
        self.fingerprint = fingerprint
        self.chunk_bytes = chunk_bytes
        self.patience = patience
        self.unit = unit
        self.context = None if identity is None else tls.server_context(identity)
        self.who = who
        self.sent = 0  # payload bytes, all connections together
        self._token = token
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._closed = False
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with opening(f"the server of {who}"):
                listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise DcsError(f"{who} cannot bind {host}:{port}: {error}; choose another port, or 0") from error
        self.port: int = listener.getsockname()[1]
        self.path = ""
        self._listeners = [listener]
        if mappable:
            # An abstract name: it ends with the process, however that ends.
            self.path = f"dcs-{os.getpid()}-{os.urandom(8).hex()}"
            try:
                with opening(f"the Unix socket of {who}"):
                    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            except NoMemory:
                listener.close()
                raise
            unix.bind(f"\0{self.path}")
            unix.listen(128)
            self._listeners.append(unix)
        self._threads = [
            threading.Thread(target=self._accept, args=(each,), name="dcs-accept", daemon=True)
            for each in self._listeners
        ]
        try:
            for thread in self._threads:
                start(thread, f"the server of {who}")
        except NoMemory:
            self.close()
            raise

    def endpoint(self, host: str) -> Endpoint:
        """Where it can be reached, as the coordinator tells others."""
        return Endpoint(host, self.port, machine_id(), self.path)

    @property
    def sends(self) -> bool:
        """Whether there is a reader that takes its bytes over TCP, and does not map them."""
        with self._lock:
            return any(connection.sends for connection in self._connections)

    def drop(self, member: int) -> None:
        """Cut the connections of a reader that has been evicted."""
        with self._lock:
            for connection in self._connections:
                if connection.member == member:
                    connection.cut()

    def close(self) -> None:
        """Stop listening, cut every connection, join the threads. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._closing.set()
            for listener in self._listeners:
                listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            for connection in self._connections:
                connection.cut()
            threads = [connection.thread for connection in self._connections]
        for thread in (*self._threads, *threads):
            if thread.ident is not None:
                thread.join()
        for listener in self._listeners:
            listener.close()

    def count(self, nbytes: int) -> None:
        """Add to `sent`."""
        with self._lock:
            self.sent += nbytes

    def authorize(self, hello: frames.Hello) -> frames.Welcome | frames.Refusal:
        """Whether a hello is one that this source serves."""
        if self._token is not None and not hmac.compare_digest(
            (hello.token or "").encode(), self._token.encode()
        ):
            got = "no token" if hello.token is None else "a wrong token"
            return frames.Refusal(
                Unauthorized.code, f"{hello.name!r} showed {got} to {self.who}; give it the run's token"
            )
        if hello.run != self.run:
            return frames.Refusal(
                DcsError.code, f"{hello.name!r} asked for run {hello.run!r}, {self.who} serves {self.run!r}"
            )
        return frames.Welcome(self.fingerprint, self.chunk_bytes)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except ConnectionAbortedError:
                continue  # it hung up before it was accepted
            except OSError as error:
                if self._closed:
                    return
                if error.errno not in SCARCE:
                    raise
                self._closing.wait(SCARCE_SECONDS)  # others may close some
                continue
            with self._lock:
                self._reap()
                if self._closed or len(self._connections) >= MAX_CONNECTIONS or not _same_user(sock):
                    sock.close()
                    continue
                connection = _Connection(self, sock)
                try:
                    connection.thread.start()
                except RuntimeError:  # no memory for another thread; the reader asks somebody else, or again
                    sock.close()
                    continue
                self._connections.append(connection)

    def _reap(self) -> None:
        for connection in [ended for ended in self._connections if not ended.open]:
            connection.thread.join()
            self._connections.remove(connection)


def _same_user(sock: socket.socket) -> bool:
    """Whether a Unix socket's peer runs as this user; an abstract name has no permissions of its own."""
    if sock.family != socket.AF_UNIX:
        return True
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return _PEER_CREDENTIALS.unpack(raw)[1] in (os.geteuid(), 0)


class _Connection:
    """One reader's connection, and the thread that serves it."""

    def __init__(self, server: ChunkServer, sock: socket.socket) -> None:
        self._server = server
        self._shelf = server.shelf
        self._sock = sock
        self._lock = threading.Lock()
        self._copies: list[Copy] = []
        self._selections: dict[int, Selection] = {}
        self._given: set[int] = set()  # numbers of the arenas whose descriptors the reader has
        self._chunk_bytes = 0
        self.open = True
        self.maps = False
        self.sends = False
        self.member = 0
        self.thread = threading.Thread(target=self._run, name="dcs-serve", daemon=True)

    def cut(self) -> None:
        """Shut the socket down, which ends the thread wherever it blocks."""
        with self._lock:
            if self.open:
                streams.cut(self._sock)

    def _run(self) -> None:
        try:
            if self._welcome():
                self.sends = self._sock.family != socket.AF_UNIX
                self._serve()
        except (OSError, DcsError):
            return  # gone, stalled, cut or refused: it reconnects and resumes, or its lease lapses
        finally:
            for copy in self._copies:
                self._shelf.close_reader(self, copy, done=False)
            self._copies.clear()  # their memory may have to go
            with self._lock:
                self.open = self.sends = False
                self._sock.close()

    def _welcome(self) -> bool:
        if self._server.context is not None and self._sock.family != socket.AF_UNIX:
            self._secure(self._server.context)
        streams.set_deadlines(self._sock, frames.HELLO_SECONDS)
        try:
            hello = frames.receive_hello(self._sock, "a reader")
            if not isinstance(hello, frames.Hello):
                raise ProtocolError("a reader opened with an answer, expected a hello")
        except (ProtocolError, ProtocolMismatch) as error:
            frames.send_hello(self._sock, frames.Refusal(error.code, str(error)))
            return False
        answer = self._server.authorize(hello)
        frames.send_hello(self._sock, answer)
        self.member = hello.member
        self._fingerprint = hello.fingerprint
        self._chunk_bytes = hello.chunk_bytes
        streams.set_deadlines(self._sock, _SEND_SECONDS)
        return isinstance(answer, frames.Welcome)

    def _secure(self, context: ssl.SSLContext) -> None:
        """Speak TLS from here on. Raises `DcsError` and `OSError`."""
        tls.refuse_plain(self._sock, "a reader")
        with self._lock:  # `cut` may come at any time
            secured = tls.wrap(self._sock, context)
            self._sock = secured
        tls.handshake(secured, "a reader")

    def _serve(self) -> None:
        while True:
            request = frames.REQUEST.unpack(self._next_request())
            operation, selection, version, base, mark, first, count = request
            try:
                match operation:
                    case frames.SELECT:
                        if len(self._selections) >= MAX_SELECTIONS:
                            raise ProtocolError(f"more than {MAX_SELECTIONS} selections over one connection")
                        rows = read_rows(self._sock, count, self._shelf.layout.offsets()[1])
                        self._selections[selection] = Selection.of(rows, self._chunk_bytes)
                    case frames.CHUNKS:
                        copy = self._copy(version, mark)
                        self._send_chunks(copy, self._selection(selection, copy), base, first, count)
                    case frames.MAP:
                        self._send_memory(self._copy(version, mark))
                    case frames.MANIFEST:
                        self._send_manifest(self._copy(version, mark))
                    case frames.DONE:
                        self._close_copy(version, mark)
                    case _:
                        raise ProtocolError(f"operation {operation} is none of this protocol's")
            except Superseded:
                self._reply(frames.SUPERSEDED)
            except ProtocolError:
                self._reply(frames.REFUSED)
                return

    def _next_request(self) -> bytearray:
        """The next request, however long it takes: between versions a reader has nothing to ask."""
        while True:
            try:
                first = streams.receive(self._sock, 1)
            except BlockingIOError:
                continue  # still idle; `cut` ends the wait
            return first + streams.receive(self._sock, frames.REQUEST.size - 1)

    def _reply(self, status: int, index: int = 0) -> None:
        streams.send(self._sock, frames.REPLY.pack(status, 0, index, 0, 0, 0))

    def _copy(self, version: int, mark: bytes) -> Copy:
        for copy in self._copies:
            if (copy.version, copy.mark) == (version, mark):
                return copy
        deadline = time.monotonic() + self._server.patience
        while True:
            try:
                copy = self._shelf.open(
                    self, version, mark, min(self._server.patience, frames.WAITING_SECONDS)
                )
                self._copies.append(copy)
                return copy
            except NotYet:
                if time.monotonic() >= deadline:
                    raise
                self._reply(frames.WAITING)

    def _close_copy(self, version: int, mark: bytes) -> None:
        for copy in self._copies:
            if (copy.version, copy.mark) == (version, mark):
                self._copies.remove(copy)
                self._shelf.close_reader(self, copy, done=True)
                return

    def _selection(self, number: int, copy: Copy) -> Selection:
        selection = self._selections.get(number)
        if selection is None and number == frames.WHOLE:
            selection = self._selections[number] = Selection.all_of(copy.arena.nbytes, self._chunk_bytes)
        if selection is None:
            raise ProtocolError(f"selection {number} was never sent")
        return selection

    def _await(self, copy: Copy, selected: Selected, index: int | None) -> None:
        """Until a chunk (None: all of them) has arrived here; tells the reader that it is waited for."""
        while not self._shelf.await_chunk(copy, lambda: selected.arrived(index), frames.WAITING_SECONDS):
            self._reply(frames.WAITING)

    def _send_chunks(self, copy: Copy, selection: Selection, base: int, first: int, count: int) -> None:
        if first + count > len(selection):
            raise ProtocolError(f"asked for chunks {first} to {first + count} of {len(selection)}")
        older = None if base == frames.NO_BASE else self._shelf.find(base)
        selected = Selected(copy, selection, older, self._server.unit)
        index, end, sent = first, first + count, 0
        try:
            while index < end:
                if not selected.arrived(index):
                    self._await(copy, selected, index)
                with self._shelf.sending(copy):  # as long as there is something to send, and it is wanted
                    while index < end and not copy.retired and selected.arrived(index):
                        encoding, hashes, parts, nbytes = selected.read(index, self._shelf)
                        header = frames.REPLY.pack(frames.OK, encoding, index, nbytes, *hashes)
                        streams.send(self._sock, header, *parts)
                        sent += nbytes
                        index += 1
        finally:
            self._server.count(sent)

    def _send_memory(self, copy: Copy) -> None:
        if self._sock.family != socket.AF_UNIX or self._fingerprint != self._server.fingerprint:
            raise ProtocolError("memory is mapped over a Unix socket, by readers with the same layout")
        if copy.arena.mapped:  # its owner, which writes it when we are done, does not know of this reader
            self._close_copy(copy.version, copy.mark)
            raise Superseded
        self.maps = True
        self._await(copy, Selected(copy, self._selection(frames.WHOLE, copy), None, 1), None)
        arena = copy.arena
        fresh = arena.number not in self._given
        self._given.add(arena.number)
        header = frames.REPLY.pack(frames.OK, int(fresh), 0, 0, arena.number, self._shelf.oldest_arena)
        with self._shelf.sending(copy):
            socket.send_fds(self._sock, [header], [arena.descriptor] if fresh else [])

    def _send_manifest(self, copy: Copy) -> None:
        self._await(copy, Selected(copy, self._selection(frames.WHOLE, copy), None, 1), None)
        encoded = copy.manifest(self._server.fingerprint).encode()
        streams.send(self._sock, frames.REPLY.pack(frames.OK, 0, 0, len(encoded), 0, 0), encoded)
