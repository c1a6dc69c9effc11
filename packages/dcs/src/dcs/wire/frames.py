"""What is on the wire: the handshake, requests and replies."""

import socket
import struct
import time
from typing import Annotated

import msgspec

from dcs.control.messages import PROTOCOL, Label, Text
from dcs.errors import ProtocolError, ProtocolMismatch
from dcs.manifest import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from dcs.wire.streams import receive, send

MAX_HELLO_BYTES = 64 << 10
HELLO_SECONDS = 5.0

SELECT, CHUNKS, DONE, MAP, MANIFEST = 1, 2, 3, 4, 5  # operations
OK, SUPERSEDED, REFUSED, WAITING = 0, 1, 2, 3  # statuses
DENSE, DELTA = 0, 1  # encodings of a chunk
NO_BASE = (1 << 64) - 1
WAITING_SECONDS = 0.5  # how often a source that waits for its own source says so

WHOLE = 0
"""The selection that is there from the start: all of the source's buffer."""

# operation, selection, version, base version, mark, first chunk, number of chunks
#   SELECT: `selection` gets the rows that follow, int64 [number of chunks, 4]
#   CHUNKS: send them, as differences from `base` where that is smaller; MAP, MANIFEST, DONE: of `version`
REQUEST = struct.Struct("<B3xIQQ16sII")
# status, encoding, chunk index, length of what follows, hash of the chunk, hash of the base's chunk
#   OK to MAP: `hash` is the arena's number, the encoding is 1 when its descriptor comes along, `base` is the
#   lowest number of an arena that there still is
REPLY = struct.Struct("<BB2xIIQQ")

_MAGIC = b"dcsw"
HELLO = struct.Struct("<4sHxxI")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A subscriber to a source: who is asking, for what run, with which layout, in chunks of which size."""

    run: Label
    name: Label
    member: int
    fingerprint: Annotated[str, msgspec.Meta(max_length=64)]
    token: Text | None
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The source serves this connection; these are its own layout's and its own size of chunks."""

    fingerprint: Annotated[str, msgspec.Meta(max_length=64)]
    chunk_bytes: int


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The source does not, and closes it."""

    code: str
    message: str


def encode_hello(hello: Hello | Welcome | Refusal) -> bytes:
    """One message of the handshake, as it travels."""
    body = msgspec.msgpack.encode(hello)
    return HELLO.pack(_MAGIC, PROTOCOL, len(body)) + body


def send_hello(sock: socket.socket, hello: Hello | Welcome | Refusal) -> None:
    """Send one message of the handshake."""
    send(sock, encode_hello(hello))


def receive_hello(sock: socket.socket, sender: str) -> Hello | Welcome | Refusal:
    """One message of the handshake; raises `ProtocolMismatch`, `ProtocolError`, or as `receive_into`."""
    deadline = time.monotonic() + HELLO_SECONDS  # for all of it: a byte now and then does not extend it
    magic, protocol, length = HELLO.unpack(receive(sock, HELLO.size, deadline))
    if magic != _MAGIC:
        raise ProtocolError(f"{sender} opened with {magic!r}, which is no dcs hello; is the address right?")
    if protocol != PROTOCOL:
        raise ProtocolMismatch(
            f"{sender} speaks dcs protocol {protocol}, this side speaks {PROTOCOL}; install the same"
            " relax-dcs on both"
        )
    if length > MAX_HELLO_BYTES:
        raise ProtocolError(f"{sender} sent a hello of {length} bytes, at most {MAX_HELLO_BYTES} are allowed")
    try:
        return msgspec.msgpack.decode(receive(sock, length, deadline), type=Hello | Welcome | Refusal)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{sender} sent a hello that cannot be read: {error}") from error
