"""A member of a run, and which of two that want the same place is the newer one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcs.control.messages import Acked, Endpoint, Join, Receipt
from dcs.control.messages import Standing as Shown
from dcs.control.topology import Receiver

if TYPE_CHECKING:
    from dcs.control.runs import Run

Standing = tuple[float, float]
NEVER = math.inf
FRESH: Standing = (math.inf, math.inf)
"""Of who joins for the first time in its life: it replaces whoever has its place."""


def standing_of(join: Join) -> Standing:
    """What decides between two incarnations: the newest epoch and version that they have seen.

    A member that joins again, because its lease had lapsed or its coordinator was restarted, may have been
    replaced meanwhile. It gets its place back only from somebody who knows less than it does.
    """
    return FRESH if join.known is None else (join.known.epoch, join.known.version)


@dataclass(eq=False, slots=True)
class Member:
    """One that has joined and is not gone. Times are those of the registry's caller.

    Attributes:
        identity: of its connection; survives reconnects.
        fingerprint: of its layout.
        deadline: when its lease lapses.
        due: when it is to have staged the oldest version that it lacks.
        told: the subscribers among the sources that it was given last.
    """

    id: int
    identity: bytes
    join: Join
    fingerprint: str
    run: Run
    standing: Standing
    joined_at: float
    heard_at: float
    deadline: float
    due: float = NEVER
    acked: Acked | None = None
    staged: Receipt | None = None
    from_ranks: int = 0
    from_peers: int = 0
    slow: bool = False
    told: tuple[int, ...] = ()
    _shown: Shown | None = None

    @property
    def shown(self) -> Shown:
        """As the publisher's ranks see a subscriber."""
        if self._shown is None or self._shown.acked is not self.acked:
            self._shown = Shown(self.name, self.acked)
        return self._shown

    @property
    def name(self) -> str:
        return self.join.name

    @property
    def is_publisher(self) -> bool:
        return self.join.role == "publisher"

    @property
    def endpoint(self) -> Endpoint | None:
        return self.join.endpoint

    @property
    def staged_version(self) -> int:
        return -1 if self.staged is None else self.staged.version

    @property
    def acked_version(self) -> int:
        return -1 if self.acked is None else self.acked.version

    def take(self, receipt: Receipt) -> bool:
        """Note what it has whole now; False when that is known already, or older than what is known."""
        before = self.staged
        if before is not None and (receipt.version, receipt.epoch) <= (before.version, before.epoch):
            return False
        if before is None or receipt.version > before.version:
            self.from_ranks += receipt.from_ranks
            self.from_peers += receipt.from_peers
        self.staged = receipt
        return True

    def as_receiver(self, holds: bool) -> Receiver:
        """What the topology needs to know of a subscriber."""
        join = self.join
        return Receiver(
            self.id, join.name, self.fingerprint, join.endpoint, join.site, holds, self.slow, join.maps
        )
