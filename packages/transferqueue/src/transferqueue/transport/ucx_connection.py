"""One UCX connection: who may have it, and how messages and payload go over it.

The two sides first prove to each other that they know the token, without showing it: each answers the other's
nonce with an HMAC over everything exchanged so far. Nothing after that is encrypted or signed: as with plain
ZeroMQ, the network between must be trusted.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import struct
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from ..errors import Malformed, ProtocolMismatch, QueueError, Timeout, Unauthorized
from .ucx_runtime import Runtime

log = logging.getLogger("transferqueue")

PROTOCOL = 1
MAX_BODY = 1 << 20  # bytes of one message that is no payload
ALIGNMENT = 64

_MAGIC = b"tq-ucx\0\0"
_HELLO = struct.Struct("<8sI32sQ")  # magic, protocol, nonce, tag of the sender
_PROOF = 32
_SIZE = struct.Struct("<Q")
_FIRST = 512  # bytes of a message's first part, which begins with its size; the rest follows if there is any
_INLINE = _FIRST - _SIZE.size
_DIGEST_INLINE = 4 << 20  # bytes; more is hashed beside the loop
_PACKED_BELOW = 1 << 20  # bytes; a message costs as much as the copy of that many
_PACK = 16 << 20  # bytes
_ABORT_PERIOD_NS = 1_000_000_000
_SETTLE = 10.0  # seconds in which UCX lets go of a buffer after its connection was closed


class Broken(Exception):
    """The connection is gone or unusable; says why. Never leaves the transport."""


class WriteRequest(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """The bytes of a range come after `Go`, as one message, and then their xxh3 as a `Checksum`."""

    grant: int
    arena: int
    start: int
    stop: int
    timeout: float


class ReadRequest(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """The bytes of ``(arena, start, stop)`` ranges come after `Go`, cut by `pieces`, then a `Checksum`."""

    ranges: list[tuple[int, int, int]]
    timeout: float


class Go(msgspec.Struct, frozen=True, array_like=True, tag="go"):
    """Granted: payload follows."""


class Checksum(msgspec.Struct, frozen=True, array_like=True, tag="sum"):
    """The xxh3 of the payload before it."""

    xxh3: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The range is written."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """An error of the package's family."""

    kind: str
    message: str
    details: dict[str, Any]


type Message = WriteRequest | ReadRequest | Go | Checksum | Done | Refused

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WriteRequest | ReadRequest | Go | Checksum | Done | Refused)


