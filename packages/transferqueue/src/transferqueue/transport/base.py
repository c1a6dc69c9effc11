"""The seam between what a client does and how payload travels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..values.columns import Column
from ..wire.messages import Places, Range
from ..wire.steps import Exchange, Steps


@dataclass(frozen=True)
class Unavailable:
    """Why a transport cannot be used here, in words that name the way out."""

    why: str


class Transport(Protocol):
    """Moves blocks to and from a store.

    Attributes:
        name: as users know it.
        remote: blocks go through a storage unit, and carry a checksum.
    """

    name: str
    remote: bool

    def stage(self, where: Range) -> np.ndarray:
        """Where to lay out the block that belongs at `where`: uint8, 64-byte aligned."""
        ...

    def send(self, unit: int, where: Range, block: np.ndarray, deadline: float) -> list[Exchange]:
        """What has to be sent beside the commit to get a staged block to its place."""
        ...

    def read(self, places: Places, fields: Sequence[str] | None, deadline: float) -> Steps[dict[str, Column]]:
        """The columns of samples. The blocks are released when nothing looks at them any more, or when it
        fails.
        """
        ...

    def close(self) -> None:
        """Gives up what it holds besides the client's connections. Idempotent."""
        ...
