"""The side that serves: brings each new version into a staging slot, verifies it, and hands it over whole."""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self

import torch

from dcs.arguments import (
    WIRES,
    require_chunk_bytes,
    require_collective,
    require_group,
    require_label,
    require_wires,
)
from dcs.control.address import require_reachable, require_token
from dcs.control.curve import MemberKeys
from dcs.control.link import Link
from dcs.control.messages import (
    Acked,
    Announcement,
    Fenced,
    FromCoordinator,
    Join,
    Joined,
    Receipt,
    Refused,
    RunState,
    Source,
)
from dcs.errors import (
    Closed,
    DcsError,
    NoMemory,
    ProtocolError,
    PublisherLost,
    StaleVersion,
    Timeout,
    Unacknowledged,
    from_refusal,
)
from dcs.follower import Follower
from dcs.layout import Layout
from dcs.manifest import CHUNK_BYTES
from dcs.memory.mirrors import Mirrors
from dcs.memory.shelf import Copy, Shelf, Superseded
from dcs.memory.slots import Slot, Slots, SlotState
from dcs.pull import Job, Puller
from dcs.staged import Health, Staged
from dcs.wire.chunks import unit_of
from dcs.wire.frames import Hello
from dcs.wire.gathering import Groups
from dcs.wire.machine import machine_id
from dcs.wire.server import ChunkServer
from dcs.wire.tls import Tls