class Connection:
    """An endpoint after its handshake. Only the runtime's loop touches it.

    Every operation takes the time at which it must be over (loop time). One that is not, or fails, closes the
    connection, and does not return before UCX has let go of the buffers.
    """

    def __init__(self, runtime: Runtime, endpoint: Any) -> None:
        self._runtime = runtime
        self._endpoint: Any = endpoint
        self._send_tag: Any = None
        self._receive_tag: Any = None
        self.peer_proved = False

    @property
    def alive(self) -> bool:
        return self._endpoint is not None and self._endpoint.alive

    def abort(self) -> None:
        """Closes at once; what is under way fails. Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close_blocking(period=_ABORT_PERIOD_NS, max_attempts=1)
            endpoint.remove_close_callback()

    # -- handshake -------------------------------------------------------------------------------------------

    async def welcome(self, token: str, until: float) -> None:
        """The server's side of the handshake.

        Raises:
            Unauthorized: the client did not prove the token.
            ProtocolMismatch, Malformed: it is another protocol.
        """
        mine, tag = self._hello()
        await self._stream_send(mine, until)
        theirs = await self._stream_receive(_HELLO.size + _PROOF, until)
        hello, proof = theirs[: _HELLO.size], theirs[_HELLO.size :]
        peer_tag = _checked(hello)
        if not hmac.compare_digest(proof, _proof(token, b"client", mine, hello)):
            raise Unauthorized("a client did not prove that it knows the token")
        self.peer_proved = True
        await self._stream_send(_proof(token, b"server", mine, hello), until)
        self._set_tags(tag, peer_tag)

    async def introduce(self, token: str, until: float) -> None:
        """The client's side.

        Raises:
            Unauthorized: the server hung up on our proof, or gave none of its own.
            ProtocolMismatch, Malformed: it is another protocol.
        """
        theirs = await self._stream_receive(_HELLO.size, until)
        peer_tag = _checked(theirs)
        mine, tag = self._hello()
        await self._stream_send(mine + _proof(token, b"client", theirs, mine), until)
        try:
            proof = await self._stream_receive(_PROOF, until)
        except Broken as error:
            raise Unauthorized("the server refused the token; pass the token it was started with") from error
        if not hmac.compare_digest(proof, _proof(token, b"server", theirs, mine)):
            raise Unauthorized("the server did not prove that it knows the token; it may be another one")
        self.peer_proved = True
        self._set_tags(tag, peer_tag)

    def _hello(self) -> tuple[bytes, int]:
        tag = secrets.randbits(64)
        return _HELLO.pack(_MAGIC, PROTOCOL, secrets.token_bytes(32), tag), tag

    def _set_tags(self, mine: int, peer: int) -> None:
        types = _types()
        self._receive_tag, self._send_tag = types.Tag(mine), types.Tag(peer)
        self._mask = types.TagMaskFull

    async def _stream_send(self, data: bytes, until: float) -> None:
        buffer = np.frombuffer(data, np.uint8)
        await self._finish(self._live().stream_send(_array(buffer)), until, buffer)

    async def _stream_receive(self, nbytes: int, until: float) -> bytes:
        buffer = np.zeros(nbytes, np.uint8)
        await self._finish(self._live().stream_recv(_array(buffer)), until, buffer)
        return buffer.tobytes()

    # -- messages --------------------------------------------------------------------------------------------

    async def tell(self, message: Message, until: float) -> None:
        body = _encoder.encode(message)
        first = (_SIZE.pack(len(body)) + body[:_INLINE]).ljust(_FIRST, b"\0")
        await self.send(np.frombuffer(first, np.uint8), until)
        if len(body) > _INLINE:
            await self.send(np.frombuffer(body[_INLINE:], np.uint8), until)

    async def hear(self, until: float | None) -> Message:
        """The next message; `until` None waits for as long as the connection lasts.

        Raises:
            Malformed: what came is none.
        """
        first = np.zeros(_FIRST, np.uint8)
        await self.receive(first, until)
        (nbytes,) = _SIZE.unpack_from(first)
        if not 0 < nbytes <= MAX_BODY:
            raise Malformed(f"a message of {nbytes} bytes; 1 to {MAX_BODY} are expected")
        body = first[_SIZE.size : _SIZE.size + min(nbytes, _INLINE)].tobytes()
        if nbytes > _INLINE:
            rest = np.zeros(nbytes - _INLINE, np.uint8)
            # Who has sent the first part sends the rest at once.
            await self.receive(rest, until if until is not None else self._runtime.loop.time() + _SETTLE)
            body += rest.tobytes()
        try:
            return _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Malformed(f"{nbytes} bytes are no message of this protocol ({error})") from error

    # -- payload ---------------------------------------------------------------------------------------------

    async def send(self, data: np.ndarray, until: float) -> None:
        await self._finish(self._live().tag_send(_array(data), self._send_tag), until, data)

    async def receive(self, into: np.ndarray, until: float | None) -> None:
        request = self._live().tag_recv(_array(into), self._receive_tag, self._mask)
        await self._finish(request, until, into)

    def _live(self) -> Any:
        if self._endpoint is None:
            raise Broken("the connection was closed")
        try:
            self._endpoint.raise_on_error()
        except self._runtime.api.UCXError as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        return self._endpoint

    async def _finish(self, request: Any, until: float | None, buffer: np.ndarray) -> None:
        """Waits for a request of UCX; whatever happens, it is over afterwards and `buffer` is ours again."""
        waiting = asyncio.ensure_future(request.wait())
        timeout = None if until is None else max(0.0, until - self._runtime.loop.time())
        try:
            done, _ = await asyncio.wait({waiting}, timeout=timeout)
        except asyncio.CancelledError:
            await self._abandon(waiting, buffer)
            raise
        if not done:
            await self._abandon(waiting, buffer)
            raise Timeout("the other side did not go on in time")
        try:
            waiting.result()
        except (self._runtime.api.UCXError, RuntimeError, asyncio.CancelledError) as error:
            self.abort()
            raise Broken(f"{type(error).__name__}: {error}") from error
        if self._endpoint is None:
            raise Broken("the connection was closed")

    async def _abandon(self, waiting: "asyncio.Future[Any]", buffer: np.ndarray) -> None:
        """Closes the connection and waits until UCX has given the request up, as it then does. Should it ever
        not, the buffer is kept for good rather than given to someone else.
        """
        self.abort()
        await asyncio.wait({waiting}, timeout=_SETTLE)
        if not waiting.done():
            log.error("UCX holds a buffer of %d bytes of a closed connection; it is not freed", buffer.nbytes)
            _kept.append((waiting, buffer))
        elif not waiting.cancelled():
            waiting.exception()


_kept: list[tuple["asyncio.Future[Any]", np.ndarray]] = []


def _checked(hello: bytes) -> int:
    """The tag of a hello of our protocol."""
    magic, protocol, _, tag = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise Malformed(f"the other side does not speak this protocol (it began with {magic!r})")
    if protocol != PROTOCOL:
        raise ProtocolMismatch(
            f"the other side speaks version {protocol} of the UCX protocol, this one {PROTOCOL}; install the "
            "same transferqueue on both sides",
            got=protocol,
            expected=PROTOCOL,
        )
    return tag


def _proof(token: str, side: bytes, server_hello: bytes, client_hello: bytes) -> bytes:
    return hmac.digest(token.encode(), b"transferqueue " + side + server_hello + client_hello, hashlib.sha256)


def _types() -> Any:
    import ucxx.types  # type: ignore[import-not-found]  # optional: only there with the extra

    return ucxx.types


def _array(buffer: np.ndarray) -> Any:
    from ucxx._lib.arr import Array  # type: ignore[import-not-found]

    return Array(buffer)


# -- how ranges become messages ------------------------------------------------------------------------------


def layout(ranges: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Where each range begins in the reader's buffer (multiples of 64 bytes), and the size of it."""
    starts: list[int] = []
    at = 0
    for _, start, stop in ranges:
        starts.append(at)
        at += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
    return starts, at


def pieces(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Which ranges, from and to, go in one message: a large one by itself, small neighbours together."""
    found: list[tuple[int, int]] = []
    first = at = packed = 0
    for at, size in enumerate(sizes):
        if size >= _PACKED_BELOW or packed + size > _PACK:
            if first < at:
                found.append((first, at))
            first, packed = at, 0
        if size >= _PACKED_BELOW:
            found.append((at, at + 1))
            first = at + 1
        else:
            packed += size + ALIGNMENT
    if first < len(sizes):
        found.append((first, len(sizes)))
    return found


async def digest(parts: Sequence[np.ndarray]) -> int:
    """The xxh3 of the parts one after the other; large ones do not hold up the loop."""
    if sum(part.nbytes for part in parts) <= _DIGEST_INLINE:
        return _digest(parts)
    return await _uninterrupted(asyncio.get_running_loop().run_in_executor(None, _digest, parts))


def _digest(parts: Sequence[np.ndarray]) -> int:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


async def _uninterrupted[T](work: Awaitable[T]) -> T:
    """Waits for work in a thread to end even when cancelled: it reads memory that is not ours for long."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


def as_refusal(error: QueueError) -> Refused:
    return Refused(type(error).__name__, str(error), error.details)
