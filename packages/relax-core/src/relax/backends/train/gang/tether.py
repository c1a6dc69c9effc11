"""A rank's end of its tether: what the leader says, and the end of this process when the leader is gone."""

import contextlib
import os
import queue
import socket
import sys
import threading
import time

from relax.backends.train.gang.frames import BadFrame, Inbox, send
from relax.backends.train.gang.leash import PING_SECONDS, SEND_SECONDS
from relax.backends.train.gang.messages import Alive, Call, End, Hello, Here, Job, Raised, Ready, ToRank

EXIT_GIVEN_UP = 70
"""Exit status of a rank that ends because of another."""

CONNECT_SECONDS = 30.0


class Tether:
    """Connects to the leader's leash and is given its job.

    Once the leader is gone, or says that another rank failed, this process ends at once: what it is in the
    middle of can come to no end.
    """

    def __init__(self, address: str, token: str, rank: int) -> None:
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        self._connection.settimeout(SEND_SECONDS)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._heard = time.monotonic()
        self._closing = False
        self._messages: queue.Queue[Job | Call | End] = queue.Queue()
        self.host = self._connection.getsockname()[0]
        self.say(Hello(token, rank, os.getpid(), self.host))
        self._thread = threading.Thread(target=self._listen, name="gang-tether", daemon=True)
        self._thread.start()

    def say(self, message: Hello | Here | Ready | Raised | Alive) -> None:
        with self._sending:
            send(self._connection, message)

    def next(self, silence: float) -> Job | Call | End:
        """The leader's next word; it may take any time while it is alive, but `silence` seconds without a
        sign of it end this process.
        """
        while True:
            try:
                return self._messages.get(timeout=PING_SECONDS)
            except queue.Empty:
                if (quiet := time.monotonic() - self._heard) > silence:
                    give_up(f"nothing was heard of the leader for {quiet:.0f} s")

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._connection.close()

    def _listen(self) -> None:
        inbox = Inbox(ToRank)
        said = time.monotonic()
        try:
            while True:
                self._connection.settimeout(PING_SECONDS)
                try:
                    received = self._connection.recv(1 << 16)
                except TimeoutError:
                    received = None
                if received == b"":
                    raise OSError("the connection ended")
                for message in inbox.feed(received or b""):
                    self._heard = time.monotonic()
                    if isinstance(message, End):
                        if message.fault:
                            give_up(message.fault)
                        self._closing = True
                    if not isinstance(message, Alive):
                        self._messages.put(message)
                if time.monotonic() - said >= PING_SECONDS:
                    said = time.monotonic()
                    self.say(Alive())
        except (OSError, BadFrame) as error:
            if not self._closing:
                give_up(f"the leader is gone: {error}")


def give_up(why: str) -> None:
    """End this process at once, from any thread, telling why in the log."""
    print(f"this rank ends: {why}", file=sys.stderr, flush=True)
    os._exit(EXIT_GIVEN_UP)
