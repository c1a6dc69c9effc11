"""The controller: all metadata and scheduling of a store, no payload. It turns requests into calls of the
parts that own the state, and does what follows from them before anything is answered.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import Full, QueueError, StaleLease, StorageLost, Unauthorized
from ..ids import new_generation
from ..introspection.statistics import MemoryStats, StoreStats, UnitStats, partition_stats
from ..scheduling.partition import Partition
from ..wire.ledger import cut_reason, page_of
from ..wire.messages import (
    Ack,
    Admit,
    Advance,
    Announce,
    CheckFields,
    CloseGroup,
    ClosePartition,
    Commit,
    CommitUpdate,
    Done,
    Drop,
    Extend,
    Fetch,
    FetchChosen,
    Flag,
    IsClosed,
    LedgerPage,
    ListCandidates,
    Locate,
    Nack,
    Opened,
    OpenPartition,
    ReadLedger,
    ReadStats,
    Reply,
    Report,
    Reserve,
    ReserveUpdate,
    Restore,
    Return,
    Snapshot,
    Stats,
    TakeSlab,
    Write,
    Written,
    encoder,
)
from ..wire.node import Call, Node, Session
from .admissions import Admissions
from .backing import Backing, InFiles
from .blocks import Block, Grant
from .compaction import Compaction
from .events import UnitKnown
from .fetches import Fetches, lease_seconds
from .journal import Journal
from .memory import Memory
from .puts import Puts, check_int64, check_sizes
from .reclaim import Reclaim
from .recording import RETRY_SECONDS, Recording
from .recovery import Past, dump, recover
from .recovery import snapshot as snapshot_of
from .returning import Returning
from .shelves import Shelf, Shelves
from .snapshot import Snapshots
from .timers import Timers
from .units import Units

_PROBE_SECONDS = 2.0  # between two looks whether clients of other hosts that hold something can be reached
_UNIT_SECONDS = 5.0  # for a storage unit that died to be there again
_LOST_AFTER = 3  # probes that fail
_SWEEP_SECONDS = 60.0  # between two looks at all clients
_FORGOTTEN_AFTER = 600.0  # seconds that one cannot be reached; it may still repeat a request before


class ControllerService:
    """Answers the requests to the controller.

    Args:
        node: that serves it.
        backing: where memory comes from.
        units: how many storage units there will be.
        max_bytes: payload bytes in the whole store, or None.
        secret: by which units are known.
        journal: where everything is kept, or None; `backing` is then of its folder.
        snapshot: to begin with, or None.
        ready: called once, when all storage units are there and the snapshot is, or with why it cannot be.

    Raises:
        Corrupt: the journal is damaged.
        Full: there is no room to begin one.
    """

    def __init__(
        self,
        node: Node,
        backing: Backing,
        units: int,
        max_bytes: int | None,
        secret: str,
        journal: Journal | None,
        snapshot: Path | None,
        ready: Callable[[QueueError | None], None],
    ) -> None:
        self._node = node
        self._journal = journal
        self._recording: Recording | None = None
        self._snapshot = snapshot
        self._ready: Callable[[QueueError | None], None] | None = ready
        self._began = time.monotonic()
        self._timers = Timers()
        self._shelves = Shelves(max_bytes)
        self._memory = Memory(backing, self._arena_made)
        self._units = Units(
            units,
            secret,
            lambda: [self._memory.arena(number) for number in self._memory.arenas],
            self._memory.writable,
            self._timers,
            lambda number: self._puts.unit_silent(number),
        )
        past = self._recover(journal, backing)
        self._generation = new_generation() if past is None else past.generation
        self._puts = Puts(
            self._generation, self._shelves, self._memory, self._units, self._timers, self._again
        )
        self._fetches = Fetches(self._shelves, self._memory, self._timers)
        self._admissions = Admissions(self._shelves, self._timers)
        self._compaction = Compaction(self._memory, self._units, self._timers)
        self._snapshots = Snapshots(self._shelves, self._memory, self._units, self._whole, self._put_in_place)
        self._unitless: list[Call] = []
        Reclaim(self._memory, self._units, self._timers)
        self._returning = Returning(node, self._memory, self._puts, self._shelves, self._timers)
        self._leftovers: list[Grant] = []
        self._unreached: dict[int, int] = {}
        self._sessions: dict[int, Session] = {}
        self._away: dict[int, float] = {}
        self._timers.at(self._began + _PROBE_SECONDS, self._probe)
        self._timers.at(self._began + _SWEEP_SECONDS, self._sweep)
        if journal is not None:
            self._record(journal, past, ready)

    def _recover(self, journal: Journal | None, backing: Backing) -> Past | None:
        """Brings shelves and memory to where the journal ends."""
        found = None if journal is None else journal.recover()
        if journal is None or found is None:
            return None
        assert isinstance(backing, InFiles)
        return recover(found, self._shelves, self._memory, backing, journal.folder)

    def _record(
        self, journal: Journal, past: Past | None, ready: Callable[[QueueError | None], None]
    ) -> None:
        """Goes on where the journal ends, or begins it."""
        self._recording = Recording(journal, self._node, self._shelves, self._memory)
        if past is not None:
            self._recording.clients = past.clients
            self._recording.start()
            self._units.await_all(past.units if past.incarnation == self._node.incarnation else [])
            self._node.units = self._units.addresses
            self._leftovers = self._memory.grants_of(None)
            self._returning.expect(past, self.forget)
            if past.incarnation == self._node.incarnation and self._snapshot is None:
                # Its clients wait, and a unit may be gone for good.
                ready(None)
                self._ready = None
        else:
            self._recording.start()
        if (past is None or past.incarnation != self._node.incarnation) and not self._rewrite(journal):
            raise Full(f"there is no room for a journal in {journal.folder}; make room there")

    def _free_all(self) -> None:
        for shelf in self._shelves:
            if shelf.partition.freed:
                self._free(shelf)

    def _whole(self) -> bytes:
        self._free_all()
        return snapshot_of(self._shelves, self._memory, self._generation)

    def _put_in_place(self, generation: int) -> None:
        """A snapshot was loaded: its ids go on."""
        self._generation = generation
        self._puts.generation = generation
        if self._recording is not None:
            self._recording.start()
            self._recording.rewrite_due = True

    def _rewrite(self, journal: Journal) -> bool:
        assert self._recording is not None
        self._free_all()
        self._recording.drop_items()
        clients = self._recording.clients
        for number, client in clients.items():
            session = self._node.session(number)
            if session is not None:
                client.answers = {n: kept for n, kept in client.answers.items() if n in session.answers}
        return journal.rewrite(
            dump(
                self._shelves,
                self._memory,
                clients,
                self._node.units,
                self._node.incarnation,
                self._generation,
            )
        )

    def _arena_made(self, number: int) -> None:
        self._units.attach(self._memory.arena(number))

    # -- requests --------------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        now = time.monotonic()
        if self._recording is not None:
            self._recording.check_room(call.body)
        match call.body:
            case Commit() | CommitUpdate():
                self._puts.commit(call, call.body)
            case Fetch():
                self._fetches.fetch(call, call.body, now)
            case Ack(number, lease):
                self._of_lease(call, number, lease).ack(lease, now)
                call.reply(Done())
            case Locate():
                self._fetches.locate(call, call.body)
            case TakeSlab() | Reserve() | ReserveUpdate() if call.body.remote and self._awaits_unit(
                call, now
            ):
                pass
            case TakeSlab():
                self._puts.slab(call, call.body)
            case Reserve():
                self._puts.reserve(call, call.body)
            case ReserveUpdate():
                self._puts.reserve_update(call, call.body)
            case Return():
                self._puts.returned(call, call.body)
            case Nack(number, lease):
                self._of_lease(call, number, lease).nack(lease, now)
                call.reply(Done())
            case Extend(number, lease, seconds):
                self._of_lease(call, number, lease).extend(lease, lease_seconds(seconds), now)
                call.reply(Done())
            case Written(where):
                self._puts.written(self._units.number_of(call), where)
                call.reply(Done())
            case Report():
                self._units.report(call, call.body)
                self._shelves.touch_all()  # a snapshot may be restored by it
            case _:
                self._handle_rare(call, now)

    def _handle_rare(self, call: Call, now: float) -> None:
        match call.body:
            case OpenPartition():
                call.reply(self._open(call.body))
            case CheckFields(number, specs):
                self._partition(number).check_open()
                self._partition(number).check_schema(specs)
                call.reply(Done())
            case CloseGroup(number, key, members, tombstones):
                check_sizes([members, tombstones, members - tombstones])
                self._partition(number).close_group(key, members, tombstones)
                call.reply(Done())
            case Drop(number, ids, reason):
                self._partition(number).drop(ids, cut_reason(reason))
                call.reply(Done())
            case ClosePartition(number):
                self._partition(number).close()
                self._puts.room_made = True  # puts that wait end with Closed
                call.reply(Done())
            case IsClosed(number):
                call.reply(Flag(self._partition(number).closed))
            case ReadLedger(number, task):
                call.reply(_ledger(self._partition(number), task))
            case ReadStats():
                call.reply(Stats(self._stats()))
            case ListCandidates():
                self._fetches.list_candidates(call, call.body, now)
            case FetchChosen():
                self._fetches.fetch_chosen(call, call.body, now)
            case Advance(number, version):
                check_int64(version)
                self._partition(number).advance(version)
                call.reply(Done())
            case Admit():
                self._admissions.ask(call, call.body, now)
            case Announce():
                self._units.announce(call, call.body)
                if self._recording is not None and call.body.address not in self._node.units:
                    self._recording.note(UnitKnown(call.body.address))
                self._node.units = self._units.addresses
                if self._units.all_there:
                    self._all_there()
                self._unit_came()
            case Snapshot() | Restore() if not call.local:
                # It names a folder of this host: who is on it can write there anyway.
                raise Unauthorized("snapshots are taken and restored by clients on the host of the store")
            case Snapshot() | Restore() if self._awaits_unit(call, now):
                pass
            case Snapshot(folder):
                self._snapshots.take(call, Path(folder))
            case Restore(folder):
                self._snapshots.restore(call, Path(folder), lambda error: None)
            case _:
                call.refuse()

    def _all_there(self) -> None:
        # What units were copying or giving back for an earlier life of the controller is over.
        leftovers, self._leftovers = self._leftovers, []
        for grant in leftovers:
            self._memory.end(grant)
        if self._ready is None:
            return
        ready, self._ready = self._ready, None
        folder, self._snapshot = self._snapshot, None
        if folder is None or any(True for _ in self._shelves):
            ready(None)  # with partitions, this is a later life of a store that was restored
            return
        try:
            self._snapshots.restore(None, folder, ready)
        except QueueError as error:
            ready(error)

    def _awaits_unit(self, call: Call, now: float) -> bool:
        """Lets a put of another host wait for a storage unit where none is there: they are started again."""
        if self._units.answering():
            return False
        self._unitless.append(call)
        self._timers.at(min(call.deadline, now + _UNIT_SECONDS), lambda: self._without_unit(call))
        return True

    def _without_unit(self, call: Call) -> None:
        if call in self._unitless:
            self._unitless.remove(call)
            if not call.answered:
                call.fail(StorageLost("no storage unit answers", unit=-1, address=""))

    def _unit_came(self) -> None:
        waiting, self._unitless = self._unitless, []
        for call in waiting:
            self._again(call)

    def _again(self, call: Call) -> None:
        if not call.answered:
            try:
                self.handle(call)
            except QueueError as error:
                call.fail(error)

    def _partition(self, number: int) -> Partition:
        return self._shelves[number].partition

    def _of_lease(self, call: Call, number: int, lease: int) -> Partition:
        """The partition of a lease. StaleLease if the lease is another client's."""
        partition = self._partition(number)
        loan = partition.loans.tokens.get(lease)
        if loan is not None and loan.tokens[lease] != call.session.number:
            raise StaleLease(
                f"lease {lease} of partition {partition.name!r} is another client's",
                lease=lease,
            )
        return partition

    def _open(self, body: OpenPartition) -> Opened:
        shelf = self._shelves.open(body)
        tasks = {task.name: list(task.fields) for task in shelf.partition.tasks.values()}
        return Opened(shelf.number, tasks, shelf.partition.length_field)

    # -- sessions --------------------------------------------------------------------------------------------

    def resume(self, session: Session, pins: Sequence[int]) -> None:
        self._sessions[session.number] = session
        self._returning.came(session)
        self._memory.set_pins(session.number, pins)

    def more(self, call: Call, body: Write, payload: Any) -> None:
        call.refuse()

    def release(self, session: Session, blocks: Sequence[int]) -> None:
        self._memory.unpin(session.number, blocks)

    def leave(self, session: Session) -> None:
        for shelf in self._shelves:
            shelf.partition.release(session.number)

    def forget(self, session: Session) -> None:
        number = session.number
        self._sessions.pop(number, None)
        self._unreached.pop(number, None)
        self._away.pop(number, None)
        self._units.gone(session)
        for shelf in self._shelves:
            shelf.partition.release(number)
        self._shelves.touch_all()
        self._puts.forget(number)
        self._memory.unpin_all(number)
        if self._recording is not None:
            self._recording.gone(number)

    def _probe(self) -> None:
        """Looks whether clients of other hosts are still there: a ROUTER only tells when asked to send."""
        self._timers.at(time.monotonic() + _PROBE_SECONDS, self._probe)
        for number in self._memory.holders():
            session = self._sessions.get(number)
            connection = None if session is None else session.connection
            if session is None or connection is None or connection.local:
                continue
            if connection.send(encoder.encode(Reply(0, Done()))):
                self._unreached.pop(number, None)
            else:
                self._unreached[number] = self._unreached.get(number, 0) + 1
                if self._unreached[number] >= _LOST_AFTER:
                    self._memory.unpin_all(number)
                    self._puts.forget(number)

    def _sweep(self) -> None:
        """Forgets clients that are gone without a word, and hold nothing that `_probe` would look at."""
        now = time.monotonic()
        self._timers.at(now + _SWEEP_SECONDS, self._sweep)
        for number, session in list(self._sessions.items()):
            connection = session.connection
            if connection is not None and (
                connection.local or connection.send(encoder.encode(Reply(0, Done())))
            ):
                self._away.pop(number, None)
            elif now - self._away.setdefault(number, now) >= _FORGOTTEN_AFTER:
                self._node.lost(session)

    # -- what follows a request ------------------------------------------------------------------------------

    def settle(self, now: float) -> float | None:
        if self._timers.run(now) or self._node.undone:
            self._node.undone = False
            self._shelves.touch_all()
        while self._follow_up(now):
            pass
        times = [self._timers.next()]
        if self._recording is not None:
            times.append(self._write(self._recording, now))
        return min((when for when in times if when is not None), default=None)

    def _write(self, recording: Recording, now: float) -> float | None:
        """Writes down what changed, before the node answers; returns when to try again."""
        if recording.rewrite_due:
            recording.drop_items()
        self._node.held = not recording.write(now)
        if recording.journal.full is not None:
            return now + RETRY_SECONDS
        if recording.rewrite_due:  # what was restored is not told in events: it is kept whole, or not yet
            self._node.held = recording.rewrite_due = not self._rewrite(recording.journal)
            return now + RETRY_SECONDS if recording.rewrite_due else None
        if recording.journal.is_due:
            self._rewrite(recording.journal)
        return None

    def _follow_up(self, now: float) -> bool:
        """Frees, admits and wakes what the last changes allow; returns whether more followed from that."""
        touched = self._shelves.take_touched()
        for shelf in touched:
            shelf.partition.lapse(now)
            if shelf.partition.freed:
                self._free(shelf)
            if shelf.partition.room_made:
                shelf.partition.room_made = False
                self._puts.room_made = True
        if self._puts.room_made:
            self._puts.room_made = False
            self._puts.admit()
            self._admissions.serve(now)
        for shelf in touched:
            if shelf.partition.woken:
                self._fetches.wake(shelf, now)
            if shelf.partition.freed or shelf.partition.woken:
                self._shelves.touched.add(shelf)
            self._look_again(shelf)
        return self._puts.room_made or bool(self._shelves.touched)

    def _look_again(self, shelf: Shelf) -> None:
        """Sees to it that the partition is looked at when the next lease or ticket lapses."""
        when = shelf.partition.next_lapse()
        if when is not None and (shelf.due is None or when < shelf.due):
            shelf.due = when
            self._timers.at(when, lambda: self._lapses(shelf, when), lambda: shelf.due == when)

    @staticmethod
    def _lapses(shelf: Shelf, when: float) -> None:
        if shelf.due == when:
            shelf.due = None  # what has run touches every partition

    def _free(self, shelf: Shelf) -> None:
        freed, shelf.partition.freed = shelf.partition.freed, []
        self._puts.room_made = True
        touched: dict[Block, None] = {}
        for sample in freed:
            for block, row in sample.places:
                self._memory.row_gone(block, row)
                touched[block] = None
            sample.places.clear()
        for block in touched:
            self._compaction.consider(block)

    def close(self) -> None:
        self._returning.close()
        self._memory.close()
        if self._journal is not None:
            self._journal.close()

    # -- what is told ----------------------------------------------------------------------------------------

    def _stats(self) -> StoreStats:
        now = time.monotonic()
        memory, arenas = self._memory, len(self._memory.arenas)
        return StoreStats(
            uptime=now - self._began,
            max_bytes=self._shelves.max_bytes,
            nbytes=sum(shelf.partition.nbytes for shelf in self._shelves),
            waiting_puts=self._puts.waiting,
            waiting_fetches=self._fetches.waiting,
            clients=self._node.sessions - len(self._units.addresses),
            memory=MemoryStats(
                capacity=memory.capacity,
                granted=memory.capacity - memory.free - memory.used,
                used=memory.used,
                pinned_only=memory.pinned_only,
            ),
            units=[
                UnitStats(
                    unit=address.number,
                    alive=self._units.alive(address.number),
                    address=f"tcp://{address.host}:{address.port}",
                    arenas=arenas,
                    capacity=memory.capacity,
                    used=memory.used,
                    network_read_bytes_total=self._units.moved(address.number)[0],
                    network_written_bytes_total=self._units.moved(address.number)[1],
                )
                for address in self._units.addresses
            ],
            partitions={
                shelf.partition.name: partition_stats(
                    shelf.partition, max_samples=shelf.max_samples, max_bytes=shelf.max_bytes, now=now
                )
                for shelf in self._shelves
            },
        )


def _ledger(partition: Partition, name: str) -> LedgerPage:
    task = partition.task(name)
    return page_of(
        task.acked.intervals,
        ((sample, why) for sample, why in partition.dropped.items() if sample not in task.acked),
        task.leased,
        (s for s in partition.samples if s not in task.leased and s not in task.acked),
    )
