"""The side that serves: brings each new version into a staging slot, verifies it, and hands it over whole."""

import math
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self

import torch

from dcs.arguments import (
    WIRES,
    require_address,
    require_call,
    require_chunk_bytes,
    require_collective,
    require_device,
    require_group,
    require_host,
    require_kind,
    require_label,
    require_layout,
    require_port,
    require_seconds,
    require_timeout,
    require_whole,
    require_wires,
)
from dcs.control.address import require_reachable, require_token
from dcs.control.curve import MemberKeys
from dcs.control.link import Link
from dcs.control.messages import (
    Acked,
    Fenced,
    FromCoordinator,
    Join,
    Joined,
    Refused,
    RunState,
)
from dcs.errors import (
    DcsError,
    PublisherLost,
    StaleVersion,
    Timeout,
    Unacknowledged,
    from_refusal,
)
from dcs.follower import Follower
from dcs.intake import Intake
from dcs.layout import Layout
from dcs.manifest import CHUNK_BYTES
from dcs.memory.slots import Slot, SlotState
from dcs.pull import Puller
from dcs.staged import Health, Staged
from dcs.wire.chunks import unit_of
from dcs.wire.frames import Hello
from dcs.wire.gathering import Groups
from dcs.wire.machine import machine_id
from dcs.wire.server import ChunkServer
from dcs.wire.tls import Tls

_BACKOFF_SECONDS = (0.05, 1.0)  # between two attempts: the first, doubling up to the second
_MOST_STREAMS = 64
_PATIENCE_SECONDS = 2.0  # that a peer is made to wait for a version which has not begun to come here


