"""The scheduler of one partition: a state machine without sockets, clocks or payload.

Every sample is, for every task, unready, ready, leased or acked. Callers pass the time in; each call does
work in proportion to the samples it names, never to the samples there are.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ..errors import (
    Closed,
    FieldNotReady,
    GroupMismatch,
    InvalidArgument,
    SchemaMismatch,
    StaleLease,
    UnknownName,
    UnknownSample,
)
from ..ids import IdSet, shortened
from ..samplers import Groups, InOrder
from ..values.columns import FieldSpec
from .groups import Group, GroupView, Standing, State
from .ready import Item, ReadyQueue
from .samples import Lease, Row, Sample, missing
from .wanted import Wanted


@dataclass(slots=True)
class Task:
    """A consumer group: the fields it needs, and the incremental sets it is served from.

    Attributes:
        backlog: ids in put order, of which those that the task has done are dropped from the left when it
            is read.
        delivered_total, acked_total, nacked_total, lapsed_total: samples since the partition was made.
    """

    name: str
    index: int
    fields: tuple[str, ...]
    needs: int
    ready: ReadyQueue[int] = field(default_factory=ReadyQueue)
    views: dict[int, GroupView] = field(default_factory=dict)
    counts: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    leased: dict[int, Lease] = field(default_factory=dict)
    held: Counter[int] = field(default_factory=Counter)  # samples leased, by owner
    acked: IdSet = field(default_factory=IdSet)
    backlog: deque[int] = field(default_factory=deque)
    delivered_total: int = 0
    acked_total: int = 0
    nacked_total: int = 0
    lapsed_total: int = 0


class Partition:
    """All samples of one partition and what every task may do with them.

    Attributes:
        length_field: the column whose lengths are the lengths of the samples, if there is one.
        freed: samples whose payload nobody needs any more; the owner takes and clears them.
        woken: tasks for which something became ready or ended; the owner takes and clears them.
        put_samples_total, put_bytes_total, updated_total, dropped_total: since the partition was made; bytes
            include those of updates.
    """

    def __init__(
        self, name: str, tasks: Mapping[str, Sequence[str]], *, length_field: str | None = None
    ) -> None:
        self.name = name
        self.length_field = length_field
        self.closed = False
        self.schema: dict[str, FieldSpec] = {}
        self.samples: dict[int, Sample] = {}
        self.groups: dict[str, Group] = {}
        self.leases: dict[int, Lease] = {}
        self.dropped: dict[int, str] = {}
        self.nbytes = 0
        self.freed: list[Sample] = []
        self.woken: set[str] = set()
        self.put_samples_total = self.put_bytes_total = self.updated_total = self.dropped_total = 0
        self._bits: dict[str, int] = {}
        self._lease_heap: list[tuple[float, int]] = []
        self._last_lease = 0
        self._orders = 0
        self._group_sizes: set[int] = set()
        self.tasks = {
            task: Task(task, index, tuple(fields), self._mask(fields))
            for index, (task, fields) in enumerate(tasks.items())
        }

    def _mask(self, fields: Iterable[str]) -> int:
        mask = 0
        for name in fields:
            mask |= 1 << self._bits.setdefault(name, len(self._bits))
        return mask

    def fields_mask(self, names: Iterable[str]) -> int | None:
        """The bit set of these fields, as in `Sample.written`; None if one of them was never heard of."""
        mask = 0
        for name in names:
            bit = self._bits.get(name)
            if bit is None:
                return None
            mask |= 1 << bit
        return mask

    def require(self, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Raises FieldNotReady for the first of the fields that is not written for all of the samples."""
        mask = self.fields_mask(names)
        if mask is not None and not missing(samples, mask):
            return
        for name in names:
            bit = self.fields_mask((name,))
            without = [sample.id for sample in samples] if bit is None else missing(samples, bit)
            if without:
                raise FieldNotReady(
                    f"field {name!r} is not written for {len(without)} of {len(samples)} samples of "
                    f"partition {self.name!r}: {shortened(without)}; name it among the fields of the task "
                    "to wait for it",
                    field=name,
                    ids=shortened(without),
                )

    def lag(self, task: Task, now: float) -> float | None:
        """The age in seconds of the oldest sample that the task has not acked; None if there is none."""
        while task.backlog:
            sample = self.samples.get(task.backlog[0])
            if sample is not None and sample.states[task.index] is not State.ACKED:
                return now - sample.born
            task.backlog.popleft()
        return None

    def task(self, name: str) -> Task:
        if name not in self.tasks:
            raise UnknownName(
                f"partition {self.name!r} has no task {name!r}; it has {sorted(self.tasks)}", task=name
            )
        return self.tasks[name]

    # -- what producers do -----------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.closed:
            raise Closed(
                f"partition {self.name!r} is closed; nothing can be put any more", partition=self.name
            )

    def check_schema(self, specs: Mapping[str, FieldSpec]) -> None:
        """Raises SchemaMismatch for the first field that differs from what its first write fixed."""
        for name, spec in specs.items():
            fixed = self.schema.get(name)
            if fixed is not None and spec != fixed and spec.dtype != "none":
                raise SchemaMismatch(
                    f"field {name!r} of partition {self.name!r} is {fixed} by its first write, got {spec}; "
                    "convert it, or use another field",
                    field=name,
                    got=str(spec),
                    expected=str(fixed),
                )

    def _fix_schema(self, specs: Mapping[str, FieldSpec]) -> None:
        for name, spec in specs.items():
            if spec.dtype != "none":
                self.schema.setdefault(name, spec)

    def check_groups(self, keys: Iterable[str | None], sizes: Mapping[str, int]) -> None:
        """Raises GroupMismatch if a group would outgrow its size, or get a second size."""
        arriving: dict[str, int] = dict.fromkeys(sizes, 0)
        for key in keys:
            if key is not None:
                arriving[key] = arriving.get(key, 0) + 1
        for key, count in arriving.items():
            group = self.groups.get(key)
            known = None if group is None else group.size
            size = sizes.get(key, known)
            members = count + (0 if group is None else group.arrived)
            if known is not None and size != known:
                raise GroupMismatch(
                    f"group {key!r} has size {known}, not {size}", group=key, size=known, members=members
                )
            limit = size if size is not None else max(self._group_sizes, default=None)
            if limit is not None and members > limit:
                raise GroupMismatch(
                    f"group {key!r} would have {members} members where {limit} were announced; "
                    "use another key",
                    group=key,
                    size=limit,
                    members=members,
                )

    def put(
        self,
        rows: Sequence[Row],
        specs: Mapping[str, FieldSpec],
        sizes: Mapping[str, int],
        now: float = 0.0,
    ) -> list[Sample]:
        """Admits samples whose payload is stored, and returns them. All or nothing: every check comes before
        the first change.
        """
        self.check_open()
        self.check_schema(specs)
        self.check_groups((row.group for row in rows), sizes)
        self._fix_schema(specs)
        written = self._mask(specs)
        touched = dict.fromkeys(self._sized(key, size) for key, size in sizes.items())
        samples: list[Sample] = []
        for row in rows:
            group = None if row.group is None else self._group(row.group)
            states = [State.UNREADY] * len(self.tasks)
            sample = Sample(
                row.id,
                self._orders,
                row.priority,
                row.version,
                group,
                row.nbytes,
                written,
                states,
                len(self.tasks),
                row.length,
                now,
                row.places,
            )
            self._orders += 1
            self.put_bytes_total += row.nbytes
            samples.append(sample)
            self.samples[row.id] = sample
            self.nbytes += row.nbytes
            if group is not None:
                group.admit(row.id, sample.order, row.priority, row.version)
                touched[group] = None
            for task in self.tasks.values():
                task.backlog.append(row.id)
                task.counts[State.UNREADY] += 1
                if group is not None:
                    group.tally[task.index][State.UNREADY] += 1
                if task.needs & ~written == 0:
                    self._move(sample, task, State.READY)
        self.put_samples_total += len(samples)
        self._refresh(touched)
        return samples

    def update(
        self,
        ids: Sequence[int],
        specs: Mapping[str, FieldSpec],
        nbytes: Sequence[int],
        lengths: Sequence[int] | None = None,
    ) -> list[Sample]:
        """Marks fields of samples as written, and returns the samples; what they complete becomes ready.

        Args:
            nbytes: what each sample grows by.
            lengths: the new length of each; None leaves them.
        """
        samples = self.known(ids)
        self.check_schema(specs)
        self._fix_schema(specs)
        mask = self._mask(specs)
        touched: dict[Group, None] = {}
        for at, (sample, size) in enumerate(zip(samples, nbytes, strict=True)):
            sample.nbytes += size
            self.nbytes += size
            self.put_bytes_total += size
            if lengths is not None:
                sample.length = lengths[at]
            sample.written |= mask
            for task in self.tasks.values():
                if sample.states[task.index] is State.UNREADY and task.needs & ~sample.written == 0:
                    self._move(sample, task, State.READY)
                    if sample.group is not None:
                        touched[sample.group] = None
        self.updated_total += len(samples)
        self._refresh(touched)
        return samples

    def close_group(self, key: str, count: int, tombstones: int) -> None:
        """Fixes a group's size at `count` less the `tombstones`, members that will never be put."""
        size = count - tombstones
        self.check_groups((), {key: size})
        self._refresh({self._sized(key, size): None})

    def close(self) -> None:
        """No more puts; fetches end when nothing is left."""
        self.closed = True
        self.woken.update(self.tasks)

    def known(self, ids: Sequence[int]) -> list[Sample]:
        """The samples of these ids; UnknownSample if any was never put, is freed or dropped."""
        if len(set(ids)) != len(ids):
            raise InvalidArgument(f"{len(ids) - len(set(ids))} ids are given twice; name each sample once")
        missing = [sample for sample in ids if sample not in self.samples]
        if missing:
            raise UnknownSample(
                f"{len(missing)} of {len(ids)} ids are not in partition {self.name!r} (never put, acked by "
                f"every task, or dropped): {shortened(missing)}",
                ids=shortened(missing),
            )
        return [self.samples[sample] for sample in ids]

    # -- what consumers do -----------------------------------------------------------------------------------

    def lease(
        self, wanted: Wanted, *, now: float, seconds: float, owner: int, require: Sequence[str] = ()
    ) -> Lease | None:
        """Leases samples, or returns None if the fetch has to wait.

        Args:
            require: fields that must be written besides those of the task.

        Raises:
            Closed: the partition is closed and nothing can come any more.
            FieldNotReady: a required field is not written for one of the samples; nothing is leased.
        """
        task = self.task(wanted.task)
        groups: list[Item[Group]] = []
        items: list[Item[int]] = []
        match wanted.sampler:
            case Groups(n):
                groups = self._take_groups(task, self.view(task, n), wanted, owner)
                ids = [sample for item in groups for sample in item.value.ids]
            case InOrder():
                items = self._take_samples(task, wanted, owner)
                ids = [item.value for item in items]
        if not ids:
            return None
        if require:
            try:
                self.require([self.samples[sample] for sample in ids], require)
            except FieldNotReady:
                match wanted.sampler:
                    case Groups(n):
                        _put_back(self.view(task, n).ready, groups)
                    case InOrder():
                        _put_back(task.ready, items)
                raise
        task.delivered_total += len(ids)
        self._last_lease += 1
        lease = Lease(self._last_lease, task.name, dict.fromkeys(ids), now + seconds, owner)
        self.leases[lease.id] = lease
        heappush(self._lease_heap, (lease.deadline, lease.id))
        task.held[owner] += len(ids)
        touched: dict[Group, None] = {}
        for sample_id in ids:
            sample = self.samples[sample_id]
            task.leased[sample_id] = lease
            self._move(sample, task, State.LEASED)
            if sample.group is not None:
                touched[sample.group] = None
        self._refresh(touched)
        return lease

    def _take_samples(self, task: Task, wanted: Wanted, owner: int) -> list[Item[int]]:
        unready, ready = task.counts[State.UNREADY], task.counts[State.READY]
        if self.closed and not (unready or ready or self._others_hold(task, owner)):
            raise self._drained(task)
        enough = 1 if self.closed and not unready else wanted.floor
        return self._take(task.ready, wanted.count, enough, wanted)

    def _take_groups(self, task: Task, view: GroupView, wanted: Wanted, owner: int) -> list[Item[Group]]:
        waiting, ready, leased = (view.counts[s] for s in (Standing.WAITING, Standing.READY, Standing.LEASED))
        if self.closed and not (waiting or ready or (leased and self._others_hold(task, owner))):
            raise self._drained(task)
        count = wanted.count // view.n
        enough = 1 if self.closed and not waiting else -(-wanted.floor // view.n)
        return self._take(view.ready, count, enough, wanted)

    @staticmethod
    def _others_hold(task: Task, owner: int) -> bool:
        """Whether samples are leased to others, and may come back. What `owner` holds it need not wait
        for.
        """
        return task.counts[State.LEASED] > task.held[owner]

    @staticmethod
    def _take[T: (int, Group)](
        queue: ReadyQueue[T], count: int, enough: int, wanted: Wanted
    ) -> list[Item[T]]:
        if len(queue) < enough:
            return []
        items = queue.take(count, wanted.max_priority, wanted.min_version)
        if len(items) >= enough:
            return items
        _put_back(queue, items)
        return []

    def _drained(self, task: Task) -> Closed:
        return Closed(
            f"partition {self.name!r} is closed and drained for task {task.name!r}",
            partition=self.name,
            task=task.name,
        )

    def view(self, task: Task, n: int) -> GroupView:
        """The view for groups of `n`; built from the groups there are when first asked for, then kept up to
        date.
        """
        if n not in task.views:
            for group in self.groups.values():
                if group.size is None and group.arrived > n:
                    raise GroupMismatch(
                        f"group {group.key!r} has {group.arrived} members where the sampler wants {n}",
                        group=group.key,
                        size=n,
                        members=group.arrived,
                    )
            view = GroupView(n, task.index)
            for group in self.groups.values():
                view.refresh(group)
            task.views[n] = view
            self._group_sizes.add(n)
        return task.views[n]

    def ack(self, lease_id: int, now: float) -> None:
        """Completes the samples of a lease for its task; frees those that every task has completed."""
        lease = self._end(lease_id, now)
        task = self.tasks[lease.task]
        touched: dict[Group, None] = {}
        for sample_id in lease.ids:
            sample = self.samples[sample_id]
            del task.leased[sample_id]
            task.acked.add(sample_id)
            self._move(sample, task, State.ACKED)
            if sample.group is not None:
                touched[sample.group] = None
            sample.tasks_left -= 1
            if not sample.tasks_left:
                self._free(sample)
        self._refresh(touched)
        task.acked_total += len(lease.ids)
        if len(task.backlog) > 2 * (len(self.samples) + 64):
            task.backlog = deque(sample for sample in task.backlog if sample in self.samples)
        self._ended(task, lease)

    def nack(self, lease_id: int, now: float) -> None:
        """Returns the samples of a lease: they are ready again, in their old place."""
        lease = self._end(lease_id, now)
        self.tasks[lease.task].nacked_total += len(lease.ids)
        self._return(lease)

    def extend(self, lease_id: int, seconds: float, now: float) -> None:
        """Moves a lease's deadline to `seconds` from now."""
        lease = self._end(lease_id, now)
        lease.deadline = now + seconds
        self.leases[lease.id] = lease
        heappush(self._lease_heap, (lease.deadline, lease.id))

    def _end(self, lease_id: int, now: float) -> Lease:
        self.lapse(now)
        if lease_id not in self.leases:
            raise StaleLease(
                f"lease {lease_id} of partition {self.name!r} has lapsed or is finished; its samples may be "
                "with another consumer (fetch with a longer lease_seconds, or extend_lease)",
                lease=lease_id,
            )
        return self.leases.pop(lease_id)

    def _return(self, lease: Lease) -> None:
        task = self.tasks[lease.task]
        touched: dict[Group, None] = {}
        for sample_id in lease.ids:
            sample = self.samples[sample_id]
            del task.leased[sample_id]
            self._move(sample, task, State.READY)
            if sample.group is not None:
                touched[sample.group] = None
        self._refresh(touched)
        self._ended(task, lease)

    def lapse(self, now: float) -> None:
        """Returns the samples of every lease whose deadline has passed."""
        while self._lease_heap and self._lease_heap[0][0] <= now:
            deadline, lease_id = heappop(self._lease_heap)
            lease = self.leases.get(lease_id)
            if lease is not None and lease.deadline == deadline:
                del self.leases[lease_id]
                self.tasks[lease.task].lapsed_total += len(lease.ids)
                self._return(lease)

    def next_lapse(self) -> float | None:
        """When the next lease lapses, if any is out."""
        while self._lease_heap:
            deadline, lease_id = self._lease_heap[0]
            lease = self.leases.get(lease_id)
            if lease is not None and lease.deadline == deadline:
                return deadline
            heappop(self._lease_heap)
        return None

    def release(self, owner: int) -> None:
        """Returns every lease of a consumer that says goodbye."""
        for lease in [lease for lease in self.leases.values() if lease.owner == owner]:
            del self.leases[lease.id]
            self.tasks[lease.task].nacked_total += len(lease.ids)
            self._return(lease)

    def drop(self, ids: Sequence[int], reason: str) -> None:
        """Ends samples for every task that has not acked them, and records why. Dropping twice keeps the
        first reason.
        """
        samples = self.known([sample for sample in ids if sample not in self.dropped])
        touched: dict[Group, None] = {}
        for sample in samples:
            self.dropped[sample.id] = reason
            for task in self.tasks.values():
                state = sample.states[task.index]
                if state is not State.ACKED:
                    task.counts[state] -= 1
                if state is State.READY:
                    task.ready.discard(sample.id)
                elif state is State.LEASED:
                    lease = task.leased.pop(sample.id)
                    del lease.ids[sample.id]
                    task.held[lease.owner] -= 1
                if sample.group is not None:
                    sample.group.tally[task.index][state] -= 1
            if sample.group is not None:
                sample.group.alive -= 1
                touched[sample.group] = None
            self._free(sample)
        self.dropped_total += len(samples)
        self._refresh(touched)
        self.woken.update(self.tasks)

    # -- shared steps ----------------------------------------------------------------------------------------

    def _move(self, sample: Sample, task: Task, state: State) -> None:
        before = sample.states[task.index]
        sample.states[task.index] = state
        task.counts[before] -= 1
        task.counts[state] += 1
        if sample.group is not None:
            tally = sample.group.tally[task.index]
            tally[before] -= 1
            tally[state] += 1
        if before is State.READY:
            task.ready.discard(sample.id)
        if state is State.READY:
            task.ready.add(sample.id, sample.priority, sample.order, sample.version)
            self.woken.add(task.name)

    def _ended(self, task: Task, lease: Lease) -> None:
        task.held[lease.owner] -= len(lease.ids)
        if not task.held[lease.owner]:
            del task.held[lease.owner]
        if self.closed:  # a fetch that waited for these leases may now return less, or raise Closed
            self.woken.add(task.name)

    def _free(self, sample: Sample) -> None:
        del self.samples[sample.id]
        self.nbytes -= sample.nbytes
        self.freed.append(sample)
        if sample.group is not None:
            del sample.group.ids[sample.id]

    def _group(self, key: str) -> Group:
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(key, len(self.tasks))
        return group

    def _sized(self, key: str, size: int) -> Group:
        group = self._group(key)
        group.size = size
        return group

    def _refresh(self, groups: Iterable[Group]) -> None:
        for group in groups:
            for task in self.tasks.values():
                for view in task.views.values():
                    if view.refresh(group):
                        self.woken.add(task.name)
            if not group.ids and self._is_over(group):
                del self.groups[group.key]  # the key may be used again
                for task in self.tasks.values():
                    for view in task.views.values():
                        view.remove(group)

    def _is_over(self, group: Group) -> bool:
        if group.size is not None:
            return group.arrived >= group.size
        return group.arrived >= max(self._group_sizes, default=0)


def _put_back[T: (int, Group)](queue: ReadyQueue[T], items: Sequence[Item[T]]) -> None:
    for item in items:
        queue.add(item.value, item.priority, item.order, item.version)
