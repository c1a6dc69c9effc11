"""Frames on a tether: four bytes of length, then msgpack."""

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

LENGTH = struct.Struct(">I")
LARGEST = 1 << 20
"""Bytes of a frame; tracebacks are cut to fit."""


class BadFrame(ValueError):
    """Whoever is at the other end does not speak this language."""


class Inbox:
    """Bytes as they come become messages of a union of structs."""

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[Any]:
        """The messages that are whole now.

        Raises:
            BadFrame: a frame is too long, or no message.
        """
        self._bytes += received
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            if length > LARGEST:
                raise BadFrame(f"a frame of {length} bytes; at most {LARGEST} are sent on a tether")
            end = LENGTH.size + length
            if len(self._bytes) < end:
                return
            content = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            try:
                yield self._decoder.decode(content)
            except msgspec.DecodeError as error:
                raise BadFrame(f"a frame that is no message: {error}") from error


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send one message; raises OSError when the other end is gone, or takes nothing until the timeout."""
    content = msgspec.msgpack.encode(message)
    connection.sendall(LENGTH.pack(len(content)) + content)
