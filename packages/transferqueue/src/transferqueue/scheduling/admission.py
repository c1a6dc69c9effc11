"""Admission: room that a producer is promised before it generates anything.

A ticket stands for samples that are under way. It counts against `max_samples` like a sample that is there,
until the put that redeems it, its deadline, or the end of its owner.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ..errors import InvalidArgument


@dataclass(slots=True, eq=False)
class Ticket:
    """Room for `samples` more samples.

    Attributes:
        id: what the put names to redeem it.
        version: of the policy that will make them.
    """

    id: int
    samples: int
    version: int
    owner: int
    deadline: float


class Admission:
    """The tickets that are out.

    Attributes:
        promised: samples that all tickets stand for.
    """

    def __init__(self) -> None:
        self.tickets: dict[int, Ticket] = {}
        self.promised = 0
        self.last_id = 0
        self._by_owner: dict[int, dict[int, None]] = {}
        self._heap: list[tuple[float, int]] = []

    def add(self, ticket: Ticket) -> None:
        """Lets a ticket count."""
        self.tickets[ticket.id] = ticket
        self.last_id = max(self.last_id, ticket.id)
        self.promised += ticket.samples
        self._by_owner.setdefault(ticket.owner, {})[ticket.id] = None
        heappush(self._heap, (ticket.deadline, ticket.id))
        if len(self._heap) > 2 * len(self.tickets) + 64:
            self._heap = [(t.deadline, t.id) for t in self.tickets.values()]
            heapify(self._heap)

    def covered(self, ticket: int | None, samples: int) -> int:
        """How many of these samples a put with that ticket need not find room for."""
        found = None if ticket is None else self.tickets.get(ticket)
        return 0 if found is None else min(found.samples, samples)

    def redeem(self, ticket: int, samples: int) -> None:
        """Takes samples that were put off a ticket; one that has lapsed covers nothing."""
        found = self.tickets.get(ticket)
        if found is None:
            return
        used = min(samples, found.samples)
        found.samples -= used
        self.promised -= used
        if not found.samples:
            self.remove(ticket)

    def remove(self, ticket: int) -> None:
        """Ends a ticket: what it has left is room again."""
        found = self.tickets.pop(ticket)
        self.promised -= found.samples
        tickets = self._by_owner[found.owner]
        del tickets[ticket]
        if not tickets:
            del self._by_owner[found.owner]

    def of_owner(self, owner: int) -> list[int]:
        """The tickets of an owner."""
        return list(self._by_owner.get(owner, ()))

    def next_due(self, now: float) -> int | None:
        """A ticket whose deadline has passed; None if there is none."""
        deadline = self.next_deadline()
        return None if deadline is None or deadline > now else self._heap[0][1]

    def next_deadline(self) -> float | None:
        """When the next ticket lapses, if any is out."""
        while self._heap:
            if self._heap[0][1] in self.tickets:
                return self._heap[0][0]
            heappop(self._heap)
        return None


def check_version(name: str, version: int, clock: int | None, max_staleness: int | None) -> None:
    """Raises InvalidArgument for a version that is too old to be admitted, now and ever after."""
    if max_staleness is None or clock is None or version >= clock - max_staleness:
        return
    raise InvalidArgument(
        f"version {version} is {clock - version} behind the clock of partition {name!r} ({clock}), which "
        f"admits at most {max_staleness}; load newer weights first",
        version=version,
        clock=clock,
        max_staleness=max_staleness,
    )
