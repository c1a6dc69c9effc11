"""The side that serves: pulls each new version into a staging slot, verifies it, and hands it over whole."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

import torch

from dcs.control.link import Link
from dcs.control.messages import Acked, Announcement, Fenced, FromCoordinator, Join, Joined, Refused, RunState
from dcs.errors import (
    Closed,
    DcsError,
    ProtocolError,
    PublisherLost,
    StaleVersion,
    Timeout,
    Unacknowledged,
    from_refusal,
)
from dcs.follower import Follower
from dcs.layout import Layout
from dcs.manifest import Placement
from dcs.memory.arena import Arena
from dcs.memory.snapshots import Superseded
from dcs.staged import Health, Slot, SlotState, Staged
from dcs.wire.client import ChunkClient, Progress
from dcs.wire.frames import Hello

_BACKOFF_SECONDS = (0.05, 1.0)  # between two attempts to connect: the first, doubling up to the second


class Subscriber:
    """Receives the versions of one run, the newest first, in the background.

    Args:
        address: the coordinator's.
        run: the run to follow; its publisher may join later.
        name: unique in the run; a newer subscriber of the same name fences this one.
        layout: of the model that will take the weights; has to equal the publisher's.
        token: the coordinator's.
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
        timeout: float = 10.0,
    ) -> None:
        self.run = run
        self.name = name
        self.layout = layout
        self._token = token
        self._placement = Placement.of(layout)
        self._slots = (Slot(Arena(layout)), Slot(Arena(layout)))
        self._changed = threading.Condition()
        self._member = 0
        self._publisher: Literal["absent", "alive", "lost"] = "absent"
        self._target: Announcement | None = None
        self._highest = (-1, -1)
        self._given_up: tuple[Announcement, DcsError | None] | None = None
        self._asks: list[int] = []
        self._acked: Acked | None = None
        self._taken = -1
        self._silence: DcsError | None = None
        self._broken: DcsError | None = None
        self._trouble: DcsError | None = None
        self._client: ChunkClient | None = None
        self._followers: list[Follower] = []
        self._closed = False
        self._link = Link(address, self._receive, self._coordinator_changed)
        try:
            self._link.join(Join(0, "subscriber", run, name, layout, token, None), timeout)
        except BaseException:
            self._link.close()
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
            held = [slot for slot in self._slots if slot.state is SlotState.HELD]
            if held and held[0].progress is not None:
                raise Unacknowledged(
                    f"version {held[0].progress.target.version} was given out before; call its ack() or"
                    " release() first"
                )
            self._asks.append(after)
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._obstacle() or self._ready(after), timeout)
            finally:
                self._asks.remove(after)
            slot = self._ready(after)
            if slot is None or slot.progress is None:
                obstacle = self._obstacle()
                if obstacle is not None:
                    raise obstacle
                return None
            self._raise_if_unusable()
            slot.state = SlotState.HELD
            target = slot.progress.target
            self._taken = max(self._taken, target.version)
            return Staged(
                target.version,
                target.epoch,
                dict(slot.arena.tensors),
                slot.arena.nbytes,
                slot.transfer_seconds,
                slot,
                self._settle,
                self._link.acknowledge,
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
            ready = [
                slot.progress.target.version
                for slot in self._slots
                if slot.state is SlotState.READY and slot.progress is not None
            ]
            error = self._obstacle() or self._silence
            if error is None and self._publisher == "lost":
                error = PublisherLost(
                    f"the publisher of run {self.run!r} stopped heartbeating; waiting for another one"
                )
            if error is None and self._target is not None:
                error = self._trouble
            return Health(
                "connected" if self._silence is None else "lost",
                self._publisher,
                None if self._target is None else self._target.version,
                max(ready, default=None),
                None if self._acked is None else self._acked.version,
                error,
            )

    def fail(self, error: DcsError) -> None:
        """Leave the run for good because what this side serves can no longer be vouched for."""
        with self._changed:
            self._broken = self._broken or error
            self._cut()
            self._changed.notify_all()
        self._link.close(str(error))

    def close(self) -> None:
        """Leave the run, stop and join the threads, close the sockets. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._cut()
            self._changed.notify_all()
        self._link.close("the subscriber closed")
        self._thread.join()
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
        with self._changed:
            match message:
                case Joined():
                    self._member = message.member
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
        self._publisher = state.publisher
        announcement = state.announcement
        if self._given_up is not None and self._given_up[1] is None:
            self._given_up = None  # a publish that failed may have been repeated: ask again, once a heartbeat
        if announcement is None:
            self._target = None
        elif (announcement.epoch, announcement.version) >= self._highest:  # older: a replay
            self._highest = (announcement.epoch, announcement.version)
            self._target = announcement

    def _coordinator_changed(self, error: DcsError | None) -> None:
        with self._changed:
            self._silence = error
            self._changed.notify_all()

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
        ready = [
            slot
            for slot in self._slots
            if slot.state is SlotState.READY
            and slot.progress is not None
            and slot.progress.target.version > after
        ]
        return max(
            ready, key=lambda slot: slot.progress.target.version if slot.progress else -1, default=None
        )

    def _settle(self, staged: Staged, slot: Slot, outcome: Literal["acked", "released"]) -> bool:
        """Give the slot of `staged` back; True when there is an acknowledgement to send."""
        with self._changed:
            before = staged.outcome
            if before is not None:
                if before == "released" and outcome == "acked":
                    raise Unacknowledged(
                        f"version {staged.version} was released before it was acknowledged; ask next() for"
                        " it again"
                    )
                return False
            staged.outcome = outcome
            newer = any(other is not slot and other.state is SlotState.READY for other in self._slots)
            slot.state = SlotState.FREE if outcome == "acked" or newer else SlotState.READY
            if outcome == "acked":
                self._acked = Acked(staged.epoch, staged.version, staged.transfer_seconds)
            self._changed.notify_all()
            return outcome == "acked" and not self._closed and self._broken is None

    # The pulling thread.

    def _pull_forever(self) -> None:
        backoff = 0.0
        try:
            while True:
                with self._changed:
                    if backoff:
                        self._pause(self._target, backoff)
                    self._changed.wait_for(lambda: self._closed or self._broken or self._wanted())
                    if self._closed or self._broken is not None or self._target is None:
                        return
                    slot, target = self._begin(self._target)
                before = 0 if slot.progress is None else slot.progress.received
                if self._pull(slot, target):
                    backoff = 0.0
                elif slot.progress is not None and slot.progress.received > before:
                    backoff = _BACKOFF_SECONDS[0]
                else:
                    backoff = min(max(_BACKOFF_SECONDS[0], 2 * backoff), _BACKOFF_SECONDS[1])
        finally:
            with self._changed:
                if not self._closed and self._broken is None:
                    self._broken = DcsError(
                        f"the pulling thread of subscriber {self.name!r} has died; its traceback is on stderr"
                    )
                client, self._client = self._client, None
                if client is not None:
                    client.close()
                self._changed.notify_all()

    def _pause(self, failed: Announcement | None, seconds: float) -> None:
        """Before the next attempt; a newer version or the end cuts it short."""
        self._changed.wait_for(lambda: self._closed or self._broken or self._target != failed, seconds)

    def _wanted(self) -> bool:
        target = self._target
        if target is None or (self._given_up is not None and self._given_up[0] == target):
            return False
        if any(slot.holds(target) for slot in self._slots if slot.state in (SlotState.READY, SlotState.HELD)):
            return False
        return target.version > self._taken or any(after < target.version for after in self._asks)

    def _begin(self, target: Announcement) -> tuple[Slot, Announcement]:
        by_state = {slot.state: slot for slot in self._slots if slot.state is not SlotState.HELD}
        slot = by_state.get(SlotState.FILLING) or by_state.get(SlotState.FREE) or by_state[SlotState.READY]
        if slot.state is not SlotState.FILLING or slot.progress is None or slot.progress.target != target:
            slot.progress = Progress(target)
            slot.began = time.monotonic()
        slot.state = SlotState.FILLING
        return slot, target

    def _pull(self, slot: Slot, target: Announcement) -> bool:
        """One attempt; False when another one should follow after a pause."""
        progress = slot.progress
        assert progress is not None
        try:
            client = self._connect(target)
            client.pull(progress, slot.arena, self._placement)
        except Superseded:
            self._give_up(slot, target, None)
            return True
        except (OSError, DcsError) as error:
            self._disconnect()
            if isinstance(error, DcsError) and not isinstance(error, ProtocolError):
                self._give_up(slot, target, error)
                return True
            where = f"{target.endpoint.host}:{target.endpoint.port}"
            with self._changed:
                self._trouble = PublisherLost(
                    f"version {target.version} of run {self.run!r} cannot be pulled from {where} now:"
                    f" {error!r}"
                )
            return False
        with self._changed:
            for other in self._slots:
                if other is not slot and other.state is SlotState.READY:
                    other.state = SlotState.FREE
            self._trouble = None
            slot.transfer_seconds = time.monotonic() - slot.began
            slot.state = SlotState.READY
            self._changed.notify_all()
        return True

    def _connect(self, target: Announcement) -> ChunkClient:
        client = self._client
        if client is not None and client.endpoint == target.endpoint:
            return client
        self._disconnect()
        client = ChunkClient(target.endpoint)
        with self._changed:
            self._client = client
            if self._closed or self._broken is not None:
                raise ConnectionAbortedError("closed while connecting")
            hello = Hello(self.run, self.name, self._member, self._placement.fingerprint, self._token)
        client.greet(hello)
        return client

    def _disconnect(self) -> None:
        with self._changed:
            client, self._client = self._client, None
            if client is not None:
                client.close()

    def _cut(self) -> None:
        if self._client is not None:
            self._client.cut()

    def _give_up(self, slot: Slot, target: Announcement, error: DcsError | None) -> None:
        with self._changed:
            self._given_up = (target, error)
            slot.state, slot.progress = SlotState.FREE, None
            self._changed.notify_all()
