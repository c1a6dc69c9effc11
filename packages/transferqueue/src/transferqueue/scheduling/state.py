"""A partition as one message: everything that its further life depends on, and nothing that follows from it.

Times are on the caller's clock, as of `PartitionState.now`; a partition that is filled at another time has
them moved by the difference.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from ..ids import IdSet
from ..values.columns import FieldSpec
from .groups import Group
from .loans import Loan
from .rounds import Part, Round, Series
from .samples import MAX_LENGTH, MAX_NBYTES, Sample, within
from .wanted import Wanted

if TYPE_CHECKING:
    from .partition import Partition


class SampleState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`acked` is a bit set of tasks, `written` of fields. What is `gone` is only held for a round."""

    id: int
    order: int
    priority: int
    version: int
    group: str | None
    nbytes: int
    written: int
    length: int
    born: float
    places: list[Any]
    acked: int
    gone: bool = False


class GroupState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key: str
    tally: list[int]
    arrived: int
    size: int | None
    alive: int
    order: int
    priority: int
    version: int
    length: int


class TaskState(msgspec.Struct, frozen=True, array_like=True):
    """`totals` are delivered, acked, nacked and lapsed; `peers` the clients that take part in rounds."""

    name: str
    fields: list[str]
    acked: list[tuple[int, int]]
    totals: tuple[int, int, int, int]
    peers: list[int]


class LeaseState(msgspec.Struct, frozen=True, array_like=True):
    """`tokens` are pairs of fencing token and owner."""

    id: int
    task: str
    ids: list[int]
    deadline: float
    owner: int
    shares: int
    tokens: list[tuple[int, int]]


class TicketState(msgspec.Struct, frozen=True, array_like=True):
    id: int
    samples: int
    version: int
    owner: int
    deadline: float


class PartState(msgspec.Struct, frozen=True, array_like=True):
    """`lease` is 0 for a dummy, and negative for a lease that is out no more."""

    lease: int
    ids: list[int]
    handed: int


class RoundState(msgspec.Struct, frozen=True, array_like=True):
    parts: list[PartState]
    is_last: bool
    left: int


