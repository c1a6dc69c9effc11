"""Reading the statistics of a store again and again, across its restarts."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from ..client.blocking import Client, connect
from ..errors import ControllerLost, InvalidArgument, QueueError, StorageLost, Timeout
from .rates import Reading
from .statistics import StoreStats

GONE = (ControllerLost, StorageLost, Timeout)
"""What a reading fails with while a store is away and may come back."""

type OnChange = Callable[[QueueError | None], None]
"""Told the error when a store stops answering, and None when it answers again."""


class StatsReader:
    """A connection to a store that is made when first needed, and anew after it failed.

    One thread may use it at a time.

    Args:
        address: ``tcp://host:port`` or ``host:port`` of the controller.
        token: what the store was started with.
        server_key: the public CURVE key of a store that encrypts.
        timeout: seconds that connecting and reading may take, each.
    """

    def __init__(
        self, address: str, token: str | None = None, *, server_key: str | None = None, timeout: float = 3.0
    ) -> None:
        if not 0 < timeout < math.inf:
            raise InvalidArgument(f"timeout is {timeout}; it must be a positive number of seconds")
        self.address = address if "://" in address else f"tcp://{address}"
        self._token = token
        self._server_key = server_key
        self._timeout = timeout
        self._client: Client | None = None

    def read(self) -> Reading:
        """The statistics now.

        Raises:
            ControllerLost, StorageLost, Timeout: no answer (`GONE`); the next call tries again.
            QueueError: it refuses us, as by a wrong token.
        """
        if self._client is None:
            self._client = connect(
                self.address,
                self._token,
                server_key=self._server_key,
                timeout=self._timeout,
                reconnect_seconds=2 * self._timeout,
            )
        try:
            stats = self._client.stats(timeout=self._timeout)
        except Timeout:
            raise  # it is slow or stopped, and the connection is good
        except QueueError:
            self.close()  # of a controller that is gone, or was replaced by another
            raise
        return Reading(time.monotonic(), stats)

    def close(self) -> None:
        """Disconnects. Idempotent; the next `read` would connect again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class SharedReading:
    """Reads a store for any number of threads; who asks while a reading is under way gets that one.

    Args:
        read: makes one reading, within a time of its own.
        on_change: called in the thread that read.
    """

    def __init__(self, read: Callable[[], Reading], on_change: OnChange | None = None) -> None:
        self._read = read
        self._on_change = on_change
        self._lock = threading.Lock()
        self._under_way: Future[StoreStats | None] | None = None
        self._answered = True

    def __call__(self) -> StoreStats | None:
        """The statistics, or None if the store does not answer or refuses us."""
        with self._lock:
            others = self._under_way
            mine: Future[StoreStats | None] = Future()
            if others is None:
                self._under_way = mine
        if others is not None:
            return others.result()  # ends when the reading does
        try:
            mine.set_result(self._attempt())
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                self._under_way = None
        return mine.result()

    def _attempt(self) -> StoreStats | None:
        stats: StoreStats | None = None
        failure: QueueError | None = None
        try:
            stats = self._read().stats
        except QueueError as error:
            failure = error
        if self._answered is not (failure is None):
            self._answered = failure is None
            if self._on_change is not None:
                self._on_change(failure)
        return stats
