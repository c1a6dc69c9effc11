"""Producers that ask before they generate, and wait while that is too much."""

from collections import deque

from ..errors import Full, QueueError
from ..wire.messages import Admit, Admitted
from ..wire.node import Call
from .fetches import lease_seconds
from .puts import check_int64
from .shelves import Shelf, Shelves
from .timers import Timers


class Admissions:
    """Answers in the order of asking, each partition for itself."""

    def __init__(self, shelves: Shelves, timers: Timers) -> None:
        self._shelves = shelves
        self._timers = timers
        self._waiting: deque[Call] = deque()

    def ask(self, call: Call, body: Admit, now: float) -> None:
        """Admits now, or when there is room.

        Raises:
            InvalidArgument: it can never be admitted: too many samples, or of too old a version.
            Closed: the partition is closed.
        """
        lease_seconds(body.seconds)
        check_int64(body.version)
        shelf = self._shelves[body.partition]
        if any(not other.answered and _shelf_number(other) == shelf.number for other in self._waiting):
            admitted = False
        else:
            admitted = self._admit(call, shelf, body, now)
        if not admitted:
            self._waiting.append(call)
            self._timers.at(call.deadline, lambda: self._give_up(call, shelf))

    def _admit(self, call: Call, shelf: Shelf, body: Admit, now: float) -> bool:
        partition = shelf.partition
        ticket = partition.admit(
            body.version, body.samples, now=now, seconds=body.seconds, owner=call.session.number
        )
        if ticket is None:
            return False
        call.undo = lambda: partition.unpromise(ticket.id)
        call.reply(Admitted(ticket.id))
        return True

    def serve(self, now: float) -> None:
        """Admits those that wait and fit now."""
        waiting, self._waiting = self._waiting, deque()
        held_up: set[int] = set()
        for call in waiting:
            body = call.body
            if call.answered:
                continue
            assert isinstance(body, Admit)
            shelf = self._shelves[body.partition]
            try:
                if shelf.number not in held_up and self._admit(call, shelf, body, now):
                    continue
            except QueueError as error:
                call.fail(error)
                continue
            held_up.add(shelf.number)
            self._waiting.append(call)

    @staticmethod
    def _give_up(call: Call, shelf: Shelf) -> None:
        if not call.answered:
            partition = shelf.partition
            call.fail(
                Full(
                    f"partition {partition.name!r} admitted no more samples until the deadline: it holds "
                    f"{len(partition.samples)} and has promised room for {partition.admission.promised} of "
                    f"at most {partition.max_samples}; consume faster or raise max_samples",
                    partition=partition.name,
                )
            )


def _shelf_number(call: Call) -> int:
    body = call.body
    assert isinstance(body, Admit)
    return body.partition
