"""What is left of a client on the store's host that is closed while its user still looks at arrays of it."""

import os
import socket
import threading
from contextlib import suppress

from ..transport.pins import Pins
from .local_session import LocalSession


class Lingering:
    """Keeps the connection until the last array is gone, as the controller keeps the memory for as long.

    Args:
        connected: the socket; it is closed then.
        session: which nobody else calls any more.
        pins: of that client.
    """

    def __init__(self, connected: socket.socket, session: LocalSession, pins: Pins) -> None:
        self._socket = connected
        self._session = session
        self._pins = pins
        self._pid = os.getpid()
        self._unsent = b""
        self._busy = threading.Lock()
        connected.setblocking(False)
        pins.eager = True
        pins.notify = self._tell
        self._tell()

    def _tell(self) -> None:
        """Called by finalizers, in any thread, also while it runs: the one at it then looks again."""
        again = True
        while again and self._pid == os.getpid() and self._busy.acquire(blocking=False):
            try:
                self._unsent += self._session.released()
                with suppress(OSError):  # it reads nothing, or is gone: the end of this process tells it too
                    self._unsent = self._unsent[self._socket.send(self._unsent) :]
                if not self._pins.any:
                    self._close()
            finally:
                self._busy.release()
            again = self._pins.untold

    def _close(self) -> None:
        self._pins.notify = None
        with suppress(OSError):  # it had ended
            self._socket.shutdown(socket.SHUT_RDWR)  # also where a child has a copy of it
        self._socket.close()


def part(connected: socket.socket | None, session: LocalSession, pins: Pins) -> None:
    """Ends a connection now, or when nothing needs it any more."""
    if connected is None:
        pins.notify = None
    else:
        Lingering(connected, session, pins)
