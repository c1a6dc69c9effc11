"""What a subscriber has: two staging slots, the version it hands over, and what it knows of the others."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from dcs.control.messages import Acked, Announcement
from dcs.errors import DcsError
from dcs.memory.arena import Arena
from dcs.wire.client import Progress


class SlotState(enum.Enum):
    """What a slot is for just now."""

    FREE = enum.auto()
    FILLING = enum.auto()
    READY = enum.auto()
    HELD = enum.auto()


@dataclass(eq=False)
class Slot:
    """A staging buffer and the version that it holds or is being filled with."""

    arena: Arena
    state: SlotState = SlotState.FREE
    progress: Progress | None = None
    began: float = 0.0
    transfer_seconds: float = 0.0

    def holds(self, target: Announcement) -> bool:
        """Whether it has (or is getting) exactly these weights as this version."""
        mine = None if self.progress is None else self.progress.target
        return mine is not None and (mine.version, mine.root) == (target.version, target.root)


@dataclass(frozen=True)
class Health:
    """What a subscriber knows about the others.

    Attributes:
        coordinator: whether it is heard.
        publisher: `absent` before one joins or after it closed; `lost` when its heartbeats stopped.
        announced: the newest version that can be pulled, or None.
        staged: the newest version that is verified here and waits for `next`, or None.
        acked: the version last acknowledged here, or None.
        error: what stands in the way: `CoordinatorLost`, `PublisherLost` (also when it only cannot
            be reached just now), or the error that `next` raises.
    """

    coordinator: Literal["connected", "lost"]
    publisher: Literal["absent", "alive", "lost"]
    announced: int | None
    staged: int | None
    acked: int | None
    error: DcsError | None


@dataclass(eq=False)
class Staged:
    """One whole, verified version in a staging slot.

    Attributes:
        version, epoch: its identity.
        tensors: by name; views of the slot, good until `ack` or `release`. Copy what is to stay.
        nbytes: size of the slot in bytes.
        transfer_seconds: from the first request to the last verified chunk.
        outcome: `acked` or `released` once it has been.
    """

    version: int
    epoch: int
    tensors: dict[str, torch.Tensor]
    nbytes: int
    transfer_seconds: float
    _slot: Slot = field(repr=False)
    _settle: Callable[["Staged", Slot, Literal["acked", "released"]], bool] = field(repr=False)
    _acknowledge: Callable[[Acked], None] = field(repr=False)
    outcome: Literal["acked", "released"] | None = None

    def ack(self) -> None:
        """Say that this version is committed here; the slot may now be overwritten. May be called twice."""
        if self._settle(self, self._slot, "acked"):
            self._acknowledge(Acked(self.epoch, self.version, self.transfer_seconds))

    def release(self) -> None:
        """Give the slot back without having committed it; `next` may give the same version again.

        Does nothing after `ack`.
        """
        self._settle(self, self._slot, "released")
