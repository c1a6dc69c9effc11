"""The publisher's end: a listener, and one thread per subscriber that answers its chunk requests."""

import hmac
import socket
import threading

from dcs.errors import DcsError, ProtocolError, ProtocolMismatch, Unauthorized
from dcs.manifest import chunk_count
from dcs.memory.snapshots import Snapshot, SnapshotPair, Superseded
from dcs.wire import frames

MAX_CONNECTIONS = 256
_SEND_SECONDS = 30.0  # without a single byte taken by the subscriber


class ChunkServer:
    """Serves the snapshots of one publisher.

    Args:
        snapshots: what is served.
        host, port: where to listen; port 0 takes a free one.
        run, fingerprint, token: what a subscriber's hello has to show.
    """

    def __init__(
        self, snapshots: SnapshotPair, host: str, port: int, run: str, fingerprint: str, token: str | None
    ) -> None:
        self._snapshots = snapshots
        self.run = run
        self.fingerprint = fingerprint
        self._token = token
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise DcsError(
                f"the publisher cannot bind {host}:{port}: {error}; choose another port, or 0"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="dcs-accept", daemon=True)
        self._thread.start()

    def drop(self, member: int) -> None:
        """Cut the connections of a subscriber that has been evicted."""
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
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            for connection in self._connections:
                connection.cut()
            threads = [connection.thread for connection in self._connections]
        self._thread.join()
        self._listener.close()
        for thread in threads:
            thread.join()

    def authorize(self, hello: frames.Hello) -> frames.Welcome | frames.Refusal:
        """Whether a hello is one that this publisher serves."""
        if self._token is not None and not hmac.compare_digest(
            (hello.token or "").encode(), self._token.encode()
        ):
            got = "no token" if hello.token is None else "a wrong token"
            return frames.Refusal(
                Unauthorized.code, f"subscriber {hello.name!r} showed {got}; give it the publisher's token"
            )
        if (hello.run, hello.fingerprint) != (self.run, self.fingerprint):
            return frames.Refusal(
                DcsError.code,
                f"subscriber {hello.name!r} asked for run {hello.run!r} with layout {hello.fingerprint},"
                f" this publisher serves run {self.run!r} with layout {self.fingerprint}",
            )
        return frames.Welcome()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue  # it hung up before it was accepted
            except OSError:
                if self._closed:
                    return
                raise
            with self._lock:
                self._reap()
                if self._closed or len(self._connections) >= MAX_CONNECTIONS:
                    sock.close()
                    continue
                connection = _Connection(self, self._snapshots, sock)
                self._connections.append(connection)
                connection.thread.start()

    def _reap(self) -> None:
        for connection in [ended for ended in self._connections if not ended.open]:
            connection.thread.join()
            self._connections.remove(connection)


class _Connection:
    """One subscriber's connection, and the thread that serves it."""

    def __init__(self, server: ChunkServer, snapshots: SnapshotPair, sock: socket.socket) -> None:
        self._server = server
        self._snapshots = snapshots
        self._sock = sock
        self._lock = threading.Lock()
        self.open = True
        self.member = 0
        self.thread = threading.Thread(target=self._run, name="dcs-serve", daemon=True)

    def cut(self) -> None:
        """Shut the socket down, which ends the thread wherever it blocks."""
        with self._lock:
            if self.open:
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # the peer was faster

    def _run(self) -> None:
        try:
            if self._welcome():
                self._serve()
        except OSError:
            return  # gone, stalled or cut: it reconnects and resumes, or its lease lapses
        finally:
            with self._lock:
                self.open = False
                self._sock.close()

    def _welcome(self) -> bool:
        frames.set_deadlines(self._sock, frames.HELLO_SECONDS)
        try:
            hello = frames.receive_hello(self._sock, "a subscriber")
            if not isinstance(hello, frames.Hello):
                raise ProtocolError("a subscriber opened with an answer, expected a hello")
        except (ProtocolError, ProtocolMismatch) as error:
            frames.send_hello(self._sock, frames.Refusal(error.code, str(error)))
            return False
        answer = self._server.authorize(hello)
        frames.send_hello(self._sock, answer)
        self.member = hello.member
        frames.set_deadlines(self._sock, _SEND_SECONDS)
        return isinstance(answer, frames.Welcome)

    def _serve(self) -> None:
        current: Snapshot | None = None
        try:
            while True:
                operation, epoch, version, first, count = frames.REQUEST.unpack(self._next_request())
                if operation == frames.DONE or (current is not None and operation == frames.MANIFEST):
                    if current is not None:
                        self._snapshots.close(self, current)
                        current = None
                    if operation == frames.DONE:
                        continue
                if operation == frames.MANIFEST:
                    try:
                        current = self._snapshots.open(self, epoch, version)
                    except Superseded:
                        frames.send(self._sock, frames.REPLY.pack(frames.SUPERSEDED, 0, 0))
                        continue
                    encoded = current.encoded
                    frames.send(self._sock, frames.REPLY.pack(frames.OK, 0, len(encoded)), encoded)
                elif operation == frames.CHUNKS:
                    self._send_chunks(current, epoch, version, first, count)
                else:
                    frames.send(self._sock, frames.REPLY.pack(frames.REFUSED, 0, 0))
                    return
        finally:
            if current is not None:
                self._snapshots.close(self, current)

    def _next_request(self) -> bytearray:
        """The next request, however long it takes: between versions a subscriber has nothing to ask."""
        while True:
            try:
                first = frames.receive(self._sock, 1)
            except BlockingIOError:
                continue  # still idle; `cut` ends the wait
            return first + frames.receive(self._sock, frames.REQUEST.size - 1)

    def _send_chunks(
        self, current: Snapshot | None, epoch: int, version: int, first: int, count: int
    ) -> None:
        manifest = None if current is None else current.manifest
        if current is None or manifest is None or (manifest.epoch, manifest.version) != (epoch, version):
            frames.send(self._sock, frames.REPLY.pack(frames.SUPERSEDED, 0, 0))
            return
        total = chunk_count(manifest.nbytes, manifest.chunk_bytes)
        last = total if count == frames.TO_THE_END else first + count
        if first > total or last > total:
            frames.send(self._sock, frames.REPLY.pack(frames.REFUSED, first, 0))
            raise ConnectionAbortedError(f"asked for chunks {first} to {last} of {total}")
        for index in range(first, last):
            try:
                with self._snapshots.chunk(current, index) as payload:
                    frames.send(self._sock, frames.REPLY.pack(frames.OK, index, payload.nbytes), payload)
            except Superseded:
                frames.send(self._sock, frames.REPLY.pack(frames.SUPERSEDED, index, 0))
                return
