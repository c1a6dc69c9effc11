"""Exact reads and writes on a blocking connection, plain or TLS, with the same deadlines and the same errors.

A TLS socket has neither `sendmsg` nor MSG_WAITALL, ignores SO_RCVTIMEO (OpenSSL would just try again), and
its own `shutdown` forgets the session under a thread that is reading. Only one thread at a time may use a TLS
connection, both directions together; `cut` alone may come from any.
"""

import math
import socket
import ssl
import struct
import time
from collections.abc import Sequence

MAX_PARTS = 256  # of one `sendmsg`, or one `recvmsg_into`

_LOCAL_SEND_BYTES = 384 << 10  # on their way within a machine; the kernel doubles it for its own needs
_TIMEVAL = struct.Struct("@ll")
_RECORD_BYTES = 16 << 10  # the most that one TLS record carries


def set_deadlines(sock: socket.socket, seconds: float) -> None:
    """Bound every blocking read and write: each has to move something within `seconds`."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds)
    else:  # SO_RCVTIMEO, as `settimeout` costs a poll per call
        whole, part = int(seconds), int((seconds % 1) * 1e6)
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(whole, part))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(whole, part))
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.getpeername()[0] == sock.getsockname()[0]:
            # Within a machine nothing is lost, and a congestion control that paces (bbr) costs a third.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # part of every kernel
            # What is on its way stays in the caches, where both of the kernel's copies find it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)


def receive_into(sock: socket.socket, view: memoryview, deadline: float = math.inf) -> None:
    """Fill `view`, a flat one of bytes.

    Raises `ConnectionError` at the end of the stream, `BlockingIOError` when nothing came in time.
    """
    secured = sock if isinstance(sock, ssl.SSLSocket) else None
    while view.nbytes:
        if secured is None:
            count = sock.recv_into(view, view.nbytes, socket.MSG_WAITALL)
        else:
            count = _read_record(secured, view)
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


def receive_parts(sock: socket.socket, parts: Sequence[memoryview], deadline: float = math.inf) -> None:
    """Fill flat views of bytes one after the other, at most `MAX_PARTS`; raises as `receive_into`."""
    count = 0
    if not isinstance(sock, ssl.SSLSocket) and any(part.nbytes for part in parts):
        count = sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise ConnectionResetError("the peer closed the connection")
    for part in parts:  # what is still missing
        if count < part.nbytes:
            receive_into(sock, part[count:], deadline)
        count = max(0, count - part.nbytes)


def send(sock: socket.socket, header: bytes, *payload: memoryview | bytes) -> None:
    """Send flat bytes in as few system calls as the kernel (or TLS) allows; at most `MAX_PARTS` in all.

    Raises `OSError`. Nobody knows then how much the peer has: the connection is of no more use.
    """
    if isinstance(sock, ssl.SSLSocket):
        _send_records(sock, (header, *payload))
        return
    sent = sock.sendmsg([header, *payload])
    for part in (header, *payload):
        size = len(part)
        if sent < size:
            sock.sendall(memoryview(part)[sent:])
        sent = max(0, sent - size)


def cut(sock: socket.socket) -> None:
    """End the connection from any thread: whoever reads or writes it gets an error at once."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # the peer was faster


def _read_record(sock: ssl.SSLSocket, view: memoryview) -> int:
    try:
        return sock.recv_into(view, view.nbytes)
    except TimeoutError as error:
        raise BlockingIOError(f"nothing came within {sock.gettimeout()} s") from error


def _send_records(sock: ssl.SSLSocket, parts: Sequence[memoryview | bytes]) -> None:
    small: list[memoryview | bytes] = []  # go together: each call makes a record and a packet of its own
    waiting = 0
    try:
        for part in parts:
            if waiting + len(part) > _RECORD_BYTES:
                sock.sendall(b"".join(small))
                small, waiting = [], 0
            if len(part) > _RECORD_BYTES:
                sock.sendall(part)
            else:
                small.append(part)
                waiting += len(part)
        sock.sendall(b"".join(small))
    except TimeoutError as error:
        raise BlockingIOError(f"the peer took nothing within {sock.gettimeout()} s") from error
