"""What is on loan, until when, and by which fencing tokens."""

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from .samples import Sample

if TYPE_CHECKING:
    from .tasks import Task


@dataclass(slots=True, eq=False)
class Loan:
    """Samples of one task that nobody else can be served until `deadline`.

    Attributes:
        id: unique in the partition. The fencing token of its (first) consumer is the same number.
        samples: id -> sample, in the order served; a dropped one leaves.
        owner: whose it is, or the negative number of the sequence of rounds that has planned it and that
            nobody has asked for yet.
        shares: acks that are still to come until it is complete.
        tokens: fencing token -> owner, of those who have it and have not acked.
        ended: completed or returned.
    """

    id: int
    of: "Task"
    samples: dict[int, Sample]
    deadline: float
    owner: int
    shares: int = 1
    tokens: dict[int, int] = field(default_factory=dict)
    ended: bool = False

    @property
    def task(self) -> str:
        """The name of its task."""
        return self.of.name

    @property
    def ids(self) -> list[int]:
        return list(self.samples)


class Loans:
    """All that are out, by token, owner and deadline.

    Attributes:
        out: by id.
        tokens: by fencing token.
    """

    def __init__(self) -> None:
        self.out: dict[int, Loan] = {}
        self.tokens: dict[int, Loan] = {}
        self.last_id = 0
        self._by_owner: dict[int, dict[int, None]] = {}
        self._heap: list[tuple[float, int, Loan]] = []

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def add(self, lease: Loan) -> None:
        """Lets a lease begin."""
        self.out[lease.id] = lease
        self.last_id = max(self.last_id, lease.id)
        self.set_deadline(lease, lease.deadline)

    def give(self, lease: Loan, token: int, owner: int) -> None:
        """Lets `owner` act on the lease by `token`."""
        lease.tokens[token] = owner
        self.last_id = max(self.last_id, token)
        self.tokens[token] = lease
        self._by_owner.setdefault(owner, {})[token] = None

    def withdraw(self, lease: Loan, token: int) -> None:
        """Ends one token; the lease goes on."""
        owner = lease.tokens.pop(token)
        del self.tokens[token]
        tokens = self._by_owner[owner]
        del tokens[token]
        if not tokens:
            del self._by_owner[owner]

    def end(self, lease: Loan) -> None:
        """Ends the lease with all its tokens."""
        for token in list(lease.tokens):
            self.withdraw(lease, token)
        lease.ended = True
        del self.out[lease.id]

    def set_deadline(self, lease: Loan, deadline: float) -> None:
        """Moves the deadline of a lease."""
        lease.deadline = deadline
        heappush(self._heap, (deadline, lease.id, lease))
        if len(self._heap) > 2 * len(self.out) + 64:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapify(self._heap)

    def of_owner(self, owner: int) -> list[int]:
        """The tokens of an owner."""
        return list(self._by_owner.get(owner, ()))

    def next_due(self, now: float) -> Loan | None:
        """A lease whose deadline has passed, which the caller ends or moves; None if there is none."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        return self._heap[0][2]

    def next_deadline(self) -> float | None:
        """When the next lease lapses, if any is out."""
        while self._heap:
            if self._holds(self._heap[0]):
                return self._heap[0][0]
            heappop(self._heap)
        return None

    @staticmethod
    def _holds(entry: tuple[float, int, Loan]) -> bool:
        return not entry[2].ended and entry[2].deadline == entry[0]
