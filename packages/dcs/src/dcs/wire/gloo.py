"""The gloo side of a collective group.

Gloo cannot be aborted, and often notices that a connection was closed only when the timeout of the call has
passed. So the group keeps duplicates of gloo's sockets, to see a peer go and to shut its connections down.
They are found by the address of a listener that belongs to this group alone, which gloo writes to the store.
"""

import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from dcs.wire.rendezvous import Rendezvous, distributed


class GlooTransport:
    """See `Transport`. Connects to every peer before it returns."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=rendezvous.seconds)
        options._threads = 2
        here = _address_towards(rendezvous.host)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=here, lazy_init=False)]
        self._group: Any = distributed.ProcessGroupGloo(
            rendezvous.store, rendezvous.rank, rendezvous.size, options
        )
        blobs = [
            rendezvous.tcp.get(name)
            for name in rendezvous.tcp.list_keys()
            if name.startswith(f"{rendezvous.key}/") and "/here/" not in name
        ]
        self._sockets = _sockets_of(blobs)

    def start(self, bucket: torch.Tensor, source: int, seconds: float) -> Callable[[], None]:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        options.timeout = timedelta(seconds=seconds)
        return self._group.broadcast([bucket], options).wait

    def watched(self) -> Sequence[socket.socket]:
        return self._sockets

    def cut(self) -> None:
        for duplicate in self._sockets:
            with suppress(OSError):  # it is closed already, or the peer was first
                duplicate.shutdown(socket.SHUT_RDWR)

    def quiet(self) -> bool:
        """Gloo has read its sockets to their end.

        After the shutdown the kernel takes nothing more in, and it counts a byte as read when it was copied.
        """
        return bool(self._sockets) and not any(_unread(sock) for sock in self._sockets)

    def close(self) -> None:
        self._group = None  # joins gloo's threads
        for duplicate in self._sockets:
            duplicate.close()


def _sockets_of(blobs: Sequence[bytes]) -> list[socket.socket]:
    """The process's connections from or to one of the listeners in `blobs`, as duplicates."""
    found: list[socket.socket] = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or not a connected socket
            if not os.readlink(entry).startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(entry.name)))
            try:
                ends = (duplicate.getsockname(), duplicate.getpeername())
                mine = duplicate.family in (socket.AF_INET, socket.AF_INET6) and any(
                    _sockaddr(end) in blob for end in ends for blob in blobs
                )
            except OSError:
                mine = False
            if mine:
                found.append(duplicate)
            else:
                duplicate.close()
    return found


def _sockaddr(end: tuple) -> bytes:
    """The start of the C struct, as gloo writes it to the store: family, port, address."""
    host, port = end[0], end[1]
    if len(end) == 2:
        return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    family = struct.pack("=H", socket.AF_INET6)
    return family + struct.pack("!HI", port, end[2]) + socket.inet_pton(socket.AF_INET6, host)


def _unread(sock: socket.socket) -> int:
    try:
        answer = fcntl.ioctl(sock, termios.FIONREAD, bytes(4))
    except (OSError, ValueError):  # closed meanwhile, with the group
        return 0
    return int.from_bytes(answer, sys.byteorder)


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`, at which peers there can reach it."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]
