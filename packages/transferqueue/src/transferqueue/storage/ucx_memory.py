"""The arenas of a storage unit, for clients that come by UCX. Its methods run on the thread of UCX."""

import os
from collections import deque
from collections.abc import Callable

import numpy as np

from ..transport.arenas import ArenaMap
from ..transport.ucx import UcxServer
from ..values.block import read_block
from ..values.frame import decode
from ..wire.listeners import Poll
from ..wire.messages import Range


class UcxMemory:
    """See `transport.ucx_server.Memory`. What is written is told on the unit's own thread.

    Args:
        arenas: of the unit.
        checked: raises for a range that is not, or no longer, to be written.
        poll: of the unit's thread.
        written: called on that thread for every range that is filled.
    """

    def __init__(
        self,
        arenas: ArenaMap,
        checked: Callable[[Range], Range],
        poll: Poll,
        written: Callable[[Range], None],
    ) -> None:
        self._arenas = arenas
        self._checked = checked
        self._poll = poll
        self._tell_written = written
        self._done: deque[Range] = deque()
        self._grants: set[int] = set()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._server: UcxServer | None = None
        poll.watch(self._wake, self._woken)

    def serve(self, token: str, max_bytes: int) -> int:
        """Starts to listen; returns the port.

        Raises:
            UcxUnusable: UCX is not installed or does not start here.
            InvalidArgument: there is no token.
        """
        self._server = UcxServer(self, token=token, max_bytes=max_bytes)
        return self._server.port

    def room(self, grant: int, arena: int, start: int, stop: int) -> np.ndarray:
        self._checked(Range(grant, arena, start, stop))
        self._grants.add(grant)
        return self._arenas.write(arena, start, stop)

    def written(self, grant: int, arena: int, start: int, stop: int) -> None:
        where = self._checked(Range(grant, arena, start, stop))
        header, frame = read_block(self._arenas.read(arena, start, stop), grant, "a block on its way")
        decode(header, frame, verify=False)  # a description that does not fit is refused here, not at readers
        self._done.append(where)
        os.eventfd_write(self._wake, 1)

    def bytes_of(self, arena: int, start: int, stop: int) -> np.ndarray:
        return self._arenas.read(arena, start, stop)

    def _woken(self) -> None:
        os.eventfd_read(self._wake)
        while self._done:
            self._tell_written(self._done.popleft())

    def forget(self, grant: int) -> None:
        """Returns when nothing is written under a grant any more, which is not to be written any more.

        Raises:
            Timeout: UCX does not let go of the memory.
        """
        if grant in self._grants and self._server is not None:
            self._grants.discard(grant)
            self._server.revoke(grant)

    def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._poll.forget(self._wake)
            os.close(self._wake)
