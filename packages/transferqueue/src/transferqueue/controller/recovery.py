"""The state of a controller as one message, and back: from the last one written and what changed since."""

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..errors import Corrupt, QueueError
from ..ids import partition_of
from ..scheduling.partition import Partition
from ..scheduling.replay import apply
from ..scheduling.samples import Sample
from ..wire.messages import Range, UnitAddress
from . import events
from .backing import InFiles
from .blocks import Grant
from .journal import Recovered
from .memory import Memory
from .shelves import Shelves


@dataclass
class Client:
    """One that an earlier life of the controller knew.

    Attributes:
        pid: of its process on this host, or 0.
        born: when that began, in clock ticks since boot.
        low: requests below are finished.
        answers: it may ask for again, by request.
    """

    pid: int = 0
    born: int = 0
    low: int = 0
    answers: dict[int, events.Kept] = field(default_factory=dict)

    def keep(self, kept: events.Kept) -> None:
        """Takes in an answer, and forgets those that the client has."""
        self.low = max(self.low, kept.low)
        while self.answers and (first := next(iter(self.answers))) < self.low:
            del self.answers[first]
        self.answers[kept.request] = kept


@dataclass
class Past:
    """What is left of an earlier life besides what memory and shelves hold.

    Attributes:
        incarnation, generation: of the store then.
        same_boot: the operating system has not been started anew.
        clients: by number.
        units: where they listen.
    """

    incarnation: int
    generation: int
    same_boot: bool
    clients: dict[int, Client]
    units: list[UnitAddress]


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def snapshot(shelves: Shelves, memory: Memory, generation: int) -> bytes:
    """What is stored and how far tasks are, and nothing of this store's memory and clients. What was freed
    has been taken.
    """
    now = time.monotonic()
    return events.encode(
        events.StoreState(
            events.FORMAT,
            0,
            generation,
            "",
            now,
            time.time(),
            0,
            memory.next_block,
            [],
            [],
            [events.ShelfState(s.body, s.serial, s.partition.dump(now)) for s in shelves],
            [
                events.BlockState(block.number, block.range, block.fields, len(block.samples))
                for block in memory.blocks.values()
                if block.living
            ],
            [],
            [],
        )
    )


def dump(
    shelves: Shelves,
    memory: Memory,
    clients: dict[int, Client],
    units: list[UnitAddress],
    incarnation: int,
    generation: int,
) -> bytes:
    """All of it. What was freed has been taken."""
    now = time.monotonic()
    return events.encode(
        events.StoreState(
            events.FORMAT,
            incarnation,
            generation,
            boot_id(),
            now,
            time.time(),
            memory.next_grant,
            memory.next_block,
            units,
            [(number, memory.arena(number)[0].nbytes) for number in memory.arenas],
            [events.ShelfState(s.body, s.serial, s.partition.dump(now)) for s in shelves],
            [
                events.BlockState(block.number, block.range, block.fields, len(block.samples))
                for block in memory.blocks.values()
            ],
            [
                events.GrantState(g.range, g.owner, g.unit, g.slab, g.named, list(g.written), g.abandoned)
                for g in memory.grants.values()
            ],
            [
                events.ClientState(
                    number,
                    client.pid,
                    client.born,
                    client.low,
                    list(memory.pins.get(number, Counter()).elements()),
                    list(client.answers.values()),
                )
                for number, client in clients.items()
            ],
        )
    )


def recover(found: Recovered, shelves: Shelves, memory: Memory, files: InFiles, folder: Path) -> Past:
    """Brings empty shelves and an empty memory to where a journal ends.

    Raises:
        Corrupt: it cannot be repeated, or an arena is not there.
    """
    memory.unsettle()
    try:
        state = events.decode_state(found.state)
    except msgspec.DecodeError as error:
        raise Corrupt(f"the state in {folder} is of another version of transferqueue ({error})") from error
    if state.format != events.FORMAT:
        raise Corrupt(f"the state in {folder} has format {state.format}, where {events.FORMAT} is known")
    same_boot = state.boot == boot_id()
    # Monotonic clocks agree until the system starts anew; then only the time of day is left to go by.
    later = 0.0 if same_boot else (time.monotonic() - time.time()) - (state.now - state.wall)
    past = Past(state.incarnation, state.generation, same_boot, {}, state.units)
    load(state, shelves, memory, later, lambda arena, nbytes: files.reopen(arena, nbytes))
    for one in state.clients:
        client = past.clients[one.number] = Client(one.pid, one.born, one.low)
        client.answers = {kept.request: kept for kept in one.answers}
        memory.set_pins(one.number, one.pins)
    replay = Replay(shelves, memory, past, files)
    for number, turn in enumerate(found.turns):
        try:
            replay.turn(events.decode_turn(turn), later)
        except (msgspec.DecodeError, QueueError, LookupError, ValueError) as error:
            raise Corrupt(
                f"turn {number} of the journal in {folder} cannot be repeated ({error!r}); it is of another "
                "version of transferqueue, or damaged: restore a snapshot, or remove the folder to begin anew"
            ) from error
    memory.settle()
    files.keep_only(memory.arenas)
    return past


