"""A storage unit's connection to the controller: orders come in, reports go out."""

import secrets
import socket
import time
from collections.abc import Callable

from ..errors import QueueError
from ..transport.arenas import ArenaMap
from ..transport.pins import Pins
from ..wire.listeners import Poll
from ..wire.local_session import LocalSession, connected_to, receive
from ..wire.messages import Announce, Order, Report, UnitAddress, Written

_RETRY_SECONDS = 0.1  # between attempts to reach a controller that restarts
_TIMEOUT = 60.0


class Overseer:
    """Sends in order and never waits. What the controller has not confirmed is sent again to the next one.

    Args:
        name: of the controller's local listener.
        token: of the store.
        secret: by which the controller knows that this is a unit.
        poll: of the unit's process.
    """

    def __init__(self, name: str, token: str | None, secret: str, poll: Poll) -> None:
        self._name = name
        self._token = token
        self._secret = secret
        self._poll = poll
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._retry_at: float | None = None

    def start(
        self,
        address: UnitAddress,
        arenas: ArenaMap,
        ordered: Callable[[Order], None],
        again: Callable[[], None],
        known: Callable[[], None],
    ) -> None:
        """Connects.

        Args:
            address: of the unit.
            arenas: where the arenas that orders bring are added.
            ordered: called for every order.
            again: called when the controller is reached anew.
            known: called when the controller has taken note of the unit, after the orders it then gave.
        """
        self._address = address
        self._again = again
        self._known = known
        self._heard: dict[int, Callable[[QueueError | None], None]] = {}
        pins = Pins()
        self._session = LocalSession(self._name, self._token, secrets.randbits(62), pins, arenas)
        self._session.ordered = ordered
        self._connect()

    def _connect(self) -> None:
        try:
            self._socket = connected_to(self._name)
        except OSError:
            self._retry_at = time.monotonic() + _RETRY_SECONDS  # nothing tells when it is back
            return
        self._retry_at = None
        self._socket.setblocking(False)
        self._unsent.clear()
        self._poll.watch(self._socket.fileno(), self._ready)
        # Only a unit that has announced itself is heard.
        for pending in list(self._session.outstanding.values()):
            if isinstance(pending.body, Announce):
                del self._session.outstanding[pending.id]
        repeated = self._session.repeated()
        self._send(self._session.hello())
        self.tell(Announce(self._address.number, self._address, self._secret), lambda _: self._known())
        self._send(repeated)
        self._again()

    def tell(
        self,
        body: Announce | Report | Written,
        heard: Callable[[QueueError | None], None] | None = None,
    ) -> None:
        """Sends something to the controller, or keeps it until there is one; `heard` is called when it has
        taken note, or with its refusal.
        """
        pending, data = self._session.request(body, _TIMEOUT)
        if heard is not None:
            self._heard[pending.id] = heard
        self._send(data)

    def _send(self, data: bytes) -> None:
        if self._socket is not None and data:
            self._unsent += data
            self._flush()

    def _flush(self) -> None:
        if self._socket is None or not self._unsent:
            return
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._lose()
            return
        self._poll.watch(self._socket.fileno(), self._ready, writable=bool(self._unsent))

    def _ready(self) -> None:
        self._flush()
        if self._socket is None:
            return
        try:
            data, descriptors = receive(self._socket)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if data:
            for answered in self._session.received(data, descriptors):
                heard = self._heard.pop(answered.id, None)
                if heard is not None:
                    heard(answered.outcome if isinstance(answered.outcome, QueueError) else None)
        else:
            self._lose()

    def _lose(self) -> None:
        if self._socket is not None:
            self._poll.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._session.broken()
            self._retry_at = time.monotonic() + _RETRY_SECONDS

    def settle(self, now: float) -> float | None:
        """Tries to connect if it is time to; returns when it will be."""
        if self._retry_at is not None and now >= self._retry_at:
            self._connect()
        return self._retry_at

    def close(self) -> None:
        """Idempotent."""
        self._lose()
        self._retry_at = None
