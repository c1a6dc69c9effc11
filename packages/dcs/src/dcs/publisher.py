"""The side that trains: freezes a version into a staging buffer, announces it, and serves it."""

import math
import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Literal, Self

import torch

from dcs import manifest as manifests
from dcs.arguments import (
    WIRES,
    require_address,
    require_chunk_bytes,
    require_collective,
    require_device,
    require_host,
    require_kind,
    require_label,
    require_layout,
    require_port,
    require_seconds,
    require_whole,
    require_wires,
)
from dcs.control.address import require_reachable, require_token
from dcs.control.curve import MemberKeys
from dcs.control.link import Link, Rejoining
from dcs.control.messages import (
    HIGHEST_VERSION,
    Complete,
    Fenced,
    FromCoordinator,
    Join,
    Joined,
    Roster,
    Store,
)
from dcs.errors import Closed, CoordinatorLost, DcsError, InvalidArgument, StaleVersion, Timeout, from_refusal
from dcs.interruptible import Condition
from dcs.layout import Layout
from dcs.manifest import CHUNK_BYTES
from dcs.memory.arena import Arena, check
from dcs.memory.shelf import Copy, Shelf, whole
from dcs.scarcity import opening
from dcs.ticket import Ticket, ranks_behind
from dcs.wire.chunks import unit_of
from dcs.wire.collective import CollectiveStore
from dcs.wire.gathering import Broadcaster
from dcs.wire.server import ChunkServer
from dcs.wire.tls import Tls

_MOST_RANKS = 1 << 20


