"""Where the members of a collective group meet: a key-value store of torch's, served by the publisher."""

import socket
import time
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch.distributed

distributed: Any = torch.distributed  # its stubs know neither the stores nor the classes of the backends


class CollectiveStore:
    """The key-value store that the members of groups meet at; the publisher's first rank owns one.

    Listens on `host` alone, without a token: it carries addresses, and no weights.

    Attributes:
        host, port: what to give to the other members.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family)
        self.host: str = host
        self.port: int = listener.getsockname()[1]
        self._store: Any = distributed.TCPStore(
            host,
            self.port,
            None,
            True,
            timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store's own would listen on every address
        )

    def close(self) -> None:
        """Stop serving; groups that have been made go on without it."""
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Rendezvous:
    """A group's corner of the store, entered by all of its members or by none.

    Raises TimeoutError that names the ranks that did not come.
    """

    def __init__(self, host: str, port: int, key: str, rank: int, size: int, deadline: float) -> None:
        self.host, self.key, self.rank, self.size, self.deadline = host, key, rank, size, deadline
        self.tcp = distributed.TCPStore(
            host, port, None, False, timedelta(seconds=self.seconds), wait_for_workers=False
        )
        self.store = distributed.PrefixStore(key, self.tcp)
        self.store.set(f"here/{rank}", "1")
        everybody = [f"here/{other}" for other in range(size)]
        try:
            self.store.wait(everybody, timedelta(seconds=self.seconds))
        except RuntimeError as error:
            absent = [other for other in range(size) if not self.store.check([f"here/{other}"])]
            raise TimeoutError(f"no sign of rank {', '.join(map(str, absent))} in time") from error

    @property
    def seconds(self) -> float:
        """Until the deadline; a millisecond when it has passed, as zero means for ever to torch."""
        return max(self.deadline - time.monotonic(), 0.001)
