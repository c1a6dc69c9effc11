"""The side that trains: freezes a version into a staging buffer, announces it, and serves it."""

import operator
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch

from dcs import manifest as manifests
from dcs.control.address import require_token
from dcs.control.link import Link, Rejoining
from dcs.control.messages import Announced, Endpoint, Fenced, FromCoordinator, Join, Joined, Roster
from dcs.errors import Closed, CoordinatorLost, DcsError, StaleVersion, from_refusal
from dcs.layout import Layout
from dcs.manifest import CHUNK_BYTES, MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, Manifest
from dcs.memory.arena import check
from dcs.memory.snapshots import SnapshotPair
from dcs.ticket import Ticket
from dcs.wire.server import ChunkServer


class Publisher:
    """Publishes versions of one model.

    Args:
        address: the coordinator's.
        run: which run the versions belong to. A run has one publisher; a newer one fences the one before it.
        rank, world_size: this rank among those that own the model; one rank owns all of it.
        layout: of the tensors that will be published, from `dcs.layout.of`.
        token: the coordinator's token; subscribers must show the same.
        host: address to serve chunks at; off loopback a token is required.
        port: port to serve chunks at; 0 takes a free one.
        advertise: what subscribers connect to, when that is not `host`.
        chunk_bytes: unit of transfer, verification and retry.
        supersede_after: seconds that a publish waits for a transfer of the version before last, whose buffer
            it needs.
        timeout: seconds to wait for the coordinator.

    Attributes:
        epoch: issued by the coordinator; grows when this publisher has to join again.
        endpoint: where it serves chunks.

    Raises `CoordinatorLost`, `Unauthorized`, `ProtocolMismatch`, `DcsError`.
    """

    def __init__(
        self,
        address: str,
        run: str = "default",
        *,
        rank: int = 0,
        world_size: int = 1,
        layout: Layout,
        token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        supersede_after: float = 5.0,
        timeout: float = 10.0,
    ) -> None:
        if (rank, world_size) != (0, 1):
            raise DcsError(
                f"rank {rank} of {world_size} ranks: one rank publishes the whole model; give rank=0,"
                " world_size=1"
            )
        if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise DcsError(f"chunk_bytes is {chunk_bytes}; it must be {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}")
        require_token(host, token, "the publisher")
        self.run = run
        self.layout = layout
        self._chunk_bytes = chunk_bytes
        self._supersede_after = supersede_after
        self._timeout = timeout
        self._placement = manifests.Placement.of(layout)
        self._publishing = threading.Lock()
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []
        self._announcing: Ticket | None = None
        self._live: set[int] = set()
        self._error: DcsError | None = None
        self._closed = False
        self.epoch: int = 0
        self._newest = (-1, b"")
        self._published = -1
        self._snapshots = SnapshotPair(layout)
        self._server = ChunkServer(self._snapshots, host, port, run, self._placement.fingerprint, token)
        self.endpoint = Endpoint(advertise or host, self._server.port)
        try:
            self._link = Link(address, self._receive, self._coordinator_changed)
            try:
                name = f"rank-{rank}"
                self._link.join(Join(0, "publisher", run, name, layout, token, self.endpoint), timeout)
            except BaseException:
                self._link.close()
                raise
        except BaseException:
            self._server.close()
            raise

    @property
    def version(self) -> int:
        """The newest version that the run has; -1 when there is none yet."""
        return self._newest[0]

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Ticket:
        """Freeze `tensors` as `version` and announce it; when this returns, the caller may change them.

        Blocks for the copy, the coordinator's answer, and, when receivers are slower than two publishes, up
        to `supersede_after` for the buffer of the version before last.
        Raises `LayoutMismatch`, `StaleVersion` (not newer than the run's newest, except that a restarted
        publisher may offer that one again with the same bits), `CoordinatorLost`, `Evicted`, `Closed`.
        After an error nothing of it is served, and the version may be published again.
        """
        check(tensors, self.layout)
        version = operator.index(version)
        with self._publishing:
            self._raise_if_unusable()
            self._require_newer(version)
            began = time.monotonic()
            arena = self._snapshots.reserve(self._supersede_after)
            reserved = time.monotonic()
            try:
                chunks = arena.fill(tensors, self._chunk_bytes)
                root = manifests.root_hash(self._placement.fingerprint, self._chunk_bytes, chunks)
                if version == self._newest[0] and root != self._newest[1]:
                    raise StaleVersion(
                        f"version {version} of run {self.run!r} exists with other weights; publish"
                        f" {version + 1} or later"
                    )
            except BaseException:
                self._snapshots.release(arena)
                raise
            frozen = time.monotonic()
            ticket = Ticket(version, arena.nbytes, reserved - began, frozen - reserved)
            with self._lock:
                self._announcing = ticket
                manifest = Manifest(
                    self.run,
                    self.epoch,
                    version,
                    self._placement.tensors,
                    arena.nbytes,
                    self._chunk_bytes,
                    chunks,
                    root,
                )
                self._snapshots.install(arena, manifest)
            try:
                self._announce(version, root)
            except BaseException:
                self._snapshots.withdraw(version)
                raise
            finally:
                with self._lock:
                    self._announcing = None
            with self._lock:
                self._newest, self._published = (version, root), version
            return ticket

    def close(self) -> None:
        """Leave the run and stop serving; versions not yet pulled are gone. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            tickets, self._tickets = self._tickets, []
        self._link.close("the publisher closed")
        self._server.close()
        for ticket in tickets:
            ticket.fail(Closed(f"the publisher was closed before version {ticket.version} was acknowledged"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _announce(self, version: int, root: bytes) -> None:
        try:
            self._link.announce(self.epoch, version, root, self._timeout)
        except Rejoining:
            # This process was stopped for longer than its lease; its link joins again, under a new epoch.
            if not self._link.await_membership(self._timeout):
                raise
            self._link.announce(self.epoch, version, root, self._timeout)

    def _require_newer(self, version: int) -> None:
        newest = self._newest[0]
        if version < 0:
            raise StaleVersion(f"version {version} is negative; versions count from 0")
        if version <= self._published or version < newest:
            raise StaleVersion(
                f"version {version} is not newer than version {newest} of run {self.run!r}"
                f" (epoch {self.epoch}); publish {newest + 1} or later"
            )

    def _raise_if_unusable(self) -> None:
        with self._lock:
            if self._closed:
                raise Closed("this publisher was closed")
            if self._error is not None:
                raise self._error

    def _receive(self, message: FromCoordinator) -> None:
        match message:
            case Joined():
                self._joined(message)
            case Announced():
                with self._lock:
                    ticket = self._announcing
                    if ticket is None or ticket.version != message.version:
                        return
                    self._tickets.append(ticket)
                ticket.begin(message.roster)
                self._update(message.roster)
            case Roster():
                self._update(message)
            case Fenced() if not message.rejoin:
                self._fail(from_refusal(message.code, message.message, message.detail))
            case _:
                return

    def _joined(self, message: Joined) -> None:
        with self._lock:
            self.epoch = message.epoch
            self._newest = (message.version, message.root)
            self._snapshots.restamp(message.epoch)
            again = self._published >= 0 and self._published == message.version
        if again:  # the lease had lapsed; late joiners can have the newest version once more
            self._link.offer(message.epoch, message.version, message.root)

    def _fail(self, error: DcsError) -> None:
        with self._lock:
            self._error = error
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.fail(error)

    def _update(self, roster: Roster) -> None:
        with self._lock:
            gone, self._live = self._live - roster.live.keys(), set(roster.live)
            tickets = list(self._tickets)
        for member in gone:
            self._server.drop(member)
        for ticket in tickets:
            ticket.update(roster)
        with self._lock:
            self._tickets = [ticket for ticket in self._tickets if not ticket.done]

    def _coordinator_changed(self, error: DcsError | None) -> None:
        with self._lock:
            if self._error is None or isinstance(self._error, CoordinatorLost):
                self._error = error
            tickets = list(self._tickets)
        for ticket in tickets:
            if error is None:
                ticket.restore()
            else:
                ticket.fail(error)