def load(
    state: events.StoreState,
    shelves: Shelves,
    memory: Memory,
    later: float,
    reopen: Callable[[int, int], int],
) -> None:
    """Fills empty shelves and an empty memory. Times move by `later` seconds."""
    memory.next_grant, memory.next_block = state.next_grant, state.next_block
    for number, nbytes in state.arenas:
        memory.add_arena(number, nbytes, reopen(number, nbytes))
    blocks = {
        one.number: memory.add_block(one.number, one.range, one.fields, one.rows) for one in state.blocks
    }
    for one in state.grants:
        grant = memory.grant(one.range, one.owner, one.unit, one.slab)
        grant.named.extend(one.named)
        grant.abandoned.extend(one.abandoned)
        grant.written.update(one.written)
    for one in state.shelves:
        for sample in one.partition.samples:
            sample.places[:] = [(blocks[number], row) for number, row in sample.places]
        partition = Partition.load(one.partition, one.partition.now + later)
        shelves.add(one.body, partition).serial = one.serial
        for sample in samples_of(partition):
            for block, row in sample.places:
                if block.samples[row] is None:
                    block.samples[row] = sample
                    block.living += 1


def samples_of(partition: Partition) -> Iterable[Sample]:
    """All samples that still need their payload: those that are there, and those held for a round."""
    yield from partition.samples.values()
    for series in partition.rounds.series.values():
        for this in series.rounds:
            for part in this.parts:
                for sample in part.samples:
                    if sample.id not in partition.samples and sample.holds:
                        yield sample


class Replay:
    """Repeats what changed since a state was written."""

    def __init__(self, shelves: Shelves, memory: Memory, past: Past, files: InFiles) -> None:
        self._shelves = shelves
        self._memory = memory
        self._past = past
        self._files = files

    def turn(self, turn: events.Turn, later: float) -> None:
        now = turn.now + later
        for event in turn.events:
            self._repeat(event, now)
        for shelf in self._shelves:
            partition = shelf.partition
            freed, partition.freed = partition.freed, []
            for sample in freed:
                for block, row in sample.places:
                    self._memory.row_gone(block, row)
                sample.places.clear()

    def _repeat(self, event: events.StoreEvent, now: float) -> None:
        memory, clients = self._memory, self._past.clients
        match event:
            case events.Changed(number, change):
                apply(self._shelves[number].partition, change, now)
            case events.BlockMade(number, where, fields, runs):
                self._block(number, where, fields, events.ids_of_runs(runs))
            case events.BlockMoved(source, rows, number, where):
                _check(number, memory.next_block)
                self._take(where)
                memory.move(memory.blocks[source], rows, where)
            case events.Kept(client):
                clients.setdefault(client, Client()).keep(event)
            case events.Pinned(client, blocks):
                memory.pin(client, [memory.blocks[number] for number in blocks])
            case events.Unpinned(client, blocks):
                memory.unpin(client, blocks)
            case events.PinsTold(client, blocks):
                memory.set_pins(client, blocks)
            case events.GrantMade(where, owner, unit, slab):
                memory.grant(where, owner, unit, slab)
            case events.RangeDiscarded(where):
                grant = self._take(where)
                if grant is not None:
                    memory.discard(where)
            case events.RangeWritten(where):
                memory.written(memory.grants[where.grant], where)
            case events.GrantEnded(number):
                memory.end(memory.grants[number])
            case events.ArenaMade(number, nbytes):
                memory.add_arena(number, nbytes, self._files.reopen(number, nbytes))
            case events.PartitionOpened(body):
                self._shelves.open(body)
            case events.ClientKnown(client, pid, born):
                known = clients.setdefault(client, Client())
                known.pid, known.born = pid, born
            case events.ClientGone(client):
                clients.pop(client, None)
            case events.UnitKnown(address):
                self._past.units.append(address)
            case events.Voided(client, request):
                if client in clients:
                    clients[client].answers.pop(request, None)

    def _take(self, where: Range) -> Grant | None:
        grant = self._memory.grants.get(where.grant)
        if grant is not None:
            insort(grant.named, (where.start, where.stop))
        return grant

    def _block(self, number: int, where: Range, fields: int, ids: list[int]) -> None:
        _check(number, self._memory.next_block)
        self._take(where)
        shelf = self._shelves[partition_of(ids[0])]
        self._memory.block(where, fields, [shelf.partition.samples[sample] for sample in ids])
        # Ids of a put are the next ones; those of an update are lower.
        shelf.serial = max(shelf.serial, (ids[-1] & ((1 << 40) - 1)) + 1)


def _check(number: int, expected: int) -> None:
    if number != expected:
        raise ValueError(f"block {number} where {expected} would be next")
