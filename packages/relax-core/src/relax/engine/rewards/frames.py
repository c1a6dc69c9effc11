"""Messages over a pipe: four bytes of length, then msgpack."""

import struct
from typing import Any

import msgspec

HEADER = struct.Struct("!I")
READY = "ready"


def encode(message: Any) -> bytes:
    """Header and body of one message of plain data."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Any:
    """The message of a frame's body."""
    return msgspec.msgpack.decode(body)