_BACKOFF_SECONDS = (0.05, 1.0)  # between two attempts: the first, doubling up to the second
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
        group, group_size: the ranks of one engine give the same `group`; `next` then gives a version only
            when all of them have it, and to all of them the same one.
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
        require_label(run, "run")
        require_label(name, "name")
        require_wires(wires)
        require_collective(collective, collective_seconds)
        require_group(group, group_size)
        if streams < 1:
            raise DcsError(f"streams is {streams}; there has to be one")
        require_chunk_bytes(chunk_bytes)
        require_token(host, token, f"subscriber {name!r}")
        require_reachable(host, advertise, f"subscriber {name!r}")
        self.run = run
        self.name = name
        self.layout = layout
        self._token = token
        self._chunk_bytes = chunk_bytes
        self._fingerprint = layout.fingerprint
        self._timeout = timeout
        self._group = group
        self._shelf = Shelf(layout)
        self._slots = Slots(self._shelf, chunk_bytes)
        self._changed = threading.Condition()
        self._member = 0
        self._lease_seconds = 0.0
        self._state = RunState("absent", None)
        self._target: Announcement | None = None
        self._highest = (-1, -1)
        self._given_up: tuple[Announcement, DcsError | None] | None = None
        self._asks: list[int] = []
        self._acked: Acked | None = None
        self._reported = 0.0
        self._taken = -1
        self._silence: DcsError | None = None
        self._broken: DcsError | None = None
        self._trouble: DcsError | None = None
        self._followers: list[Follower] = []
        self._closed = False
        self._server: ChunkServer | None = None
        if serve:
            self._server = ChunkServer(
                self._shelf,
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
        self._mirrors = None if device is None else Mirrors(layout, device)
        groups = None
        if collective:
            groups = Groups(collective_seconds, device)
        self._puller = Puller(
            self._shelf,
            layout,
            chunk_bytes,
            hello=self._hello,
            layouts=lambda wanted: self._link.layouts(wanted, timeout),
            wires=wires,
            streams=streams,
            delta=delta,
            progress=progress,
            tls=tls,
            groups=groups,
            departed=self._has_departed,
            stopped=lambda: self._closed or self._broken is not None,
        )
        try:
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
        self._thread = threading.Thread(target=self._pull_forever, name="dcs-pull", daemon=True)
        self._thread.start()

    def next(self, after: int = -1, timeout: float = 30.0) -> Staged | None:
        """The newest version above `after` that is whole and verified here, or None after `timeout` seconds.

        Acknowledge or release it before calling again, else `Unacknowledged`. Raises `Closed`,
        `LayoutMismatch` (a publisher with another layout joined), `Evicted` (another subscriber took this
        name), `CorruptChunk` (the newest version cannot be had undamaged), `Unauthorized`, `ApplyFailed`.
        """
        with self._changed:
            self._raise_if_unusable()
            held = self._slots.having(SlotState.HELD)
            if held:
                raise Unacknowledged(
                    f"version {held[0].target.version} was given out before; call its ack() or release()"
                    " first"
                )
            self._asks.append(after)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._obstacle() or self._ready(after), timeout)
            finally:
                self._asks.remove(after)
            slot = self._ready(after)
            if slot is None:
                obstacle = self._obstacle()
                if obstacle is not None:
                    raise obstacle
                return None
            self._raise_if_unusable()
            slot.state = SlotState.HELD
            target = slot.target
            self._taken = max(self._taken, target.version)
            return Staged(
                target.version,
                target.epoch,
                dict(slot.copy.arena.tensors if slot.mirror is None else slot.mirror.tensors),
                slot.copy.arena.nbytes,
                slot.transfer_seconds,
                slot.wire,
                slot.from_ranks,
                slot.from_peers,
                lambda staged, outcome, pause: self._settle(staged, slot, outcome, pause),
            )

    def fetch(self, version: int | None = None, timeout: float = 30.0) -> dict[str, torch.Tensor]:
        """A copy of one version's tensors, acknowledged: the newest, or `version` once it is there.

        Raises `Timeout`, `StaleVersion` when a newer one has replaced `version`, or as `next`.
        """
        staged = self.next(-1 if version is None else version - 1, timeout)
        if staged is None:
            wanted = "no version" if version is None else f"version {version}"
            raise Timeout(
                f"{wanted} of run {self.run!r} was not staged within {timeout} s; health() may say why"
            )
        if version is not None and staged.version != version:
            staged.release()
            raise StaleVersion(
                f"version {version} of run {self.run!r} was replaced by version {staged.version}; fetch"
                " that one"
            )
        tensors = {name: tensor.clone() for name, tensor in staged.tensors.items()}
        staged.ack()
        return tensors

    def follow(self, apply: Callable[[Staged], None], after: int = -1) -> Follower:
        """Call `apply` with every newest version on a thread of its own, and acknowledge what it has applied.

        When `apply` raises, this subscriber leaves the run, as what it serves is of no known version:
        `health().error`, `Follower.error` and the publisher's ticket say so.
        """
        follower = Follower(self, apply, after)
        with self._changed:
            self._raise_if_unusable()
            self._followers.append(follower)
        follower.start()
        return follower

    def health(self) -> Health:
        """What is known now about coordinator, publisher and versions."""
        with self._changed:
            ready = self._slots.having(SlotState.READY)
            newest = self._slots.newest_whole()
            error = self._obstacle() or self._silence
            if error is None and self._state.publisher == "lost":
                error = PublisherLost(
                    f"the publisher of run {self.run!r} stopped heartbeating; waiting for another one"
                )
            if error is None and self._target is not None:
                error = self._trouble
            staging = "host"
            if self._mirrors is not None:
                absent = self._mirrors.absent
                staging = f"host, as {absent}" if absent else self._mirrors.device
            return Health(
                "connected" if self._silence is None else "lost",
                self._state.publisher,
                None if self._target is None else self._target.version,
                ready[0].target.version if ready else None,
                None if self._acked is None else self._acked.version,
                "" if newest is None else newest.wire,
                staging,
                error,
            )

    def fail(self, error: DcsError) -> None:
        """Leave the run for good because what this side serves can no longer be vouched for."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()
        self._puller.cut()
        self._link.close(str(error))

    def close(self) -> None:
        """Leave the run, stop and join the threads, close the sockets. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._puller.cut()
        self._link.close("the subscriber closed")
        if self._server is not None:
            self._server.close()
        self._thread.join()
        for follower in self._followers:
            follower.join(None)
        for slot in self._slots.having(SlotState.READY, SlotState.SPENT):
            self._puller.release(slot.copy)  # one that is given out may still be looked at
        self._puller.close()
        if self._mirrors is not None and not self._slots.having(SlotState.HELD):
            self._mirrors.close()
        self._shelf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What the link's thread calls.

    def _receive(self, message: FromCoordinator) -> None:
        self._take_in(message)
        with self._changed:
            announced, newest = self._state.announcement, self._slots.newest_whole()
            if announced is None or newest is None or not newest.is_of(announced):
                return
            if newest.target.epoch == announced.epoch:
                return
            # The same weights under another epoch, as after a restart of the coordinator or the publisher.
            newest.target = announced
            receipt = Receipt(
                announced.epoch, announced.version, newest.wire, newest.from_ranks, newest.from_peers
            )
        self._link.report(staged=receipt)

    def _take_in(self, message: FromCoordinator) -> None:
        with self._changed:
            match message:
                case Joined():
                    self._member = message.member
                    self._lease_seconds = message.lease_seconds
                    self._highest = (-1, -1)
                    self._see(message.state)
                case RunState():
                    self._see(message)
                case Fenced() if not message.rejoin:
                    self._broken = from_refusal(message.code, message.message, message.detail)
                case Refused():
                    self._broken = from_refusal(message.code, message.message, message.detail)
                case _:
                    return
            self._changed.notify_all()

    def _see(self, state: RunState) -> None:
        self._state = state
        announcement = state.announcement
        if self._given_up is not None and self._given_up[1] is None:
            self._given_up = None  # a publish that failed may have been repeated: ask again, once a heartbeat
        if announcement is None:
            self._target = None
        elif (announcement.epoch, announcement.version) >= self._highest:  # older: a replay
            self._highest = (announcement.epoch, announcement.version)
            self._target = announcement
            self._renew(announcement)

    def _renew(self, target: Announcement) -> None:
        """What is here is offered under a new epoch: say that we have it, as others may take it from here."""
        for slot in self._slots.having(SlotState.READY, SlotState.HELD, SlotState.SPENT):
            if slot.is_of(target) and slot.target.epoch < target.epoch:
                slot.target = target
                receipt = Receipt(target.epoch, target.version, slot.wire, slot.from_ranks, slot.from_peers)
                self._link.report(staged=receipt)

    def _coordinator_changed(self, error: DcsError | None) -> None:
        with self._changed:
            self._silence = error
            self._changed.notify_all()

    def _has_departed(self, source: Source) -> bool:
        """Whether the coordinator offers it no more, while it offers others."""
        sources = self._state.sources
        return bool(sources) and all(other.member != source.member for other in sources)

    # What the caller's threads use; all under the condition's lock.

    def _obstacle(self) -> DcsError | None:
        if self._closed:
            return Closed("this subscriber was closed")
        if self._broken is not None:
            return self._broken
        if self._given_up is not None and self._given_up[0] == self._target:
            return self._given_up[1]
        return None

    def _raise_if_unusable(self) -> None:
        if self._closed or self._broken is not None:
            raise self._broken or Closed("this subscriber was closed")

    def _ready(self, after: int) -> Slot | None:
        """The newest version above `after` that may be given out."""
        for slot in self._slots.having(SlotState.READY):
            if slot.target.version > after and (not self._group or slot.target.version <= self._state.commit):
                return slot
        return None

    def _settle(
        self, staged: Staged, slot: Slot, outcome: Literal["acked", "released"], pause: float
    ) -> None:
        with self._changed:
            before = staged.outcome
            if before is not None:
                if before == "released" and outcome == "acked":
                    raise Unacknowledged(
                        f"version {staged.version} was released before it was acknowledged; ask next() for"
                        " it again"
                    )
                return
            staged.outcome = outcome
            newer = [other for other in self._slots.having(SlotState.READY) if other is not slot]
            slot.state = SlotState.SPENT if outcome == "acked" or newer else SlotState.READY
            if outcome == "acked":
                self._acked = Acked(staged.epoch, staged.version, staged.transfer_seconds, pause)
            acked = self._acked if outcome == "acked" and not self._closed and self._broken is None else None
            self._changed.notify_all()
        if acked is not None:
            self._link.report(acked=acked)

    # The pulling thread.

    def _pull_forever(self) -> None:
        backoff = 0.0
        job: Job | None = None
        try:
            while True:
                with self._changed:
                    if backoff:
                        failed = self._target
                        self._changed.wait_for(
                            lambda failed=failed: self._closed or self._broken or self._target != failed,
                            backoff,
                        )
                    self._changed.wait_for(
                        lambda: self._closed or self._broken or self._tidy() or self._wanted()
                    )
                    if self._closed or self._broken is not None:
                        return
                    spent = self._tidy()
                    target = self._target if self._wanted() else None
                for slot in spent:
                    self._discard(slot)
                if target is None:
                    continue
                job = self._job(job, target)
                before = 0 if job.copy is None else job.copy.remaining
                if self._pull(job):
                    job, backoff = None, 0.0
                elif job.copy is not None and job.copy.remaining < before:
                    backoff = _BACKOFF_SECONDS[0]
                else:
                    backoff = min(max(_BACKOFF_SECONDS[0], 2 * backoff), _BACKOFF_SECONDS[1])
        finally:
            with self._changed:
                if not self._closed and self._broken is None:
                    self._broken = DcsError(
                        f"the pulling thread of subscriber {self.name!r} has died; its traceback is on stderr"
                    )
                self._changed.notify_all()

    def _wanted(self) -> bool:
        target = self._target
        if target is None or (self._given_up is not None and self._given_up[0] == target):
            return False
        whole = (SlotState.READY, SlotState.HELD, SlotState.SPENT)
        here = [slot for slot in self._slots.having(*whole) if slot.is_of(target)]
        if any(slot.state is not SlotState.SPENT for slot in here):
            return False
        if not (target.version > self._taken or any(after < target.version for after in self._asks)):
            return False
        if here:  # asked for once more
            here[0].state = SlotState.READY
            self._changed.notify_all()
            return False
        return not self._slots.full or self._slots.victim(self._may_pass_over) is not None

    def _may_pass_over(self, slot: Slot) -> bool:
        """Whether a version that is ready here may go. The ranks of an engine commit the same versions: what
        the coordinator has told the group to commit stays, and so does, for a lease, what it may be about to.
        """
        if not self._group or slot.target.version < self._state.commit:
            return True
        settled = time.monotonic() >= self._reported + self._lease_seconds
        return slot.target.version > self._state.commit and settled

    def _tidy(self) -> list[Slot]:
        """Mapped versions that are spent: they are their owner's, and not kept."""
        return [slot for slot in self._slots.having(SlotState.SPENT) if slot.copy.arena.mapped]

    def _discard(self, slot: Slot) -> None:
        with self._changed:
            self._slots.all.remove(slot)
        self._shelf.withdraw(slot.copy)
        self._puller.release(slot.copy)

    def _abandon(self) -> None:
        """What was coming has been overtaken."""
        for slot in self._slots.having(SlotState.FILLING):
            self._discard(slot)

    def _job(self, job: Job | None, target: Announcement) -> Job:
        """The job for `target`: the one under way when it brings the same weights, if under another epoch."""
        if job is not None and (job.target.version, job.target.roots) == (target.version, target.roots):
            with self._changed:
                job.target = target
                for slot in self._slots.having(SlotState.FILLING):
                    slot.target = target
            return job
        self._abandon()
        return Job(target)

    def _reserve(self, job: Job) -> tuple[Copy, Copy | None, Copy | None]:
        self._abandon()  # a buffer that a broadcast has spoilt
        with self._changed:
            victim = self._slots.victim(self._may_pass_over)
        copy, former = self._slots.make_room(job.target, job.root, victim)
        with self._changed:
            if victim is not None and victim.copy not in self._shelf.held:
                self._slots.all.remove(victim)
            newest = self._slots.newest_whole()
            self._slots.all.append(Slot(copy, job.target, SlotState.FILLING))
        return copy, None if newest is None else newest.copy, former

    def _pull(self, job: Job) -> bool:
        """One attempt; False when another one should follow after a pause."""
        with self._changed:
            sources, gathering = self._state.sources, self._state.gathering
        try:
            self._puller.attempt(job, sources, gathering, self._reserve)
        except Superseded:
            self._give_up(job, None)
            return True
        except (PublisherLost, NoMemory) as error:
            with self._changed:
                self._trouble = error
            self._report_slow(job)
            return False
        except MemoryError as error:
            with self._changed:
                self._trouble = NoMemory(f"no memory to take version {job.target.version}: {error}")
            return False
        except (OSError, DcsError) as error:
            if isinstance(error, DcsError) and not isinstance(error, ProtocolError):
                self._give_up(job, error)
                return True
            with self._changed:
                self._trouble = PublisherLost(f"version {job.target.version} cannot be pulled now: {error!r}")
            return False
        if job.copy is None or not job.copy.complete:
            return False  # closed meanwhile
        self._stage(job, job.copy)
        return True

    def _stage(self, job: Job, copy: Copy) -> None:
        with self._changed:
            mine = [slot for slot in self._slots.all if slot.copy is copy]
            slot = mine[0] if mine else Slot(copy, job.target, SlotState.FILLING)
            if not mine:
                self._slots.all.append(slot)
        if self._mirrors is not None:
            self._mirror(slot, self._mirrors)
        seconds = time.monotonic() - job.began
        with self._changed:
            for other in self._slots.having(SlotState.READY):
                if not self._group or other.target.version < self._state.commit:
                    other.state = SlotState.SPENT
            slot.state, slot.transfer_seconds = SlotState.READY, seconds
            slot.wire, slot.from_ranks, slot.from_peers = job.wire, job.from_ranks, job.from_peers
            self._trouble = None
            self._reported = time.monotonic()
            self._changed.notify_all()
        receipt = Receipt(job.target.epoch, job.target.version, job.wire, job.from_ranks, job.from_peers)
        self._link.report(staged=receipt, slow=tuple(sorted(job.slow))[:64])

    def _mirror(self, slot: Slot, mirrors: Mirrors) -> None:
        """Stage a version on the device too; one that is ready there gives way if there is no other room."""
        with self._changed:
            ready = [other for other in self._slots.having(SlotState.READY) if other.mirror is not None]
            held = [other for other in self._slots.having(SlotState.HELD) if other.mirror is not None]
            if ready and held and self._may_pass_over(ready[-1]):
                ready.pop().state = SlotState.SPENT
            used = [*ready, *held]
        mirrors.stage(slot, used)

    def _report_slow(self, job: Job) -> None:
        if job.slow:
            self._link.report(slow=tuple(sorted(job.slow))[:64])

    def _give_up(self, job: Job, error: DcsError | None) -> None:
        self._abandon()
        with self._changed:
            self._given_up = (job.target, error)
            self._changed.notify_all()

    def _hello(self) -> Hello:
        return Hello(self.run, self.name, self._member, self._fingerprint, self._token, self._chunk_bytes)
