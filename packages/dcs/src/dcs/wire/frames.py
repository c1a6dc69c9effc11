"""What is on the wire: the handshake, requests, replies, and exact reads and writes on a blocking socket."""

import math
import socket
import struct
import time
from typing import Annotated

import msgspec

from dcs.control.messages import PROTOCOL, Label, Text
from dcs.errors import ProtocolError, ProtocolMismatch

MAX_HELLO_BYTES = 64 << 10
HELLO_SECONDS = 5.0

MANIFEST, CHUNKS, DONE = 1, 2, 3  # operations
OK, SUPERSEDED, REFUSED = 0, 1, 2  # statuses
TO_THE_END = 0xFFFFFFFF

# operation, epoch, version, first chunk, number of chunks
REQUEST = struct.Struct("<B7xQQII")
# status, chunk index (0 for a manifest), length of what follows
REPLY = struct.Struct("<B3xII")

_MAGIC = b"dcsw"
HELLO = struct.Struct("<4sHxxI")
_TIMEVAL = struct.Struct("@ll")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A subscriber to a publisher: who is asking, for what run, with which layout."""

    run: Label
    name: Label
    member: int
    fingerprint: Annotated[str, msgspec.Meta(max_length=64)]
    token: Text | None


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The publisher serves this connection."""


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The publisher does not, and closes it."""

    code: str
    message: str


def set_deadlines(sock: socket.socket, seconds: float) -> None:
    """Bound every blocking read and write. SO_RCVTIMEO, as `settimeout` costs a poll per call."""
    whole, part = int(seconds), int((seconds % 1) * 1e6)
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(whole, part))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(whole, part))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def receive_into(sock: socket.socket, view: memoryview, deadline: float = math.inf) -> None:
    """Fill `view`.

    Raises `ConnectionError` at the end of the stream, `BlockingIOError` when nothing came in time.
    """
    while view.nbytes:
        count = sock.recv_into(view, view.nbytes, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
        view = view[count:]
        if view.nbytes and time.monotonic() > deadline:
            raise BlockingIOError(f"{view.nbytes} bytes were still missing at the deadline")


def receive(sock: socket.socket, length: int, deadline: float = math.inf) -> bytearray:
    """Exactly `length` bytes; raises as `receive_into`."""
    data = bytearray(length)
    receive_into(sock, memoryview(data), deadline)
    return data


def send(sock: socket.socket, header: bytes, payload: memoryview | bytes = b"") -> None:
    """Send both in as few system calls as the kernel allows. Raises `OSError`."""
    sent = sock.sendmsg([header, payload])
    if sent < len(header):
        sock.sendall(header[sent:])
        sent = len(header)
    rest = memoryview(payload)[sent - len(header) :]
    if rest.nbytes:
        sock.sendall(rest)


def send_hello(sock: socket.socket, hello: Hello | Welcome | Refusal) -> None:
    """Send one message of the handshake."""
    body = msgspec.msgpack.encode(hello)
    send(sock, HELLO.pack(_MAGIC, PROTOCOL, len(body)), body)


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
