"""What of a run has arrived at a subscriber, and the thread that brings it."""

import threading
import time
from collections.abc import Sequence
from typing import Literal, Protocol

from dcs.control.messages import Announcement, Receipt, RunState, Source
from dcs.errors import (
    Closed,
    DcsError,
    LayoutMismatch,
    NoMemory,
    ProtocolError,
    PublisherLost,
    Unacknowledged,
)
from dcs.interruptible import Condition
from dcs.layout import Layout
from dcs.memory.mirrors import Mirrors
from dcs.memory.shelf import Copy, Shelf, Superseded
from dcs.memory.slots import Slot, Slots, SlotState
from dcs.pull import Job, Puller

_BACKOFF_SECONDS = (0.05, 1.0)  # between two attempts: the first, doubling up to the second


class Report(Protocol):
    """Tells the coordinator."""

    def __call__(
        self, *, staged: Receipt | None = None, slow: Sequence[int] = (), lost: int | None = None
    ) -> None: ...


class Intake:
    """Keeps up with the newest version, and gives it out.

    Args:
        name: of the subscriber, for errors.
        layout, chunk_bytes: of the copies here.
        group: the ranks that commit together with this one; "" commits alone.
        device: where versions are staged too, or None.
        report: to the coordinator; called with `changed` held or not.

    Attributes:
        changed: guards everything here.
        state: what the coordinator said last.
        target: the newest version that can be had, or None.
        broken: why nothing more is given out, or None.
        trouble: why the newest version cannot be had just now, or None.
    """

    def __init__(
        self, name: str, layout: Layout, chunk_bytes: int, group: str, device: str | None, report: Report
    ) -> None:
        self.shelf = Shelf(layout)
        self.slots = Slots(self.shelf, chunk_bytes)
        self.mirrors = None if device is None else Mirrors(layout, device)
        self.changed = Condition()
        self.state = RunState("absent", None)
        self.target: Announcement | None = None
        self.broken: DcsError | None = None
        self.trouble: DcsError | None = None
        self._unfit: DcsError | None = None  # while the run's ranks have another layout
        self.closed = False
        self._name = name
        self._group = group
        self._report = report
        self._lease_seconds = 0.0
        self._highest = (-1, -1)
        self._given_up: tuple[Announcement, DcsError | None] | None = None
        self._asks: list[int] = []
        self._reported = 0.0
        self._taken = -1
        self._taken_roots: tuple[bytes, ...] = ()
        self._puller: Puller | None = None
        self._thread = threading.Thread(target=self._pull_forever, name="dcs-pull", daemon=True)

    def start(self, puller: Puller) -> None:
        """Begin to take versions in."""
        self._puller = puller
        self._thread.start()

    def take(self, after: int, timeout: float, given: list[Slot]) -> Slot | None:
        """Give out the newest version above `after` that may be, or None when the time is over. It is in
        `given` before anything else: whoever is interrupted has to settle it.

        Raises what `Subscriber.next` does.
        """
        with self.changed:
            self.raise_if_unusable()
            self.raise_if_given_out()
            self._asks.append(after)
            self.changed.notify_all()
            try:
                self.changed.wait_for(lambda: self.obstacle() or self._ready(after), timeout)
            finally:
                self._asks.remove(after)
            slot = self._ready(after)
            if slot is None:
                obstacle = self.obstacle()
                if obstacle is not None:
                    raise obstacle
                return None
            self.raise_if_unusable()
            given.append(slot)
            slot.turns += 1
            slot.state = SlotState.HELD
            if slot.target.version >= self._taken:
                self._taken, self._taken_roots = slot.target.version, slot.target.roots
            return slot

    def settle(self, slot: Slot, outcome: Literal["acked", "released"]) -> None:
        """What was given out is not looked at any more; with `changed` held."""
        newer = [other for other in self.slots.having(SlotState.READY) if other is not slot]
        slot.state = SlotState.SPENT if outcome == "acked" or newer else SlotState.READY
        self.changed.notify_all()

    def fail(self, error: DcsError) -> None:
        """Give nothing out any more."""
        with self.changed:
            self.broken = self.broken or error
            self.changed.notify_all()
        if self._puller is not None:
            self._puller.cut()

    def stop(self) -> bool:
        """Begin to end; False when it was begun before."""
        with self.changed:
            if self.closed:
                return False
            self.closed = True
            self.changed.notify_all()
        if self._puller is not None:
            self._puller.cut()
        return True

    def close(self) -> None:
        """After `stop`, when the link and the server are closed: join the thread, let memory go."""
        if self._puller is not None:
            self._thread.join()
            for slot in self.slots.having(SlotState.READY, SlotState.SPENT):
                self._puller.release(slot.copy)  # one that is given out may still be looked at
            self._puller.close()
        if self.mirrors is not None and not self.slots.having(SlotState.HELD):
            self.mirrors.close()
        self.slots.all.clear()
        self.shelf.close()

    @property
    def stopped(self) -> bool:
        """Whether nothing more is to be brought."""
        return self.closed or self.broken is not None

    # What the link's thread calls, with `changed` held.

    def joined(self, lease_seconds: float, state: RunState) -> None:
        """The coordinator has let this subscriber in, perhaps anew."""
        self._lease_seconds = lease_seconds
        self._highest = (-1, -1)
        self._unfit = None
        self.see(state)

    def shut_out(self, error: DcsError) -> None:
        """The coordinator has ended the membership: for good, or until ranks with a layout that fits come."""
        if isinstance(error, LayoutMismatch):
            self._unfit, self.target = error, None
        else:
            self.broken = error

    def see(self, state: RunState) -> None:
        """The coordinator says how the run stands."""
        self.state = state
        announcement = state.announcement
        if self._given_up is not None and self._given_up[1] is None:
            self._given_up = None  # a publish that failed may have been repeated: ask again, once a heartbeat
        if announcement is None:
            self.target = None
        elif (announcement.epoch, announcement.version) >= self._highest:  # older: a replay
            self._highest = (announcement.epoch, announcement.version)
            self.target = announcement
            self._renew(announcement)

    def _renew(self, target: Announcement) -> None:
        """What is here is offered under a new epoch: say that we have it, as others may take it from here."""
        for slot in self.slots.having(SlotState.READY, SlotState.HELD, SlotState.SPENT):
            if slot.is_of(target) and slot.target.epoch < target.epoch:
                slot.target = target
                receipt = Receipt(target.epoch, target.version, slot.wire, slot.from_ranks, slot.from_peers)
                self._report(staged=receipt)

    def has_departed(self, source: Source) -> bool:
        """Whether the coordinator offers it no more, while it offers others."""
        sources = self.state.sources
        return bool(sources) and all(other.member != source.member for other in sources)

    # What the caller's threads use; with `changed` held.

    def obstacle(self) -> DcsError | None:
        """What `next` raises when there is nothing to give out, or None."""
        if self.closed:
            return Closed("this subscriber was closed")
        if self.broken is not None:
            return self.broken
        if self._unfit is not None:
            return self._unfit
        if self._given_up is not None and self._given_up[0] == self.target:
            return self._given_up[1]
        return None

    def await_fitting(self) -> None:
        """Wait until this subscriber's layout is not what stands in the way, or it is closed."""
        with self.changed:
            self.changed.wait_for(lambda: not isinstance(self.obstacle(), LayoutMismatch))

    def waits_for_group(self) -> DcsError | None:
        """Why a version that is ready is not given out, when that is for the group's sake."""
        ready = self.slots.having(SlotState.READY)
        if not self._group or not ready or self._ready(-1) is not None:
            return None
        return DcsError(
            f"version {ready[0].target.version} is here, and waits until all ranks of group {self._group!r}"
            " have it"
        )

    def raise_if_given_out(self) -> None:
        """Raise `Unacknowledged` while a version is looked at; with `changed` held."""
        held = self.slots.having(SlotState.HELD)
        if held:
            raise Unacknowledged(
                f"version {held[0].target.version} was given out before; call its ack() or release() first"
            )

    def raise_if_unusable(self) -> None:
        """Raise `Closed`, or why nothing is given out any more."""
        if self.closed or self.broken is not None:
            raise self.broken or Closed("this subscriber was closed")

    def _ready(self, after: int) -> Slot | None:
        """The newest version above `after` that may be given out."""
        for slot in self.slots.having(SlotState.READY):
            target = slot.target
            if self._is_above(target, after) and (not self._group or target.version <= self.state.commit):
                return slot
        return None

    def _is_above(self, target: Announcement, after: int) -> bool:
        """Whether a version is newer than `after`, or is the one last given out, with other weights: of a
        trainer that began anew and offers its last version again, which nobody had hashed before.
        """
        anew = after == self._taken and target.roots != self._taken_roots
        return target.version > after or (anew and target.version == after)

    # The pulling thread.

    def _pull_forever(self) -> None:
        backoff = 0.0
        job: Job | None = None
        try:
            while True:
                with self.changed:
                    if backoff:
                        failed = self.target
                        self.changed.wait_for(
                            lambda failed=failed: self.closed or self.broken or self.target != failed,
                            backoff,
                        )
                    self.changed.wait_for(
                        lambda: self.closed or self.broken or self._tidy() or self._wanted()
                    )
                    if self.closed or self.broken is not None:
                        return
                    target = (
                        self.target if self._wanted() else None
                    )  # before `_tidy`: it may want one of these
                    spent = self._tidy()
                    for slot in spent:
                        self.slots.all.remove(slot)
                for slot in spent:
                    self._let_go(slot)
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
            with self.changed:
                if not self.closed and self.broken is None:
                    self.broken = DcsError(
                        f"the pulling thread of subscriber {self._name!r} has died; its traceback is on"
                        " stderr"
                    )
                self.changed.notify_all()

    def _wanted(self) -> bool:
        target = self.target
        if target is None or (self._given_up is not None and self._given_up[0] == target):
            return False
        whole = (SlotState.READY, SlotState.HELD, SlotState.SPENT)
        here = [slot for slot in self.slots.having(*whole) if slot.is_of(target)]
        if any(slot.state is not SlotState.SPENT for slot in here):
            return False
        if not (target.version > self._taken or any(self._is_above(target, after) for after in self._asks)):
            return False
        if here:  # asked for once more
            here[0].state = SlotState.READY
            self.changed.notify_all()
            return False
        return not self.slots.full or self.slots.victim(self._may_pass_over) is not None

    def _may_pass_over(self, slot: Slot) -> bool:
        """Whether a version that is ready here may go: not when somebody is waiting for it.

        The ranks of an engine commit the same versions: what the coordinator has told the group to commit
        stays, and so does, for a lease, what it may be about to.
        """
        waited_for = any(self._is_above(slot.target, after) for after in self._asks)
        if waited_for and self._ready(-1) is slot:
            return False
        if not self._group or slot.target.version < self.state.commit:
            return True
        settled = time.monotonic() >= self._reported + self._lease_seconds
        return slot.target.version > self.state.commit and settled

    def _tidy(self) -> list[Slot]:
        """Mapped versions that are spent: they are their owner's, and not kept."""
        return [slot for slot in self.slots.having(SlotState.SPENT) if slot.copy.arena.mapped]

    def _discard(self, slot: Slot) -> None:
        with self.changed:
            self.slots.all.remove(slot)
        self._let_go(slot)

    def _let_go(self, slot: Slot) -> None:
        self.shelf.withdraw(slot.copy)
        if self._puller is not None:
            self._puller.release(slot.copy)

    def _abandon(self) -> None:
        """What was coming has been overtaken."""
        for slot in self.slots.having(SlotState.FILLING):
            self._discard(slot)

    def _job(self, job: Job | None, target: Announcement) -> Job:
        """The job for `target`: the one under way when it brings the same weights, if under another epoch."""
        if job is not None and (job.target.version, job.target.roots) == (target.version, target.roots):
            with self.changed:
                job.target = target
                for slot in self.slots.having(SlotState.FILLING):
                    slot.target = target
            return job
        self._abandon()
        return Job(target)

    def _reserve(self, job: Job) -> tuple[Copy, Copy | None, Copy | None]:
        self._abandon()  # a buffer that a broadcast has spoilt
        with self.changed:
            victim = self.slots.victim(self._may_pass_over) if self.slots.full else None
            if victim is not None:
                self.slots.all.remove(victim)  # at once: nobody may be given what is about to be overwritten
        try:
            copy, former = self.slots.make_room(job.target, job.root, victim)
        except BaseException:
            with self.changed:
                if victim is not None and victim.copy in self.shelf.held:
                    self.slots.all.append(victim)
            raise
        with self.changed:
            newest = self.slots.newest_whole()
            self.slots.all.append(Slot(copy, job.target, SlotState.FILLING))
        return copy, None if newest is None else newest.copy, former

    def _pull(self, job: Job) -> bool:
        """One attempt; False when another one should follow after a pause."""
        assert self._puller is not None
        with self.changed:
            sources, gathering = self.state.sources, self.state.gathering
        try:
            self._puller.attempt(job, sources, gathering, self._reserve)
        except Superseded:
            self._give_up(job, None)
            return True
        except (PublisherLost, NoMemory) as error:
            with self.changed:
                self.trouble = error
            self._report_slow(job)
            return False
        except MemoryError as error:
            with self.changed:
                self.trouble = NoMemory(f"no memory to take version {job.target.version}: {error}")
            return False
        except (OSError, DcsError) as error:
            if isinstance(error, DcsError) and not isinstance(error, ProtocolError):
                self._give_up(job, error)
                return True
            with self.changed:
                self.trouble = PublisherLost(f"version {job.target.version} cannot be pulled now: {error!r}")
            return False
        if job.copy is None or not job.copy.complete:
            return False  # closed meanwhile
        self._stage(job, job.copy)
        return True

    def _stage(self, job: Job, copy: Copy) -> None:
        with self.changed:
            mine = [slot for slot in self.slots.all if slot.copy is copy]
            slot = mine[0] if mine else Slot(copy, job.target, SlotState.FILLING)
            if not mine:
                self.slots.all.append(slot)
        if self.mirrors is not None:
            self._mirror(slot, self.mirrors)
        seconds = time.monotonic() - job.began
        with self.changed:
            for other in self.slots.having(SlotState.READY):
                if not self._group or other.target.version < self.state.commit:
                    other.state = SlotState.SPENT
            slot.state, slot.transfer_seconds = SlotState.READY, seconds
            slot.wire, slot.from_ranks, slot.from_peers = job.wire, job.from_ranks, job.from_peers
            self.trouble = None
            self._reported = time.monotonic()
            self.changed.notify_all()
        receipt = Receipt(job.target.epoch, job.target.version, job.wire, job.from_ranks, job.from_peers)
        self._report(staged=receipt, slow=tuple(sorted(job.slow))[:64])

    def _mirror(self, slot: Slot, mirrors: Mirrors) -> None:
        """Stage a version on the device too; one that is ready there gives way if there is no other room."""
        with self.changed:
            ready = [other for other in self.slots.having(SlotState.READY) if other.mirror is not None]
            held = [other for other in self.slots.having(SlotState.HELD) if other.mirror is not None]
            if ready and held and self._may_pass_over(ready[-1]):
                ready.pop().state = SlotState.SPENT
            used = [*ready, *held]
        mirrors.stage(slot, used)

    def _report_slow(self, job: Job) -> None:
        if job.slow:
            self._report(slow=tuple(sorted(job.slow))[:64])

    def _give_up(self, job: Job, error: DcsError | None) -> None:
        if error is None:
            self._report(lost=job.target.version)
        self._abandon()
        with self.changed:
            self._given_up = (job.target, error)
            self.changed.notify_all()
