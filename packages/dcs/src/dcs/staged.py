"""What a subscriber gives out: whole versions, and what it knows of the others."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from dcs.errors import DcsError


@dataclass(frozen=True)
class Health:
    """What a subscriber knows about the others.

    Attributes:
        coordinator: whether it is heard.
        publisher: `absent` before one joins or after it closed; `lost` when its heartbeats stopped.
        announced: the newest version that can be pulled, or None.
        staged: the newest version that is verified here and waits for `next`, or None.
        acked: the version last acknowledged here, or None.
        wire: how the newest version here came: `shm`, `tcp`, `tcp+delta`, `collective`; "" before the first.
        staging: where versions are staged: the device, or `host`, with the reason if a device was asked for.
        error: what stands in the way: `CoordinatorLost`, `PublisherLost` (also when it only cannot
            be reached just now), or the error that `next` raises.
    """

    coordinator: Literal["connected", "lost"]
    publisher: Literal["absent", "alive", "lost"]
    announced: int | None
    staged: int | None
    acked: int | None
    wire: str
    staging: str
    error: DcsError | None


@dataclass(eq=False, repr=False)
class Staged:
    """One whole, verified version in a staging slot.

    Attributes:
        version, epoch: its identity.
        tensors: by name; views of the slot, good until `ack` or `release`. Copy what is to stay, and do not
            write to them: they may be memory that others read, or another process's.
        nbytes: size of the slot in bytes.
        transfer_seconds: from the first request to the last verified chunk.
        wire: how it came: `shm`, `tcp`, `tcp+delta` or `collective`.
        from_ranks, from_peers: bytes received from training ranks and from other subscribers.
        outcome: `acked` or `released` once it has been.
    """

    version: int
    epoch: int
    tensors: dict[str, torch.Tensor]
    nbytes: int
    transfer_seconds: float
    wire: str
    from_ranks: int
    from_peers: int
    _settle: Callable[["Staged", Literal["acked", "released"], float], None] = field(repr=False)
    outcome: Literal["acked", "released"] | None = None

    def __repr__(self) -> str:
        where = f"{len(self.tensors)} tensors, {self.nbytes} bytes, by {self.wire}"
        return (
            f"<Staged version {self.version} of epoch {self.epoch}: {where}, {self.outcome or 'given out'}>"
        )

    def ack(self, pause_seconds: float = 0.0) -> None:
        """Say that this version is committed here; the slot may now be overwritten. May be called twice.

        Args:
            pause_seconds: how long serving stood still for it, for the publisher's statistics.
        """
        self._settle(self, "acked", float(pause_seconds))

    def release(self) -> None:
        """Give the slot back without having committed it; `next` may give the same version again.

        Does nothing after `ack`.
        """
        self._settle(self, "released", 0.0)
