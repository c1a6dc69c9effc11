"""What changes in a turn of the controller, written down before anything is answered."""

import errno
import os
import struct
import time
from collections.abc import Callable

from ..errors import Full
from ..scheduling.events import Event
from ..wire.messages import (
    Ack,
    Admit,
    Announce,
    CloseGroup,
    ClosePartition,
    Commit,
    CommitUpdate,
    Drop,
    Extend,
    Failure,
    Fetch,
    FetchChosen,
    Nack,
    OpenPartition,
    Reply,
    Report,
    RequestBody,
    Reserve,
    ReserveUpdate,
    Restore,
    TakeSlab,
    Written,
    encoder,
)
from ..wire.node import Answered, Call, Node, Session
from . import events
from .journal import Journal
from .memory import Memory
from .recovery import Client
from .shelves import Shelf, Shelves

RETRY_SECONDS = 0.2  # nothing tells when a disk has room again
_LEAST_LEFT = 1 << 18  # bytes of journal below which nothing is changed any more
_HEAD = struct.Struct(">BBdBI")  # of a Turn in msgpack: array of 2, float64, array32
# Answers to these are kept: done twice, they would have two effects.
_KEPT = (
    Commit, Fetch, Ack, CommitUpdate, TakeSlab, Reserve, ReserveUpdate, Nack, Extend, Drop, CloseGroup,
    FetchChosen, Admit,
)  # fmt: skip
_OF_UNITS = (Announce, Written, Report)
_GROWS = (Commit, CommitUpdate, TakeSlab, Reserve, ReserveUpdate, OpenPartition, Admit, Restore)
_CHANGES = (*_GROWS, Fetch, FetchChosen, Ack, Nack, Extend, Drop, CloseGroup, ClosePartition)


class Recording:
    """Collects the events of a turn and writes them to the journal at once.

    Args:
        journal: which has been recovered.
        node: whose answers are kept.

    Attributes:
        clients: those that the journal has heard of, and the answers they may ask for again.
        rewrite_due: events do not tell what is there now; the journal has to be begun anew.
    """

    def __init__(self, journal: Journal, node: Node, shelves: Shelves, memory: Memory) -> None:
        self.journal = journal
        self._node = node
        self._shelves = shelves
        self._memory = memory
        self._items: list[bytes] = []
        self._begun = 0
        self._arenas: set[int] = set()
        self.clients: dict[int, Client] = {}
        self.rewrite_due = False

    def start(self) -> None:
        """Attaches itself to everything that changes."""
        self._shelves.opened = self._opened
        self._memory.recorder = self.note if not self.journal.fsync else self._note_payload
        self._node.ledger = self
        for shelf in self._shelves:
            shelf.partition.recorder = self._of(shelf.number)

    def _opened(self, shelf: Shelf) -> None:
        """A partition was made."""
        self.note(events.PartitionOpened(shelf.body))
        shelf.partition.recorder = self._of(shelf.number)

    def _of(self, number: int) -> Callable[[Event], None]:
        def note(event: Event) -> None:
            self._items.append(events.encode(events.Changed(number, event)))

        return note

    def note(self, event: events.StoreEvent) -> None:
        """Takes down a change. It is encoded now, as what it refers to may change."""
        if isinstance(event, events.Pinned):
            self._meet(event.client)
        elif isinstance(event, events.GrantMade) and event.owner is not None:
            self._meet(event.owner)
        self._items.append(events.encode(event))

    def _note_payload(self, event: events.StoreEvent) -> None:
        if isinstance(event, events.BlockMade):
            self._arenas.add(event.range.arena)
        self.note(event)

    def _meet(self, client: int) -> None:
        if client in self.clients:
            return
        session = self._node.session(client)
        connection = None if session is None else session.connection
        if session is None or connection is None:
            return
        known = self.clients[client] = Client(connection.pid, birth_of(connection.pid) or 0)
        self._items.append(events.encode(events.ClientKnown(client, known.pid, known.born)))

    def keep(self, call: Call, answered: Answered) -> None:
        body = call.body
        if not isinstance(body, _KEPT) or isinstance(answered.body, Failure):
            return
        session = call.session
        self._meet(session.number)
        partition = getattr(body, "partition", -1)
        rows = body.rows if isinstance(body, Commit) else 0
        kept = events.Kept(session.number, session.low, call.id, answered.encoded, partition, rows)
        self._items.append(events.encode(kept))
        client = self.clients.get(session.number)
        if client is not None:
            client.keep(kept)

    def void(self, session: Session, request: int) -> None:
        if session.number in self.clients:
            self.clients[session.number].answers.pop(request, None)
        self._items.append(events.encode(events.Voided(session.number, request)))

    def fatal(self, call: Call, error: Exception) -> None:
        if isinstance(call.body, _OF_UNITS) or self.rewrite_due or self._node.held:
            return
        del self._items[self._begun :]  # half of what it was to do
        failure = Failure(
            "QueueError",
            f"{type(call.body).__name__} ended the controller ({error!r}): nothing of it was done, and it is "
            "not tried again; this is a fault of transferqueue, please report it",
            {},
        )
        session = call.session
        self.clients.pop(session.number, None)
        self._meet(session.number)  # that it was met may have been among them
        encoded = encoder.encode(Reply(call.id, failure))
        self._items.append(events.encode(events.Kept(session.number, session.low, call.id, encoded, -1, 0)))
        self.write(time.monotonic())

    def gone(self, client: int) -> None:
        """A client will not come back."""
        if self.clients.pop(client, None) is not None:
            self._items.append(events.encode(events.ClientGone(client)))

    def drop_items(self) -> None:
        """The whole state is written instead."""
        self._items.clear()
        self._arenas.clear()

    # -- the disk --------------------------------------------------------------------------------------------

    def check_room(self, body: RequestBody) -> None:
        """Raises Full for a request whose effect might find no room on the disk. What is noted from now on is
        of this request.
        """
        self._begun = len(self._items)
        full = self.journal.full
        if full is None:
            return
        refused = _CHANGES if self._node.held or self.journal.left < _LEAST_LEFT else _GROWS
        if isinstance(body, refused):
            folder = self.journal.folder
            raise Full(
                f"no room for the journal in {folder}: {os.strerror(full.errno or errno.ENOSPC)}; make room "
                "there: what is stored is safe, and this goes on by itself",
                folder=str(folder),
            )

    def write(self, now: float) -> bool:
        """Writes what changed; returns whether it could. Nothing of it may be answered before."""
        if self.journal.full is not None:
            self.journal.look_for_room()
        if not self._items:
            return True
        for arena in self._arenas:
            os.fdatasync(self._memory.arena(arena)[1])
        turn = _HEAD.pack(0x92, 0xCB, now, 0xDD, len(self._items)) + b"".join(self._items)
        try:
            self.journal.write(turn)
        except OSError:
            if self.journal.full is None:
                raise  # the disk fails: what it has is all that is true, and the next life will say so
            return False
        self._items.clear()
        self._arenas.clear()
        return True


def birth_of(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None if there is none of that pid."""
    if not pid:
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None
