"""What the kernel has carried over this process's TCP connections, as it counts for each of them."""

import contextlib
import os
import socket
import struct
from pathlib import Path

_BYTES_ACKED = 120
"""Offset in `struct tcp_info` (linux/tcp.h) of a 64-bit count: what has left here and arrived, each byte "
"once."""


class SentBytes:
    """Bytes that left through TCP connections. Ask before they end.

    Args:
        port: those accepted there; None: all of the process.
    """

    def __init__(self, port: int | None = None) -> None:
        self._port = port
        self._by_connection: dict[str, int] = {}

    def read(self) -> int:
        """Of all connections seen at any reading, since each began."""
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # closed since it was listed
                name = os.readlink(entry)
                if name.startswith("socket:"):
                    sent = _sent(os.dup(int(entry.name)), self._port)
                    if sent is not None:
                        self._by_connection[name] = sent
        return sum(self._by_connection.values())


def _sent(descriptor: int, port: int | None) -> int | None:
    with socket.socket(fileno=descriptor) as connection:
        if connection.family != socket.AF_INET or connection.type != socket.SOCK_STREAM:
            return None
        if port is not None and connection.getsockname()[1] != port:
            return None
        with contextlib.suppress(OSError):  # the listener, or not connected
            connection.getpeername()
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            return struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
    return None
