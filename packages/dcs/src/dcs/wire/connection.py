"""A reader's end: one connection to a source, over which it asks for chunks, memory or the manifest."""

import itertools
import socket
import ssl
from collections.abc import Callable, Sequence

import numpy as np

from dcs import manifest as manifests
from dcs.control.messages import Endpoint, Source
from dcs.errors import NoMemory, ProtocolError, from_refusal
from dcs.manifest import Manifest
from dcs.memory.shelf import Superseded
from dcs.wire import frames, streams, tls

CONNECT_SECONDS = 5.0
# Without a single byte from the source; one that waits itself says so more often. For a peer there is another
# source to turn to; a training rank may just be busy.
PEER_STALL_SECONDS = 1.0
RANK_STALL_SECONDS = 5.0


class Connection:
    """Connects, or raises `OSError`; call `greet` before anything else.

    Args:
        source: whom to connect to.
        unix: over its Unix socket, for `map`.
        context: for TLS; not over a Unix socket.

    Attributes:
        welcome: what the source said of itself.
    """

    def __init__(self, source: Source, unix: bool = False, context: ssl.SSLContext | None = None) -> None:
        self.source = source
        self.unix = unix
        self.welcome = frames.Welcome("", 0)
        self._header = bytearray(frames.REPLY.size)
        self._numbers = itertools.count(1)
        self._selections: dict[bytes, int] = {}
        endpoint = source.endpoint
        if unix:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._sock.settimeout(CONNECT_SECONDS)
                self._sock.connect(f"\0{endpoint.path}")
            except BaseException:
                self._sock.close()
                raise
        else:
            self._sock = socket.create_connection((endpoint.host, endpoint.port), CONNECT_SECONDS)
            if context is not None:
                self._sock = tls.wrap(self._sock, context, endpoint.host)

    def greet(self, hello: frames.Hello) -> None:
        """Say hello; raises what it is refused with, `ProtocolError`, or `OSError`."""
        sender = f"{self.source.name!r} at {where(self.source.endpoint)}"
        if isinstance(self._sock, ssl.SSLSocket):
            tls.handshake(self._sock, sender)
        streams.set_deadlines(self._sock, frames.HELLO_SECONDS)
        frames.send_hello(self._sock, hello)
        answer = frames.receive_hello(self._sock, sender)
        if isinstance(answer, frames.Refusal):
            raise from_refusal(answer.code, answer.message, {})
        if not isinstance(answer, frames.Welcome):
            raise ProtocolError(f"{sender} answered a hello with a hello")
        self.welcome = answer
        rank = self.source.rank >= 0
        streams.set_deadlines(self._sock, RANK_STALL_SECONDS if rank else PEER_STALL_SECONDS)

    def select(self, rows: np.ndarray, key: bytes) -> int:
        """The number of a selection, which is sent when the source does not have it yet."""
        number = self._selections.get(key)
        if number is None:
            number = self._selections[key] = next(self._numbers)
            header = frames.REQUEST.pack(frames.SELECT, number, 0, 0, bytes(16), 0, len(rows))
            streams.send(self._sock, header, memoryview(rows.astype("<i8")).cast("B"))
        return number

    def ask(
        self,
        operation: int,
        version: int,
        mark: bytes,
        *,
        selection: int = frames.WHOLE,
        base: int = frames.NO_BASE,
        first: int = 0,
        count: int = 0,
    ) -> None:
        """Send one request."""
        streams.send(self._sock, frames.REQUEST.pack(operation, selection, version, base, mark, first, count))

    def reply(self, waiting: Callable[[], None]) -> tuple[int, int, int, int, int]:
        """The header of the next answer: encoding, index, length, hash, hash of the base.

        Calls `waiting` whenever the source says that it waits for its own source. Raises `Superseded`,
        `ProtocolError`, `OSError`.
        """
        while True:
            streams.receive_into(self._sock, memoryview(self._header))
            status, encoding, index, length, value, base = frames.REPLY.unpack(self._header)
            if status == frames.OK:
                return encoding, index, length, value, base
            if status == frames.SUPERSEDED:
                raise Superseded
            if status != frames.WAITING:
                raise ProtocolError(f"{self.source.name!r} refused a request (status {status})")
            waiting()

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with what follows a header. Raises `OSError`."""
        streams.receive_into(self._sock, view)

    def receive_parts(self, parts: Sequence[memoryview]) -> None:
        """Fill several views with what follows a header, by one call where that does. Raises `OSError`."""
        streams.receive_parts(self._sock, parts)

    def map(self, version: int, mark: bytes, waiting: Callable[[], None]) -> tuple[int, int | None, int]:
        """The number of the arena that holds a version, its descriptor unless it came before, and the lowest
        number that is still of use.
        """
        self.ask(frames.MAP, version, mark)
        while True:
            header, descriptors, flags, _ = socket.recv_fds(
                self._sock, frames.REPLY.size, 1, socket.MSG_CMSG_CLOEXEC
            )
            if flags & socket.MSG_CTRUNC:
                raise NoMemory(
                    f"no descriptor left to map the memory of {self.source.name!r}; free some, or raise their"
                    " limit (ulimit -n)"
                )
            if len(header) < frames.REPLY.size:
                raise ConnectionResetError("the source closed the connection")
            status, fresh, _, _, number, lowest = frames.REPLY.unpack(header)
            if status == frames.WAITING:
                waiting()
            elif status == frames.SUPERSEDED:
                raise Superseded
            elif status != frames.OK or len(descriptors) != fresh:
                raise ProtocolError(f"{self.source.name!r} does not let its memory be mapped")
            else:
                return number, descriptors[0] if descriptors else None, lowest

    def manifest(self, version: int, root: bytes, nbytes: int, waiting: Callable[[], None]) -> Manifest:
        """The verified manifest of a rank's part. Raises as `reply`, and `CorruptChunk`."""
        self.ask(frames.MANIFEST, version, root)
        _, _, length, _, _ = self.reply(waiting)
        if length > manifests.encoded_limit(nbytes):
            raise ProtocolError(f"{self.source.name!r} sent a manifest of {length} bytes")
        raw = streams.receive(self._sock, length)
        found = manifests.decode(raw, self.welcome.fingerprint, nbytes, root)
        if found.version != version:
            raise ProtocolError(f"{self.source.name!r} gave the manifest of version {found.version}")
        return found

    def done(self, version: int, mark: bytes) -> None:
        """Say that a version is not read any more. Raises `OSError`."""
        self.ask(frames.DONE, version, mark)

    def cut(self) -> None:
        """End the connection from another thread; whoever reads from it gets an `OSError`."""
        streams.cut(self._sock)

    def close(self) -> None:
        """Close the socket; only by the thread that reads from it."""
        self._sock.close()


def where(endpoint: Endpoint) -> str:
    """An endpoint as people write it."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.port}"
