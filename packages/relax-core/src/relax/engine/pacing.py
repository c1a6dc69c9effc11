"""Pacing: which group starts next, for which optimizer step, and when all of a step is delivered.

Pure bookkeeping over the version clock: no sockets, no tasks, no time.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Slot:
    """A place for one group in one optimizer step."""

    step: int
    index: int


@dataclass
class Pacer:
    """Hands out the slots of steps `first_step` to `last_step` - 1, in order, `groups` a step.

    A slot whose group failed is handed out again before any other, so a step is never short of a group.
    """

    groups: int
    first_step: int
    last_step: int
    _next: int = 0
    _again: list[Slot] = field(default_factory=list)
    _open: dict[int, Slot] = field(default_factory=dict)
    failures_in_a_row: int = 0

    def peek(self) -> Slot | None:
        """The slot that would be handed out next; None when every step has all its groups."""
        if self._again:
            return self._again[0]
        step, index = divmod(self._next, self.groups)
        slot = Slot(self.first_step + step, index)
        return slot if slot.step < self.last_step else None

    def start(self, ordinal: int) -> Slot:
        """Assign the group `ordinal` to the next slot."""
        slot = self.peek()
        if slot is None:
            raise ValueError(f"group {ordinal}: every step already has all its groups")
        if self._again:
            self._again.pop(0)
        else:
            self._next += 1
        self._open[ordinal] = slot
        return slot

    def finished(self, ordinal: int) -> Slot:
        """The group was put on the bus."""
        self.failures_in_a_row = 0
        return self._open.pop(ordinal)

    def failed(self, ordinal: int) -> Slot:
        """The group was dropped; its slot is free again."""
        self.failures_in_a_row += 1
        slot = self._open.pop(ordinal)
        self._again.append(slot)
        self._again.sort(key=lambda s: (s.step, s.index))
        return slot

    def may_put(self, step: int) -> bool:
        """Whether every step before this one has all its groups on the bus. Groups go there step by step, so
        that those of a later step never take the room that an earlier one needs to be trained.
        """
        return all(slot.step >= step for slot in (*self._again, *self._open.values()))

    @property
    def running(self) -> dict[int, Slot]:
        """Groups started and not finished: ordinal -> slot."""
        return dict(self._open)

    @property
    def exhausted(self) -> bool:
        return self.peek() is None and not self._open