class Publisher:
    """Publishes versions of one model, as one of the ranks that own it.

    Args:
        address: the coordinator's.
        run: which run the versions belong to. A newer gang of publishers fences the one before it.
        rank, world_size: this rank among those that own the model. A version is offered when all of them
            have published it.
        session: a name that the ranks of one start of the trainer share, different for each start; needed
            when there are several. A single rank makes one up.
        layout: of the tensors that will be published, from `dcs.layout.of`. Where its dtypes differ from the
            tensors' (both floating), they are cast when they are frozen.
        token: the coordinator's token; subscribers must show the same.
        tls: certificates, to encrypt what is sent over TCP; all members of a run have to give some.
        curve: keys, to encrypt what is said to a coordinator that has some.
        wires: what subscribers may use: `shm` (this process's memory is mapped on this machine), `tcp`.
        collective: backend of broadcasts to subscribers with the same layout that offer it too: `nccl` (with
            `device`), `gloo`, or "" for none. Only for a single rank.
        collective_seconds: that a broadcast may take; whoever is missing costs the others this much once.
        device: this rank's, for nccl.
        host: address to serve chunks at; off loopback a token is required.
        port: port to serve chunks at; 0 takes a free one.
        advertise: what subscribers connect to, when that is not `host`.
        chunk_bytes: unit of transfer, verification and retry.
        supersede_after: seconds that a publish waits for a transfer of the version before last, whose buffer
            it needs.
        timeout: seconds to wait for the coordinator, and for other ranks to catch up.

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
        session: str | None = None,
        layout: Layout,
        token: str | None = None,
        tls: Tls | None = None,
        curve: MemberKeys | None = None,
        wires: Sequence[str] = WIRES,
        collective: Literal["", "nccl", "gloo"] = "",
        collective_seconds: float = 30.0,
        device: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        supersede_after: float = 5.0,
        timeout: float = 10.0,
    ) -> None:
        world_size = require_whole(world_size, "world_size", 1, _MOST_RANKS)
        rank = require_whole(rank, "rank", 0)
        if rank >= world_size:
            raise InvalidArgument(f"rank {rank} of {world_size} ranks; ranks count from 0")
        if session is None and world_size > 1:
            raise InvalidArgument(
                f"rank {rank} of {world_size} needs a session: a name that all ranks of this start share, and"
                " no other start has, such as the launcher's run id and restart count"
            )
        require_address(address, "the coordinator")
        require_label(run, "run")
        if session is not None:
            require_label(session, "session")
        require_layout(layout)
        require_kind(tls, Tls, "tls", "dcs.Tls(certificate, key, authority)")
        require_kind(curve, MemberKeys, "curve", "dcs.MemberKeys.of(the coordinator's public key)")
        require_host(host, "host")
        port = require_port(port, "its server of chunks")
        require_device(device)
        require_wires(wires)
        require_collective(collective, collective_seconds, world_size)
        require_chunk_bytes(chunk_bytes)
        require_seconds(supersede_after, "supersede_after", zero=True)
        require_seconds(timeout, "timeout")
        require_token(host, token, "the publisher")
        require_reachable(host, advertise, "the publisher")
        self.run = run
        self.layout = layout
        self._pid = os.getpid()
        self._rank = rank
        self._world_size = world_size
        self._chunk_bytes = chunk_bytes
        self._supersede_after = supersede_after
        self._timeout = timeout
        self._fingerprint = layout.fingerprint
        self._publishing = threading.Lock()
        self._lock = threading.RLock()
        self._completed = Condition(self._lock)
        self._tickets: list[Ticket] = []
        self._live: dict[int, str] = {}  # the names of the subscribers, by member number
        self._expected: dict[int, str] = {}  # of those that a coordinator from before has known
        self._expected_until = 0.0
        self._ranks: tuple[int, ...] = ()  # the newest version that each was last known to have published
        self._error: DcsError | None = None
        self._closed = False
        self.epoch: int = 0
        self._newest = (-1, b"")  # complete: number, and this rank's root of it
        self._published = -1
        self._unsure: Copy | None = None  # offered, and it is not known whether the coordinator has heard
        self._shelf = Shelf(layout)
        name = f"rank-{rank}"
        self._server = ChunkServer(
            self._shelf,
            host,
            port,
            run=run,
            fingerprint=self._fingerprint,
            chunk_bytes=chunk_bytes,
            token=token,
            mappable="shm" in wires,
            patience=0.0,
            unit=unit_of(layout),
            identity=tls,
            who=f"publisher {name!r}",
        )
        self.endpoint = self._server.endpoint(advertise or host)
        self._store: CollectiveStore | None = None
        self._broadcaster: Broadcaster | None = None
        try:
            if collective:
                with opening("the store of its broadcasts"):
                    self._store = CollectiveStore(host)
                    self._broadcaster = Broadcaster(self._shelf, collective_seconds, device)
            self._link = Link(address, self._receive, self._coordinator_changed, curve=curve)
            try:
                join = Join(
                    0,
                    "publisher",
                    run,
                    name,
                    layout,
                    token,
                    self.endpoint,
                    rank=rank,
                    world_size=world_size,
                    session=uuid.uuid4().hex if session is None else session,
                    collective=collective,
                    store=self._store and Store(advertise or host, self._store.port),
                )
                self._link.join(join, timeout)
            except BaseException:
                self._link.close()
                raise
        except BaseException:
            self._stop_serving()
            raise

    @property
    def version(self) -> int:
        """The newest version that the run has; -1 when there is none yet."""
        return self._newest[0]

    @property
    def sent(self) -> int:
        """Payload bytes sent to subscribers so far."""
        return self._server.sent

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Ticket:
        """Freeze `tensors` as `version` and announce it; when this returns, the caller may change them.

        Blocks for the copy, the coordinator's answer, and, when receivers are slower than two publishes, up
        to `supersede_after` for the buffer of the version before last. With several ranks, blocks as well
        while another rank is two versions behind, for at most `timeout`.
        Raises `LayoutMismatch`, `StaleVersion` (not newer than the run's newest, except that a restarted
        publisher may offer that one again with the same bits), `CoordinatorLost`, `Evicted`, `Closed`,
        `Timeout` (another rank is behind), `NoMemory`. After an error nothing of it is served, and the
        version may be published again. Only after `CoordinatorLost`, or an exception that came from outside
        (KeyboardInterrupt), the coordinator may have heard of it already: publish the same again.
        """
        self._raise_if_forked()
        check(tensors, self.layout, cast=True)
        version = require_whole(version, "version", -math.inf)
        with self._publishing:
            self._await_coordinator()
            self._raise_if_unusable()
            self._require_newer(version)
            copy = self._left_over(version, tensors)
            self._shelf.reclaim()
            began = reserved = time.monotonic()
            if copy is None:
                arena = self._reserve()
                reserved = time.monotonic()
                copy = self._frozen(arena, tensors, version)
            frozen = time.monotonic()
            ticket = Ticket(version, copy.arena.nbytes, reserved - began, frozen - reserved)
            self._offer(copy, ticket, frozen - reserved)
            return ticket

    def _frozen(self, arena: Arena, tensors: Mapping[str, torch.Tensor], version: int) -> Copy:
        """The tensors, copied into this arena, which is given back if that fails."""
        try:
            root, chunks = self._freeze(arena, tensors, version)
            newest, known = self._newest
            if version == newest and manifests.is_content(known) and known not in (b"", root):
                raise self._other_weights(version)
            return whole(arena, version, root, self._chunk_bytes, chunks)
        except BaseException:
            self._shelf.release(arena)
            raise

    def _offer(self, copy: Copy, ticket: Ticket, freeze_seconds: float) -> None:
        try:
            self._unsure = copy
            if copy not in self._shelf.held:
                self._shelf.put(copy)
            with self._lock:
                self._tickets = [other for other in self._tickets if other.version != copy.version]
                self._tickets.append(ticket)
            self._announce(copy, freeze_seconds)
        except BaseException as error:
            with self._lock:
                self._tickets = [other for other in self._tickets if other is not ticket]
            if isinstance(error, DcsError) and not isinstance(error, CoordinatorLost | Rejoining):
                self._shelf.withdraw(copy)
                self._unsure = None
            raise
        with self._lock:
            self._published, self._unsure = copy.version, None

    def _left_over(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Copy | None:
        """What a publish of this version has left that ended before its answer came, when it is the same.

        Others may have it already, so it cannot become another one; if nobody was told, it goes.
        """
        unsure = self._unsure
        if unsure is None:
            return None
        told = self._newest[0] >= unsure.version
        if unsure.version == version and unsure in self._shelf.held:
            if unsure.arena.holds(tensors):
                return unsure
            if told:
                raise self._other_weights(version)
        if not told:
            self._shelf.withdraw(unsure)
        self._unsure = None
        return None

    def _other_weights(self, version: int) -> StaleVersion:
        return StaleVersion(
            f"version {version} of run {self.run!r} exists with other weights; publish {version + 1} or later"
        )

    def close(self) -> None:
        """Leave the run and stop serving; versions not yet pulled are gone. May be called twice."""
        if os.getpid() != self._pid:
            return  # a forked child: what it has is its parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
            tickets, self._tickets = self._tickets, []
            self._completed.notify_all()
        self._link.close("the publisher closed")
        self._stop_serving()
        for ticket in tickets:
            ticket.fail(Closed(f"the publisher was closed before version {ticket.version} was acknowledged"))

    def _stop_serving(self) -> None:
        if self._broadcaster is not None:
            self._broadcaster.close()
        if self._store is not None:
            self._store.close()
        self._server.close()
        self._shelf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reserve(self) -> Arena:
        """A buffer to freeze into: a spare one, or the oldest version's once a newer one is complete."""
        arena = self._shelf.spare()
        if arena is not None:
            return arena
        if len(self._shelf.held) < 2:  # others still read those before; the newest stays
            return self._shelf.reserve(None, 0.0)
        oldest, newer = self._shelf.held[0], self._shelf.held[-1].version
        with self._completed:
            if not self._completed.wait_for(
                lambda: self._newest[0] >= newer or self._error or self._closed, self._timeout
            ):
                raise Timeout(
                    f"version {newer} of run {self.run!r} is not complete after {self._timeout} s:"
                    f" {ranks_behind(self._ranks, newer)} not published it, and this one holds no spare"
                    " buffer until it is"
                )
        self._raise_if_unusable()
        return self._shelf.reserve(oldest, self._supersede_after)

    def _freeze(
        self, arena: Arena, tensors: Mapping[str, torch.Tensor], version: int
    ) -> tuple[bytes, list[int | None]]:
        """Copy the tensors; the root and the hashes of the chunks.

        While nobody takes this rank's bytes over a wire no hash is of use, except to compare a version that
        the run has already, and the parts of replicated ranks. What has none gets it when it is asked for.
        """
        needed = self._server.sends or self._broadcaster is not None or self._world_size > 1
        if needed or version == self._newest[0]:
            chunks = arena.fill(tensors, self._chunk_bytes)
            return manifests.root_hash(self._fingerprint, self._chunk_bytes, chunks), list(chunks)
        arena.copy(tensors)
        count = manifests.chunk_count(arena.nbytes, self._chunk_bytes)
        return manifests.fresh_mark(), [None] * count

    def _announce(self, copy: Copy, freeze_seconds: float) -> None:
        nbytes = copy.arena.nbytes
        try:
            self._link.announce(self.epoch, copy.version, copy.mark, nbytes, freeze_seconds, self._timeout)
        except Rejoining:
            # This process was stopped for longer than its lease; its link joins again, under a new epoch.
            if not self._link.await_membership(self._timeout):
                raise
            self._link.announce(self.epoch, copy.version, copy.mark, nbytes, freeze_seconds, self._timeout)

    def _require_newer(self, version: int) -> None:
        newest = self._newest[0]
        if not 0 <= version <= HIGHEST_VERSION:
            raise StaleVersion(f"version {version} is none; versions count from 0 to {HIGHEST_VERSION}")
        if version <= self._published or version < newest:
            raise StaleVersion(
                f"version {version} is not newer than version {newest} of run {self.run!r}"
                f" (epoch {self.epoch}); publish {newest + 1} or later"
            )

    def _await_coordinator(self) -> None:
        """One that was lost may come back; it has `timeout` seconds, as has one that does not answer."""
        with self._completed:
            self._completed.wait_for(
                lambda: not isinstance(self._error, CoordinatorLost) or self._closed, self._timeout
            )

    def _raise_if_forked(self) -> None:
        """Before any lock is taken: the child's copy of one may be held by a thread that it does not have."""
        if os.getpid() != self._pid:
            raise DcsError(f"this publisher belongs to process {self._pid}; make one in this process")

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
            case Complete():
                self._complete(message)
            case Roster():
                self._update(message)
            case Fenced() if not message.rejoin:
                self._fail(from_refusal(message.code, message.message, message.detail))
            case _:
                return

    def _joined(self, message: Joined) -> None:
        with self._lock:
            self.epoch = message.epoch
            if message.version >= self._newest[0]:
                self._newest = (message.version, message.root or self._newest[1])
            tickets = list(self._tickets)
            again = list(self._shelf.held)  # one that is being announced too: it may be complete already
            self._expected |= self._live
            self._expected_until = time.monotonic() + 2 * message.lease_seconds
        for ticket in tickets:
            ticket.expect_again(2 * message.lease_seconds)
        for copy in again:  # the lease had lapsed, or the coordinator is a new one
            if copy.version >= message.version and (copy is not self._unsure or self._publishing.locked()):
                self._link.offer(message.epoch, copy.version, copy.mark, copy.arena.nbytes)

    def _complete(self, message: Complete) -> None:
        held = {copy.version: copy.mark for copy in list(self._shelf.held)}
        root = held.get(message.version, b"")
        with self._completed:
            if message.version >= self._newest[0]:
                self._newest = (message.version, root)
            begun = [ticket for ticket in self._tickets if ticket.version == message.version]
            expected, left = self._expected, self._expected_until - time.monotonic()
            self._completed.notify_all()
        for ticket in begun:
            if expected and left > 0:
                ticket.expect_again(left)
            ticket.begin(message.roster, expected if left > 0 else {})
        gathering = message.roster.gathering
        if self._broadcaster is not None and gathering is not None and root:
            self._broadcaster.ask(gathering, message.version, root)
        self._update(message.roster)

    def _fail(self, error: DcsError) -> None:
        with self._lock:
            self._error = error
            self._completed.notify_all()
            tickets = list(self._tickets)
        for ticket in tickets:
            ticket.fail(error)

    def _update(self, roster: Roster) -> None:
        live = {member: standing.name for member, standing in roster.live.items()}
        names = set(live.values())
        with self._lock:
            gone, self._live = self._live.keys() - live.keys(), live
            self._expected = {
                member: name
                for member, name in self._expected.items()
                if name not in names and member not in roster.departed
            }
            self._ranks = roster.announced
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
            self._completed.notify_all()
            tickets = list(self._tickets)
        for ticket in tickets:
            if error is None:
                ticket.restore()
            else:
                ticket.fail(error)
