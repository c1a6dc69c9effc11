"""A subscriber's versions: one that is coming, one that is ready, one that is given out, and those spent."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from dcs.control.messages import Announcement
from dcs.memory import shelf as shelves
from dcs.memory.device import DeviceMirror
from dcs.memory.shelf import Copy, Shelf


class SlotState(enum.Enum):
    """What a version is for just now. SPENT: acknowledged or passed over; kept for peers and as a base."""

    FILLING = enum.auto()
    READY = enum.auto()
    HELD = enum.auto()
    SPENT = enum.auto()


@dataclass(eq=False)
class Slot:
    """One version here, and how it came. `mirror`: the same on the device, where there is one; `turns`: how
    often it was given out.
    """

    copy: Copy
    target: Announcement
    state: SlotState
    transfer_seconds: float = 0.0
    wire: str = ""
    from_ranks: int = 0
    from_peers: int = 0
    mirror: DeviceMirror | None = None
    turns: int = 0

    def is_of(self, target: Announcement) -> bool:
        """Whether it has (or is getting) exactly these weights as this version."""
        return (self.target.version, self.target.roots) == (target.version, target.roots)


class Slots:
    """All slots of a subscriber. Its caller guards it with a lock; `make_room` is called without."""

    def __init__(self, shelf: Shelf, chunk_bytes: int) -> None:
        self._shelf = shelf
        self._chunk_bytes = chunk_bytes
        self.all: list[Slot] = []

    def having(self, *states: SlotState) -> list[Slot]:
        """Those in one of these states, the newest first."""
        found = [slot for slot in self.all if slot.state in states]
        return sorted(found, key=lambda slot: slot.target.version, reverse=True)

    def newest_whole(self) -> Slot | None:
        """The newest that is complete, if any."""
        whole = self.having(SlotState.READY, SlotState.HELD, SlotState.SPENT)
        return whole[0] if whole else None

    def victim(self, may_pass_over: Callable[[Slot], bool]) -> Slot | None:
        """Whose memory the next version takes: the oldest that is spent; else one that is ready and may be
        passed over. None when there is neither.
        """
        mine = [slot for slot in self.having(SlotState.SPENT) if not slot.copy.arena.mapped]
        ready = [slot for slot in self.having(SlotState.READY) if not slot.copy.arena.mapped]
        mine = mine or [slot for slot in ready if may_pass_over(slot)]
        return mine[-1] if mine else None

    @property
    def full(self) -> bool:
        """Whether the next version needs the memory of one that is here."""
        return (
            sum(not slot.copy.arena.mapped for slot in self.all if slot.state is not SlotState.FILLING) >= 2
        )

    def make_room(self, target: Announcement, root: bytes, victim: Slot | None) -> tuple[Copy, Copy | None]:
        """An empty copy for `target`, readable by peers as it fills, and what its arena held before.

        Raises `NoMemory`; then the victim stays what it is.
        """
        former = None
        arena = self._shelf.spare()
        if arena is None:
            arena = self._shelf.reserve(None if victim is None else victim.copy, 0.0)
            if victim is not None and arena is victim.copy.arena:
                former = victim.copy
        copy = shelves.empty(arena, target.version, root, self._chunk_bytes)
        self._shelf.put(copy)
        return copy, former