class Subscriber:
    """Receives the versions of one run, the newest first, in the background.

    Args:
        address: the coordinator's.
        run: the run to follow; its publisher may join later.
        name: unique in the run; a newer subscriber of the same name fences this one.
        layout: of the model that will take the weights. It may be cut differently from the publisher's.
        token: the coordinator's; peers that pull from here have to show it too.
        tls: certificates, to encrypt what is pulled over TCP; all members of a run have to give some.
        curve: keys, to encrypt what is said to a coordinator that has some.
        wires: what may be used: `shm` (memory of this machine is mapped), `tcp`.
        streams: TCP connections to a source on another machine; a long line needs several.
        delta: take differences to the version before: True, False, or None: from other machines only.
        collective, collective_seconds: take versions by broadcast, as for `Publisher`, before any other wire.
        device: stage versions there as well, beside what the device does, so that a commit is one copy on the
            device; `cuda:0`, for example. Where it has no memory for that, they are staged on the host, and
            `health()` says why.
        group, group_size: the ranks of one engine give the same `group`, and how many they are; `next` then
            gives a version only when all of them have it, and to all of them the same ones in the same order.
        serve: whether other subscribers may pull from here. Off, it never relays and helps no late joiner.
        site: name of the cluster this is in. Each site takes a version once from the training ranks.
        host, port, advertise: where peers are served, as for `Publisher`; on loopback only this machine's.
        chunk_bytes: unit of transfer, verification and retry.
        progress: called now and then with bytes done, bytes in all, and the version.
        timeout: seconds to wait for the coordinator.

    A lost publisher or coordinator is no error here: `next` gives None when its time is over, the next
    publisher's versions are taken up by themselves, and `health().error` says what is wrong meanwhile.
    Raises `LayoutMismatch` (no payload has moved), `Unauthorized`, `ProtocolMismatch`, `CoordinatorLost`.
    """

    def __init__(
        self,
        address: str,
        run: str = "default",
        *,
        name: str,
        layout: Layout,
        token: str | None = None,
        tls: Tls | None = None,
        curve: MemberKeys | None = None,
        wires: Sequence[str] = WIRES,
        streams: int = 4,
        delta: bool | None = None,
        collective: Literal["", "nccl", "gloo"] = "",
        collective_seconds: float = 30.0,
        device: str | None = None,
        group: str = "",
        group_size: int = 1,
        serve: bool = True,
        site: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        progress: Callable[[int, int, int], None] | None = None,
        timeout: float = 10.0,
    ) -> None:
        require_address(address, "the coordinator")
        require_label(run, "run")
        require_layout(layout)
        require_kind(tls, Tls, "tls", "dcs.Tls(certificate, key, authority)")
        require_kind(curve, MemberKeys, "curve", "dcs.MemberKeys.of(the coordinator's public key)")
        require_host(host, "host")
        port = require_port(port, "its server of chunks")
        require_device(device)
        require_label(name, "name")
        require_wires(wires)
        require_collective(collective, collective_seconds)
        require_group(group, group_size)
        streams = require_whole(streams, "streams", 1, _MOST_STREAMS)
        require_label(site, "site", empty=True)
        require_call(progress, "progress", optional=True)
        require_chunk_bytes(chunk_bytes)
        require_seconds(timeout, "timeout")
        require_token(host, token, f"subscriber {name!r}")
        require_reachable(host, advertise, f"subscriber {name!r}")
        self._pid = os.getpid()
        self.run = run
        self.name = name
        self.layout = layout
        self._token = token
        self._chunk_bytes = chunk_bytes
        self._fingerprint = layout.fingerprint
        self._member = 0
        self._acked: Acked | None = None
        self._silence: DcsError | None = None
        self._followers: list[Follower] = []
        self._intake = Intake(
            name, layout, chunk_bytes, group, device, lambda **what: self._link.report(**what)
        )
        self._server: ChunkServer | None = None
        if serve:
            self._server = ChunkServer(
                self._intake.shelf,
                host,
                port,
                run=run,
                fingerprint=self._fingerprint,
                chunk_bytes=chunk_bytes,
                token=token,
                mappable="shm" in wires,
                patience=_PATIENCE_SECONDS,
                unit=unit_of(layout),
                identity=tls,
                who=f"subscriber {name!r}",
            )
        try:
            puller = Puller(
                self._intake.shelf,
                layout,
                chunk_bytes,
                hello=self._hello,
                layouts=lambda wanted: self._link.layouts(wanted, timeout),
                wires=wires,
                streams=streams,
                delta=delta,
                progress=progress,
                tls=tls,
                groups=Groups(collective_seconds, device) if collective else None,
                departed=self._intake.has_departed,
                stopped=lambda: self._intake.stopped,
            )
            self._link = Link(address, self._receive, self._coordinator_changed, curve=curve)
            try:
                endpoint = None if self._server is None else self._server.endpoint(advertise or host)
                join = Join(
                    0,
                    "subscriber",
                    run,
                    name,
                    layout,
                    token,
                    endpoint,
                    group=group,
                    group_size=group_size,
                    site=site,
                    collective=collective,
                    maps=machine_id() if "shm" in wires else "",
                )
                self._link.join(join, timeout)
            except BaseException:
                self._link.close()
                raise
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise
        self._intake.start(puller)

    def next(self, after: int = -1, timeout: float = 30.0) -> Staged | None:
        """The newest version above `after` that is whole and verified here, or None after `timeout` seconds.

        Acknowledge or release it before calling again, else `Unacknowledged`. Raises `Closed`,
        `LayoutMismatch` (while the run's publisher is one with another layout), `Evicted` (another subscriber
        took this name), `CorruptChunk` (the newest version cannot be had undamaged), `Unauthorized`,
        `ApplyFailed`.
        """
        self._raise_if_forked()
        after, timeout = require_whole(after, "after", -math.inf), require_timeout(timeout)
        with self._intake.changed:
            self._intake.raise_if_unusable()
        if self._followers and not self._followers[-1].is_here():
            raise DcsError(
                f"the versions of subscriber {self.name!r} are taken by follow(); make another one"
            )
        given: list[Slot] = []
        try:
            if self._intake.take(after, timeout, given) is None:
                return None
            slot = given[0]
            target, turn = slot.target, slot.turns
            return Staged(
                target.version,
                target.epoch,
                dict(slot.copy.arena.tensors if slot.mirror is None else slot.mirror.tensors),
                slot.copy.arena.nbytes,
                slot.transfer_seconds,
                slot.wire,
                slot.from_ranks,
                slot.from_peers,
                lambda staged, outcome, pause: self._settle(staged, slot, turn, outcome, pause),
            )
        except BaseException:  # interrupted: nobody looks at it
            with self._intake.changed:
                for lost in given:
                    self._intake.settle(lost, "released")
            raise

    def fetch(self, version: int | None = None, timeout: float = 30.0) -> dict[str, torch.Tensor]:
        """A copy of one version's tensors, acknowledged: the newest, or `version` once it is there.

        Raises `Timeout`, `StaleVersion` when a newer one has replaced `version`, or as `next`.
        """
        if version is not None:
            version = require_whole(version, "version", 0)
        staged = self.next(-1 if version is None else version - 1, timeout)
        if staged is None:
            health = self.health()
            wanted = "a version" if version is None else f"version {version}"
            why = health.error or "health() may say why"
            if health.error is None and (behind := self._intake.state.behind):
                named = ", ".join(map(str, behind))
                why = f"the newest is not complete: rank {named} of the publisher has not published it"
                if len(behind) > 1:
                    why = f"the newest is not complete: ranks {named} of the publisher have not published it"
            elif health.error is None and health.publisher == "absent":
                why = "no publisher has joined it, or not all of its ranks have; is that its name?"
            raise Timeout(f"{wanted} of run {self.run!r} did not come within {timeout} s: {why}")
        if version is not None and staged.version != version:
            staged.release()
            raise StaleVersion(
                f"version {version} of run {self.run!r} was replaced by version {staged.version}; fetch"
                " that one"
            )
        try:
            tensors = {name: tensor.clone() for name, tensor in staged.tensors.items()}
        except BaseException:  # interrupted, or out of memory
            staged.release()
            raise
        staged.ack()
        return tensors

    def follow(self, apply: Callable[[Staged], None], after: int = -1) -> Follower:
        """Call `apply` with every newest version on a thread of its own, and acknowledge what it has applied.

        When `apply` raises, this subscriber leaves the run, as what it serves is of no known version:
        `health().error`, `Follower.error` and the publisher's ticket say so.
        """
        self._raise_if_forked()
        require_call(apply, "apply")
        follower = Follower(self, apply, require_whole(after, "after", -math.inf))
        with self._intake.changed:
            self._intake.raise_if_unusable()
            if self._followers:
                raise DcsError(f"subscriber {self.name!r} is followed already; make another one")
            self._intake.raise_if_given_out()
            self._followers.append(follower)
        follower.start()
        return follower

    def health(self) -> Health:
        """What is known now about coordinator, publisher and versions."""
        self._raise_if_forked()
        intake = self._intake
        with intake.changed:
            ready = intake.slots.having(SlotState.READY)
            newest = intake.slots.newest_whole()
            error = intake.obstacle() or self._silence
            if error is None and intake.state.publisher == "lost":
                error = PublisherLost(
                    f"the publisher of run {self.run!r} stopped heartbeating; waiting for another one"
                )
            if error is None and intake.target is not None:
                error = intake.trouble or intake.waits_for_group()
            staging = "host"
            if intake.mirrors is not None:
                absent = intake.mirrors.absent
                staging = f"host, as {absent}" if absent else intake.mirrors.device
            return Health(
                "connected" if self._silence is None else "lost",
                intake.state.publisher,
                None if intake.target is None else intake.target.version,
                ready[0].target.version if ready else None,
                None if self._acked is None else self._acked.version,
                "" if newest is None else newest.wire,
                staging,
                error,
            )

    def await_fitting(self) -> None:
        """Wait while the run's publisher is one with another layout, and this is not closed."""
        self._intake.await_fitting()

    def fail(self, error: DcsError) -> None:
        """Leave the run for good because what this side serves can no longer be vouched for."""
        self._intake.fail(error)
        self._link.close(str(error))

    def close(self) -> None:
        """Leave the run, stop and join the threads, close the sockets. May be called twice."""
        if os.getpid() != self._pid or not self._intake.stop():
            return  # closed before; or a forked child, and what it has is its parent's
        self._link.close("the subscriber closed")
        if self._server is not None:
            self._server.close()
        self._intake.close()
        for follower in self._followers:
            follower.join(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What the link's thread calls.

    def _receive(self, message: FromCoordinator) -> None:
        with self._intake.changed:
            match message:
                case Joined():
                    self._member = message.member
                    self._intake.joined(message.lease_seconds, message.state)
                case RunState():
                    self._intake.see(message)
                case Fenced() if not message.rejoin:
                    self._intake.shut_out(from_refusal(message.code, message.message, message.detail))
                case Refused():
                    self._intake.broken = from_refusal(message.code, message.message, message.detail)
                case _:
                    return
            self._intake.changed.notify_all()

    def _coordinator_changed(self, error: DcsError | None) -> None:
        with self._intake.changed:
            self._silence = error
            self._intake.changed.notify_all()

    # What the caller's threads use.

    def _settle(
        self, staged: Staged, slot: Slot, turn: int, outcome: Literal["acked", "released"], pause: float
    ) -> None:
        """Any step may be the last of a call that is interrupted, so that the next call does them all."""
        self._raise_if_forked()
        with self._intake.changed:
            if staged.outcome == "released" and outcome == "acked":
                raise Unacknowledged(
                    f"version {staged.version} was released before it was acknowledged; ask next() for"
                    " it again"
                )
            staged.outcome = outcome = staged.outcome or outcome
            if slot.state is SlotState.HELD and slot.turns == turn:
                self._intake.settle(slot, outcome)
            self._intake.changed.notify_all()
            if outcome == "released" or self._intake.stopped:
                return
            if self._acked is None or (self._acked.epoch, self._acked.version) < (
                staged.epoch,
                staged.version,
            ):
                self._acked = Acked(staged.epoch, staged.version, staged.transfer_seconds, pause)
            acked = self._acked
        self._link.report(acked=acked)

    def _raise_if_forked(self) -> None:
        """Before any lock is taken: the child's copy of one may be held by a thread that it does not have."""
        if os.getpid() != self._pid:
            raise DcsError(
                f"subscriber {self.name!r} belongs to process {self._pid}; make one in this process"
            )

    def _hello(self) -> Hello:
        return Hello(self.run, self.name, self._member, self._fingerprint, self._token, self._chunk_bytes)