class SeriesState(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of rounds. A seat is a rank and a member."""

    number: int
    terms: Wanted
    base: int
    rounds: list[RoundState]
    last: RoundState | None
    cursors: list[tuple[int, int, int]]
    owners: list[tuple[int, int, int]]
    end: int | None
    gone: list[tuple[int, int]]
    drained: bool
    told: list[tuple[int, int]]
    issued: int
    asked: float
    seconds: float


class PartitionState(msgspec.Struct, frozen=True, array_like=True):
    """`numbers` are the last order, lease, ticket and sequence given; `totals` samples and bytes put, samples
    updated and dropped; `views` the tasks and group sizes that were asked for.
    """

    format: int
    now: float
    name: str
    length_field: str | None
    max_samples: int | None
    max_staleness: int | None
    closed: bool
    clock: int | None
    fields: list[str]
    schema: dict[str, FieldSpec]
    samples: list[SampleState]
    groups: list[GroupState]
    dropped: dict[int, str]
    tasks: list[TaskState]
    views: list[tuple[str, int]]
    leases: list[LeaseState]
    tickets: list[TicketState]
    series: list[SeriesState]
    numbers: tuple[int, int, int, int]
    totals: tuple[int, int, int, int]


FORMAT = 1


def dump(partition: "Partition", now: float) -> PartitionState:
    """The state of a partition, of which `freed` has been taken."""
    held = {
        sample.id: sample
        for series in partition.rounds.series.values()
        for this in series.rounds
        for part in this.parts
        if part.handed < series.terms.sharers
        for sample in part.samples
        if sample.id not in partition.samples
    }
    return PartitionState(
        FORMAT,
        now,
        partition.name,
        partition.length_field,
        partition.max_samples,
        partition.max_staleness,
        partition.closed,
        partition.clock,
        list(partition.fields.bits),
        dict(partition.schema),
        [_sample(s, False) for s in partition.samples.values()] + [_sample(s, True) for s in held.values()],
        [
            GroupState(
                g.key, list(g.tally), g.arrived, g.size, g.alive, g.order, g.priority, g.version, g.length
            )
            for g in partition.groups.values()
        ],
        dict(partition.dropped),
        [
            TaskState(
                task.name,
                list(task.fields),
                task.acked.intervals,
                (task.delivered_total, task.acked_total, task.nacked_total, task.lapsed_total),
                sorted(partition.rounds.peers.get(task.name, ())),
            )
            for task in partition.tasks.values()
        ],
        list(partition.views),
        [
            LeaseState(
                lease.id,
                lease.task,
                lease.ids,
                lease.deadline,
                lease.owner,
                lease.shares,
                list(lease.tokens.items()),
            )
            for lease in partition.loans.out.values()
        ],
        [
            TicketState(t.id, t.samples, t.version, t.owner, t.deadline)
            for t in partition.admission.tickets.values()
        ],
        [_series(partition, series) for series in partition.rounds.series.values()],
        (
            partition.orders,
            partition.loans.last_id,
            partition.admission.last_id,
            partition.rounds.last_number,
        ),
        (
            partition.put_samples_total,
            partition.put_bytes_total,
            partition.updated_total,
            partition.dropped_total,
        ),
    )


def _sample(s: Sample, gone: bool) -> SampleState:
    key = None if s.group is None else s.group.key
    return SampleState(
        s.id,
        s.order,
        s.priority,
        s.version,
        key,
        s.nbytes,
        s.written,
        s.length,
        s.born,
        s.places,
        s.acked,
        gone,
    )


def _series(partition: "Partition", series: Series) -> SeriesState:
    return SeriesState(
        series.number,
        series.terms,
        series.base,
        [_round(partition, this) for this in series.rounds],
        None if series.last is None else _round(partition, series.last),
        [(*seat, got) for seat, got in series.cursors.items()],
        [(*seat, owner) for seat, owner in series.owners.items()],
        series.end,
        sorted(series.gone),
        series.drained,
        sorted(series.told),
        series.issued,
        series.asked,
        series.seconds,
    )


def _round(partition: "Partition", this: Round) -> RoundState:
    parts = [
        PartState(
            0 if part.lease is None else -part.lease.id if part.lease.ended else part.lease.id,
            [sample.id for sample in part.samples if sample.holds or sample.id in partition.samples],
            part.handed,
        )
        for part in this.parts
    ]
    return RoundState(parts, this.is_last, this.left)


def fill(partition: "Partition", state: PartitionState, now: float) -> None:
    """Brings an empty partition of the same name, tasks and limits to a state."""
    later = now - state.now
    partition.closed, partition.clock = state.closed, state.clock
    partition.fields.bits.update({name: bit for bit, name in enumerate(state.fields)})
    partition.fields.schema.update(state.schema)
    partition.dropped.update(state.dropped)
    partition.orders, partition.loans.last_id, partition.admission.last_id, partition.rounds.last_number = (
        state.numbers
    )
    (
        partition.put_samples_total,
        partition.put_bytes_total,
        partition.updated_total,
        partition.dropped_total,
    ) = (within(total, 1 << 62) for total in state.totals)
    for g in state.groups:
        partition.groups[g.key] = Group(
            g.key, list(g.tally), {}, g.arrived, g.size, g.alive, g.order, g.priority, g.version,
            within(g.length, 1 << 62),
        )  # fmt: skip
    held = _fill_samples(partition, state, later)
    for task_state in state.tasks:
        task = partition.tasks[task_state.name]
        task.acked = IdSet(task_state.acked)
        task.delivered_total, task.acked_total, task.nacked_total, task.lapsed_total = task_state.totals
        if task_state.peers:
            partition.rounds.peers[task.name] = set(task_state.peers)
    _fill_leases(partition, state, later)
    for task in partition.tasks.values():
        for sample in partition.samples.values():
            if not sample.leased & task.bit and not sample.acked & task.bit:
                if task.needs & ~sample.written:
                    task.count_unready(sample.version, 1)
                else:
                    task.ready.add(sample)
            if not sample.acked & task.bit:
                task.backlog.append(sample.id)
    for task_name, n in state.views:
        partition.add_view(partition.tasks[task_name], n)
    for t in state.tickets:
        partition.promise(t.id, t.samples, t.version, t.owner, t.deadline + later)
    for series in state.series:
        _fill_series(partition, series, held, later)


def _fill_samples(partition: "Partition", state: PartitionState, later: float) -> dict[int, Sample]:
    """Returns the samples that are gone but for the rounds that hold them."""
    held: dict[int, Sample] = {}
    for s in state.samples:
        group = None if s.group is None else partition.groups.get(s.group)
        if s.gone and s.group is not None:
            group = Group(s.group, [])
        sample = Sample(
            s.id,
            s.order,
            s.priority,
            s.version,
            group,
            within(s.nbytes, MAX_NBYTES),
            s.written,
            within(s.length, MAX_LENGTH),
            s.born + later,
            list(s.places),
            acked=s.acked,
        )
        if s.gone:
            held[s.id] = sample
            continue
        partition.samples[s.id] = sample
        partition.nbytes += sample.nbytes
        if group is not None:
            group.ids[s.id] = None
    return held


def _fill_leases(partition: "Partition", state: PartitionState, later: float) -> None:
    for one in state.leases:
        task = partition.tasks[one.task]
        samples = {sample: partition.samples[sample] for sample in one.ids}
        lease = Loan(one.id, task, samples, one.deadline + later, one.owner, one.shares)
        partition.loans.add(lease)
        for token, owner in one.tokens:
            partition.loans.give(lease, token, owner)
        task.count_held(one.owner, len(samples))
        for sample in samples.values():
            sample.leased |= task.bit
            task.leased[sample.id] = lease


def _fill_series(partition: "Partition", one: SeriesState, held: dict[int, Sample], later: float) -> None:
    series = Series(
        one.number,
        partition.tasks[one.terms.task],
        one.terms,
        one.base,
        cursors={(rank, member): got for rank, member, got in one.cursors},
        owners={(rank, member): owner for rank, member, owner in one.owners},
        end=one.end,
        gone=set(one.gone),
        drained=one.drained,
        told=set(one.told),
        issued=one.issued,
        asked=one.asked + later,
        seconds=one.seconds,
    )

    def round_of(this: RoundState, hold: bool) -> Round:
        parts: list[Part] = []
        for part in this.parts:
            # Samples that are neither there nor held were freed when the last sharer had got them.
            known = [partition.samples.get(sample) or held.get(sample) for sample in part.ids]
            samples = [sample for sample in known if sample is not None]
            if hold and part.handed < one.terms.sharers:
                for sample in samples:
                    partition.hold(sample)
            lease = partition.loans.out.get(part.lease)
            if lease is None and part.lease:
                lease = Loan(abs(part.lease), series.task, {}, 0.0, 0, ended=True)
            parts.append(Part(lease, samples, part.handed))
        return Round(parts, this.is_last, this.left)

    series.rounds.extend(round_of(this, True) for this in one.rounds)
    series.last = None if one.last is None else round_of(one.last, False)
    partition.rounds.add_series(series)
