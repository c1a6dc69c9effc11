"""One connection between a rank and a keeper: messages and chunks over a blocking socket, every wait bounded.

Every frame opens with 16 bytes: a magic, the protocol's version, what it is, a chunk's index, and the length
of what follows. A chunk is received into the memory it belongs to, and is verified there by whoever asked for
it.
"""

import math
import os
import socket
import ssl
import struct
import time

import msgspec
import xxhash

from dcs.errors import ProtocolError, ProtocolMismatch
from dcs.replicas.errors import KeeperFull
from dcs.replicas.messages import CHUNK_BYTES, MAX_MESSAGE_BYTES, PROTOCOL, Answer, Ranges, Request, Shard
from dcs.wire import streams
from dcs.wire.tls import handshake

SOCKET_BUFFER_BYTES = 4 << 20
MAX_HELLO_BYTES = 64 << 10

_MAGIC = b"dcsk"
_TLS_RECORDS = (b"\x15", b"\x16")  # an alert, a handshake
_FRAME = struct.Struct("<4sHBxII")
_MESSAGE, _CHUNK = 0, 1
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def parse(address: str) -> tuple[str, int]:
    """Host and port of `tcp://host:port`; raises `ProtocolError`."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ProtocolError(f"{address!r} is no address of a keeper; expected tcp://host:port")
    return host.strip("[]"), int(port)


def connect(host: str, port: int, seconds: float) -> socket.socket:
    """A TCP connection to a keeper. Raises `OSError`."""
    return socket.create_connection((host, port), timeout=seconds)


def connect_local(path: str, seconds: float) -> socket.socket:
    """A connection to the abstract Unix socket `path`. Raises `OSError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(f"\0{path}")
    except BaseException:
        sock.close()
        raise
    return sock


class Channel:
    """Frames over a connected socket, which it owns. One thread uses it at a time; any may `cut` it."""

    def __init__(self, sock: socket.socket, seconds: float, peer: str) -> None:
        self._sock = sock
        self._peer = peer
        self.local = sock.family == socket.AF_UNIX
        self._cut_short = False  # this process had no descriptor left for one that was passed
        self._passed: list[int] = []  # descriptors that came with a request, not taken yet
        if self.local:  # a TCP socket is left to the kernel, which grows its buffers with the distance
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        self.set_deadline(seconds)

    def shake_hands(self, seconds: float) -> None:
        """Agree on keys, over a socket that was wrapped for TLS. Raises as `tls.handshake`."""
        if isinstance(self._sock, ssl.SSLSocket):
            handshake(self._sock, self._peer, seconds)

    def set_deadline(self, seconds: float) -> None:
        """Bound every read and write from now on: so long may pass without a byte. At least 1 ms."""
        streams.set_deadlines(self._sock, max(seconds, 0.001))

    def cut(self) -> None:
        """End the connection from another thread, which ends whatever waits on it."""
        streams.cut(self._sock)

    def close(self) -> None:
        """Release the socket, and descriptors that nobody took."""
        self._sock.close()
        self._close_passed()

    def _close_passed(self) -> None:
        while self._passed:
            os.close(self._passed.pop())

    def fileno(self) -> int:
        """The socket's descriptor, to wait for it among others."""
        return self._sock.fileno()

    # -- messages --

    def send(self, message: Request | Answer) -> None:
        """Send a message. Raises `OSError`."""
        streams.send(self._sock, *self._frame(message))

    def _frame(self, message: Request | Answer) -> tuple[bytes, bytes]:
        body = _ENCODER.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a message of {len(body)} bytes to {self._peer}, at most {MAX_MESSAGE_BYTES} are allowed; "
                "keep bulk data in tensors or numpy arrays rather than in plain lists"
            )
        return _FRAME.pack(_MAGIC, PROTOCOL, _MESSAGE, 0, len(body)), body

    def hello(self, seconds: float) -> Request:
        """The first request, all of which has to come within `seconds`. Raises as `answer`."""
        deadline = time.monotonic() + seconds  # a byte now and then does not extend it
        return self._decode(_REQUESTS, self._header(deadline=deadline), MAX_HELLO_BYTES, deadline)

    def idle_request(self) -> Request:
        """The next request, however long it takes to come. Raises as `answer` once it has begun to come."""
        self._close_passed()
        while True:
            try:
                first = self._begin()
            except BlockingIOError:
                continue  # idle: `cut` ends the wait
            return self._decode(_REQUESTS, self._header(first))

    def _begin(self) -> bytes:
        """As much of a header as comes at once, and the descriptors that come with it."""
        if not self.local:
            return bytes(streams.receive(self._sock, 1))
        data, descriptors, flags, _ = socket.recv_fds(self._sock, _FRAME.size, 4, socket.MSG_CMSG_CLOEXEC)
        self._cut_short |= bool(flags & socket.MSG_CTRUNC)
        self._passed += descriptors
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        return data

    def answer(self) -> Answer:
        """The next answer.

        Raises `ConnectionError` (it was cut), `BlockingIOError` (nothing came in time), `ProtocolError` and
        `ProtocolMismatch`.
        """
        return self._decode(_ANSWERS, self._header())

    def ask(self, message: Request) -> Answer:
        """Send a request and wait for its answer; raises as both."""
        self.send(message)
        return self.answer()

    # -- memory and chunks --

    def send_with(self, message: Request, descriptor: int, flags: int = 0) -> None:
        """Send a message with a file descriptor, which the other side takes with `descriptor`.

        With MSG_DONTWAIT as `flags` it goes at once, or not at all. Raises `OSError`.
        """
        frame = self._frame(message)
        sent = socket.send_fds(self._sock, frame, [descriptor], flags)
        for part in frame:
            if sent < len(part):
                self._sock.sendall(memoryview(part)[sent:], flags)
            sent = max(0, sent - len(part))

    def descriptor(self) -> int:
        """The descriptor that came with the last request; the caller closes it.

        Raises `ProtocolError` when there is none, or another one, and `KeeperFull` when this process could
        not take it.
        """
        cut_short, self._cut_short = self._cut_short, False
        if cut_short and not self._passed:
            raise KeeperFull(
                "the keeper's process has no descriptor left for memory that it is handed; raise its limit"
                " (ulimit -n)"
            )
        if len(self._passed) != 1:
            raise ProtocolError(f"{self._peer} passed {len(self._passed)} descriptors, expected one")
        return self._passed.pop()

    def send_chunks(self, shard: Shard, ranges: Ranges, memory: memoryview) -> None:
        """Send the chunks of `ranges` of a shard that lies in `memory`. Raises `OSError`, `ProtocolError`."""
        for chunk in self._indices(shard, ranges):
            start, end = shard.span(chunk)
            header = _FRAME.pack(_MAGIC, PROTOCOL, _CHUNK, chunk, end - start)
            streams.send(self._sock, header, memory[start:end])

    def receive_chunks(self, shard: Shard, ranges: Ranges, memory: memoryview, missing: set[int]) -> None:
        """Receive the chunks of `ranges` to where they belong in `memory`, and take them out of `missing`.

        One that is damaged is missing from then on. Raises as `answer`; a chunk that was not asked for is a
        `ProtocolError`.
        """
        for chunk in self._indices(shard, ranges):
            start, end = shard.span(chunk)
            _, _, kind, index, length = self._header()
            if (kind, index, length) != (_CHUNK, chunk, end - start):
                raise ProtocolError(
                    f"{self._peer} sent chunk {index} of {length} bytes, expected chunk {chunk} of "
                    f"{end - start}"
                )
            streams.receive_into(self._sock, memory[start:end])
            if xxhash.xxh3_128_digest(memory[start:end]) == shard.digest(chunk):
                missing.discard(chunk)
            else:
                missing.add(chunk)

    def skip_chunks(self, shard: Shard) -> None:
        """Read all chunks of a shard, for nothing. Raises as `receive_chunks`."""
        largest = min(shard.nbytes, CHUNK_BYTES)
        nowhere = memoryview(bytearray(largest))
        for _ in range(shard.chunks):
            _, _, kind, _, length = self._header()
            if kind != _CHUNK or length > largest:
                raise ProtocolError(
                    f"{self._peer} sent a frame of kind {kind} and {length} bytes, expected a chunk"
                )
            streams.receive_into(self._sock, nowhere[:length])

    def _indices(self, shard: Shard, ranges: Ranges) -> list[int]:
        if any(first + count > shard.chunks for first, count in ranges):
            raise ProtocolError(f"{self._peer} asked for chunks {ranges} of {shard.chunks}")
        return [chunk for first, count in ranges for chunk in range(first, first + count)]

    def _header(self, first: bytes = b"", deadline: float = math.inf) -> tuple[bytes, int, int, int, int]:
        header = _FRAME.unpack(first + streams.receive(self._sock, _FRAME.size - len(first), deadline))
        if header[0] != _MAGIC:
            hint = "give tls=... to both sides" if header[0][:1] in _TLS_RECORDS else "is the address right?"
            raise ProtocolError(f"{self._peer} sent {header[0]!r}, which opens no frame; {hint}")
        if header[1] != PROTOCOL:
            raise ProtocolMismatch(
                f"{self._peer} speaks replica protocol {header[1]}, this side speaks {PROTOCOL}; install the "
                "same relax-dcs on both"
            )
        return header

    def _decode[T](
        self,
        decoder: "msgspec.msgpack.Decoder[T]",
        header: tuple[bytes, int, int, int, int],
        limit: int = MAX_MESSAGE_BYTES,
        deadline: float = math.inf,
    ) -> T:
        _, _, kind, _, length = header
        if kind != _MESSAGE or length > limit:
            raise ProtocolError(
                f"{self._peer} sent a frame of kind {kind} and {length} bytes, expected a message of at "
                f"most {limit}"
            )
        try:
            return decoder.decode(streams.receive(self._sock, length, deadline))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"{self._peer} sent a message that cannot be read: {error}") from error


def ranges_of(chunks: set[int]) -> Ranges:
    """Chunks as sorted runs of (first, count)."""
    runs: Ranges = []
    for chunk in sorted(chunks):
        if runs and chunk == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((chunk, 1))
    return runs
