"""The coordinator: one thread that owns a ZMQ ROUTER socket and drives the `Registry`."""

import os
import secrets
import threading
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import zmq

from dcs.arguments import require_host, require_kind, require_port, require_seconds
from dcs.control.address import require_token
from dcs.control.curve import CoordinatorKeys
from dcs.control.messages import (
    MAX_MESSAGE_BYTES,
    FromCoordinator,
    Goodbye,
    decode_from_member,
    encode,
)
from dcs.control.registry import Outgoing, Registry
from dcs.control.views import Topology
from dcs.errors import DcsError, ProtocolError, ProtocolMismatch
from dcs.scarcity import OF_A_SOCKET, opening, require_descriptors, start

LEASE_SECONDS = 5.0
_HANDSHAKE_MILLISECONDS = 5000  # for one that connects to say who it is; else it costs a descriptor
_BATCH = 256  # messages between two rounds of pushes
_BACKLOG = 1024  # members that connect at once, as after a restart


class Coordinator:
    """Issues epochs and versions, keeps leases, and announces each new version. Weights never pass it.

    Args:
        host: address to bind; off loopback a token is required.
        port: 0 takes a free one.
        token: secret that every member must show.
        lease_seconds: a member that has not been heard for so long is evicted.
        relay: subscribers pull from each other; False: from the training ranks only, or their own machine.
        transfer_seconds: a subscriber that has not staged a version, or a newer one, so long after it was
            complete is evicted, and may join again; None: it may take for ever.
        curve: keys that encrypt what members say, and prove to them who this is; they need `curve.public`.

    Attributes:
        address: `tcp://host:port`, for publishers and subscribers.
        ended: a descriptor that becomes readable when the thread has ended.

    Use it as a context manager, or call `start` and `close`. `dcs.serve` runs one in its own process.
    Raises `Unauthorized` (no token off loopback) and `DcsError` (the port is taken).
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
        *,
        relay: bool = True,
        transfer_seconds: float | None = None,
        curve: CoordinatorKeys | None = None,
    ) -> None:
        require_host(host, "host")
        require_token(host, token, "the coordinator")
        port = require_port(port, "the coordinator")
        lease_seconds = require_seconds(lease_seconds, "lease_seconds")
        if transfer_seconds is not None:
            transfer_seconds = require_seconds(transfer_seconds, "transfer_seconds")
        require_kind(curve, CoordinatorKeys, "curve", "dcs.keyfile.read(FILE), with a file of `dcs keygen`")
        self._started = time.monotonic()
        # Members are numbered from anywhere, so that those of a coordinator that ran here before mean nobody
        # of this one. Not from the time of day: clocks are set back.
        self._registry = Registry(
            lease_seconds, token, relay, transfer_seconds, first_member=secrets.randbits(32) << 20 | 1
        )
        self._registry_lock = threading.Lock()
        self._stalled = lease_seconds / 20
        self._pid = os.getpid()
        with ExitStack() as opened, opening("the coordinator"):
            self._open(opened, host, port, curve)
            opened.pop_all()
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="dcs-coordinator", daemon=True)

    def _open(self, opened: ExitStack, host: str, port: int, curve: CoordinatorKeys | None) -> None:
        require_descriptors(OF_A_SOCKET, "the coordinator")
        self._context = zmq.Context()
        opened.callback(self._context.term)
        self._socket = self._context.socket(zmq.ROUTER)
        opened.callback(self._socket.close)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MILLISECONDS)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        if curve is not None:
            curve.guard(self._socket)
        bracketed = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{bracketed}:{port or '*'}")
        except zmq.ZMQError as error:
            raise DcsError(
                f"the coordinator cannot bind {host}:{port}: {error}; choose another port, or 0 for a free"
                " one"
            ) from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address: str = f"tcp://{bracketed}:{bound.rpartition(':')[2]}"
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        opened.callback(os.close, self._wake)
        self.ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def start(self) -> Self:
        """Start serving; returns itself."""
        if self._closed:
            raise DcsError("this coordinator was closed; make a new one")
        if not self._thread.is_alive():
            start(self._thread, "the coordinator")
        return self

    def close(self) -> None:
        """Tell the members, stop the thread, release the port. May be called twice. In a process that was
        forked off it does nothing: thread and sockets are the parent's.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._closing.set()
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        else:
            self._socket.close()
        self._context.term()
        os.close(self._wake)
        os.close(self.ended)

    @property
    def alive(self) -> bool:
        """Whether it is serving."""
        return self._thread.is_alive()

    def snapshot(self) -> Topology:
        """What it knows now: runs, members, versions. May be called from any thread, and after `close`."""
        with self._registry_lock:
            return self._registry.snapshot(time.monotonic(), time.time(), self._started)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                deadline = self._registry.next_deadline()
                before = time.monotonic()
                wait = None if deadline is None else int(max(0.0, deadline - before) * 1000) + 1
                poller.poll(wait)
                drained, late = self._receive(), 0.0
                if deadline is not None and time.monotonic() >= deadline:
                    late = time.monotonic() - max(before, deadline)
                    drained = self._listen_again(poller)
                with self._registry_lock:
                    if late > self._stalled:
                        # This process was stopped, so that it could not hear anybody.
                        self._registry.grant(time.monotonic())
                    # What has arrived counts before any lease does: a coordinator that was stopped for a
                    # while must not evict members whose heartbeats are waiting in its own queue.
                    if drained:
                        self._send(self._registry.expire(time.monotonic()))
                    self._send(self._registry.flush())
            self._send([(identity, Goodbye()) for identity in self._registry.identities])
        finally:
            self._socket.close()
            os.eventfd_write(self.ended, 1)

    def _listen_again(self, poller: zmq.Poller) -> bool:
        """Before anybody is evicted: this process may have been stopped until just now, and what members have
        said meanwhile comes from the kernel only as zmq's own thread gets to it.
        """
        until, drained = time.monotonic() + self._stalled, True
        while (left := until - time.monotonic()) > 0 and not self._closing.is_set():
            if poller.poll(int(left * 1000) + 1):
                drained = self._receive()
        return drained

    def _receive(self) -> bool:
        """Handle what has arrived, but not more than a batch; True when there is nothing left."""
        for _ in range(_BATCH):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            with self._registry_lock:
                try:
                    message = decode_from_member(frames)
                except (ProtocolError, ProtocolMismatch) as error:
                    self._send([(identity, self._registry.refuse_unreadable(error))])
                    continue
                self._send(self._registry.handle(identity, message, time.monotonic()))
        return False

    def _send(self, outgoing: Outgoing) -> None:
        # A ROUTER drops what it cannot route (the peer is gone or does not read); the next heartbeat repairs
        # it.
        last: FromCoordinator | None = None
        frames: list[bytes] = []
        for identity, message in outgoing:
            if message is not last:  # one roster goes to all ranks
                last, frames = message, encode(message)
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
