"""The book of a partition: what every sample is to every task, and each change of that.

All counters, ready queues, group views and leases change together here, by calls that name what they
change. Who is served what is decided elsewhere (`partition`, `rounds`) and then done here; events repeat
these calls.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import Closed, GroupMismatch, InvalidArgument, UnknownName, UnknownSample
from ..ids import shortened
from ..values.columns import FieldSpec
from . import events
from .admission import Admission, Ticket
from .fields import Fields
from .groups import ACKED, LEASED, READY, UNREADY, Group, GroupView, check_sizes
from .loans import Loan, Loans
from .ready import ReadyQueue
from .samples import Row, Sample
from .tasks import Task
from .wanted import Wanted

_MAX_GROUP_SIZES = (
    64  # group sizes a task may be asked for; each is a view that every change keeps up to date
)


class Book:
    """See `partition.Partition`, which is what is made."""

    def __init__(
        self,
        name: str,
        tasks: Mapping[str, Sequence[str]],
        *,
        length_field: str | None = None,
        max_samples: int | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self.name = name
        self.length_field = length_field
        self.max_samples = max_samples
        self.max_staleness = max_staleness
        self.closed = False
        self.clock: int | None = None
        self.fields = Fields(name)
        self.samples: dict[int, Sample] = {}
        self.groups: dict[str, Group] = {}
        self.dropped: dict[int, str] = {}
        self.nbytes = 0
        self.loans = Loans()
        self.admission = Admission()
        self.freed: list[Sample] = []
        self.woken: set[str] = set()
        self.room_made = False
        self.recorder: events.Recorder | None = None
        self.put_samples_total = self.put_bytes_total = self.updated_total = self.dropped_total = 0
        self.orders = 0
        self.group_sizes: set[int] = set()
        self.views: list[tuple[str, int]] = []
        self._views: list[GroupView] = []
        self.tasks: dict[str, Task] = {}
        for index, (task, fields) in enumerate(tasks.items()):
            bit = 1 << index
            self.tasks[task] = Task(
                task, index, bit, tuple(fields), self.fields.mask(fields), ReadyQueue(bit)
            )
        self._task_list = list(self.tasks.values())
        self._every_task = (1 << len(self.tasks)) - 1

    @property
    def leases(self) -> Mapping[int, Loan]:
        """The leases that consumers hold, by fencing token."""
        return self.loans.tokens

    def task(self, name: str) -> Task:
        if name not in self.tasks:
            raise UnknownName(
                f"partition {self.name!r} has no task {name!r}; it has {sorted(self.tasks)}", task=name
            )
        return self.tasks[name]

    @property
    def schema(self) -> Mapping[str, FieldSpec]:
        """Name -> dtype and trailing shape of the fields that were written."""
        return self.fields.schema

    def check_schema(self, specs: Mapping[str, FieldSpec]) -> None:
        """Raises SchemaMismatch for the first field that differs from what its first write fixed."""
        self.fields.check(specs)

    def fields_mask(self, names: Iterable[str]) -> int | None:
        """The bit set of these fields, as in `Sample.written`; None if one of them was never heard of."""
        return self.fields.known_mask(names)

    def require(self, samples: Sequence[Sample], names: Sequence[str]) -> None:
        """Raises FieldNotReady for the first of the fields that is not written for all of the samples."""
        self.fields.require(samples, names)

    # -- what producers do -----------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.closed:
            raise Closed(
                f"partition {self.name!r} is closed; nothing can be put any more", partition=self.name
            )

    def check_groups(self, keys: Iterable[str | None], sizes: Mapping[str, int]) -> None:
        """Raises GroupMismatch if a group would outgrow its size, or get a second size."""
        check_sizes(self.groups, max(self.group_sizes, default=None), keys, sizes)

    def fits(self, samples: int, ticket: int | None = None) -> bool:
        """Whether so many more samples keep within `max_samples`; those that the ticket covers do."""
        if self.max_samples is None:
            return True
        more = samples - self.admission.covered(ticket, samples)
        return more <= 0 or len(self.samples) + self.admission.promised + more <= self.max_samples

    def put(
        self,
        rows: Sequence[Row],
        specs: Mapping[str, FieldSpec],
        sizes: Mapping[str, int],
        now: float = 0.0,
        ticket: int | None = None,
    ) -> list[Sample]:
        """Admits samples whose payload is stored, and returns them. All or nothing: every check comes before
        the first change. Whether they fit is for the caller to ask first.

        Args:
            ticket: the admission that they were made under; one that has lapsed does not matter.
        """
        self.check_open()
        self.check_schema(specs)
        self.check_groups([row.group for row in rows], sizes)
        self.fields.fix(specs)
        written = self.fields.mask(specs)
        touched = dict.fromkeys([self._sized(key, size) for key, size in sizes.items()])
        ready: list[Task] = []
        unready: list[Task] = []
        states: list[int] = []  # positions in a group's tally, one for each task
        for task in self._task_list:
            is_ready = not task.needs & ~written
            (ready if is_ready else unready).append(task)
            states.append(4 * task.index + (READY if is_ready else UNREADY))
        samples: list[Sample] = []
        order, nbytes = self.orders, 0
        for row in rows:
            version, length = row.version, row.length
            group = None if row.group is None else self._group(row.group)
            sample = Sample(
                row.id, order, row.priority, version, group, row.nbytes, written, length, now, row.places
            )
            samples.append(sample)
            self.samples[row.id] = sample
            nbytes += row.nbytes
            if group is not None:
                if group.queued:
                    self._unqueue(group)
                group.admit(row.id, order, row.priority, version, length)
                tally = group.tally
                for state in states:
                    tally[state] += 1
                touched[group] = None
            order += 1
            for task in ready:
                task.ready.add(sample)
            for task in unready:
                task.count_unready(version, 1)
            if self.clock is None or version > self.clock:
                self.clock = version
        ids = [sample.id for sample in samples]
        for task in self._task_list:
            task.backlog.extend(ids)
        if rows:
            self.woken.update([task.name for task in ready])
        self.orders = order
        self.nbytes += nbytes
        self.put_bytes_total += nbytes
        self.put_samples_total += len(samples)
        if ticket is not None:
            self.admission.redeem(ticket, len(samples))
        if touched:
            self._refresh(touched)
        if self.recorder is not None:
            self.recorder(events.Put(list(rows), dict(specs), dict(sizes), ticket))
        return samples

    def update(
        self,
        ids: Sequence[int],
        specs: Mapping[str, FieldSpec],
        nbytes: Sequence[int],
        lengths: Sequence[int] | None = None,
        places: Sequence[list[Any]] | None = None,
    ) -> list[Sample]:
        """Marks fields of samples as written, and returns the samples; what they complete becomes ready.

        Args:
            nbytes: what each sample grows by.
            lengths: the new length of each; None leaves them.
            places: what to add to the places of each.
        """
        samples = self.known(ids)
        self.check_schema(specs)
        self.fields.fix(specs)
        mask = self.fields.mask(specs)
        touched: dict[Group, None] = {}
        for at, sample in enumerate(samples):
            sample.nbytes += nbytes[at]
            before, sample.written = sample.written, sample.written | mask
            group = sample.group
            if lengths is not None:
                if group is not None:
                    group.length += lengths[at] - sample.length
                sample.length = lengths[at]
            if places is not None:
                sample.places.extend(places[at])
            if before == sample.written:
                continue
            for task in self._task_list:
                if task.needs & ~before and not task.needs & ~sample.written:
                    task.count_unready(sample.version, -1)
                    task.ready.add(sample)
                    self.woken.add(task.name)
                    if group is not None:
                        group.tally[4 * task.index + UNREADY] -= 1
                        group.tally[4 * task.index + READY] += 1
                        touched[group] = None
        grown = sum(nbytes)
        self.nbytes += grown
        self.put_bytes_total += grown
        self.updated_total += len(samples)
        if touched:
            self._refresh(touched)
        if self.recorder is not None:
            self.recorder(
                events.Updated(
                    list(ids),
                    dict(specs),
                    list(nbytes),
                    None if lengths is None else list(lengths),
                    None if places is None else list(places),
                )
            )
        return samples

    def close_group(self, key: str, count: int, tombstones: int) -> None:
        """Fixes a group's size at `count` less the `tombstones`, members that will never be put."""
        size = count - tombstones
        self.check_groups((), {key: size})
        self._refresh({self._sized(key, size): None})
        if self.recorder is not None:
            self.recorder(events.GroupClosed(key, count, tombstones))

    def advance(self, version: int) -> None:
        """Moves the clock to `version`, which consumers and producers are now at; an older one changes
        nothing. A put of a newer version moves it too.
        """
        if self.clock is None or version > self.clock:
            self.clock = version
            self.room_made = True  # an admission that waits may have become too old
            self.woken.update(self.tasks)  # fetches that wait may have nothing left to wait for
            if self.recorder is not None:
                self.recorder(events.Advanced(version))

    def promise(self, number: int, samples: int, version: int, owner: int, deadline: float) -> Ticket:
        """Lets a ticket count."""
        ticket = Ticket(number, samples, version, owner, deadline)
        self.admission.add(ticket)
        return ticket

    def unpromise(self, number: int) -> None:
        """Ends a ticket that is not needed any more; one that has ended already stays so."""
        if number in self.admission.tickets:
            self.admission.remove(number)
            self.room_made = True
            if self.recorder is not None:
                self.recorder(events.Unadmitted(number))

    def drop(self, ids: Sequence[int], reason: str) -> None:
        """Ends samples for every task that has not acked them, and records why. Dropping twice keeps the
        first reason.
        """
        samples = self.known([sample for sample in ids if sample not in self.dropped])
        touched: dict[Group, None] = {}
        for sample in samples:
            self.dropped[sample.id] = reason
            group = sample.group
            for task in self._task_list:
                bit = task.bit
                if sample.ready & bit:
                    state = READY
                    task.ready.discard(sample)
                elif sample.leased & bit:
                    state = LEASED
                    sample.leased ^= bit
                    lease = task.leased.pop(sample.id)
                    del lease.samples[sample.id]
                    task.count_held(lease.owner, -1)
                elif sample.acked & bit:
                    state = ACKED
                else:
                    state = UNREADY
                    task.count_unready(sample.version, -1)
                if group is not None:
                    group.tally[4 * task.index + state] -= 1
            if group is not None:
                group.alive -= 1
                group.length -= sample.length
                touched[group] = None
            self._free(sample)
        self.dropped_total += len(samples)
        self._refresh(touched)
        self.woken.update(self.tasks)
        if self.recorder is not None:
            self.recorder(events.Dropped(list(ids), reason))

    def close(self) -> None:
        """No more puts; fetches end when nothing is left."""
        self.closed = True
        self.room_made = True  # what waits for room ends
        self.woken.update(self.tasks)
        if self.recorder is not None:
            self.recorder(events.Ended())

    def known(self, ids: Sequence[int]) -> list[Sample]:
        """The samples of these ids; UnknownSample if any was never put, is freed or dropped."""
        if len(set(ids)) != len(ids):
            raise InvalidArgument(f"{len(ids) - len(set(ids))} ids are given twice; name each sample once")
        try:
            return [self.samples[sample] for sample in ids]
        except KeyError:
            gone = [sample for sample in ids if sample not in self.samples]
        raise UnknownSample(
            f"{len(gone)} of {len(ids)} ids are not in partition {self.name!r} (never put, acked by "
            f"every task, or dropped): {shortened(gone)}",
            ids=shortened(gone),
        )

    # -- what there is to serve ------------------------------------------------------------------------------

    def drained(self, task: Task) -> Closed:
        """The error that ends a task's stream."""
        return Closed(
            f"partition {self.name!r} is closed and drained for task {task.name!r}",
            partition=self.name,
            task=task.name,
        )

    def oldest_served(self, wanted: Wanted) -> int | None:
        """The lowest version that may be served now; None if any may."""
        oldest = wanted.min_version
        if wanted.max_staleness is not None and self.clock is not None:
            floor = self.clock - wanted.max_staleness
            oldest = floor if oldest is None else max(oldest, floor)
        return oldest

    def view(self, task: Task, n: int) -> GroupView:
        """The view for groups of `n`; built from the groups there are when first asked for, then kept up to
        date.
        """
        if n in task.views:
            return task.views[n]
        if len(task.views) == _MAX_GROUP_SIZES:
            raise InvalidArgument(
                f"task {task.name!r} was asked for groups of {_MAX_GROUP_SIZES} different sizes; use one"
            )
        for group in self.groups.values():
            if group.size is None and group.arrived > n:
                raise GroupMismatch(
                    f"group {group.key!r} has {group.arrived} members where the sampler wants {n}",
                    group=group.key,
                    size=n,
                    members=group.arrived,
                )
        view = self.add_view(task, n)
        if self.recorder is not None:
            self.recorder(events.Watched(task.name, n))
        return view

    def add_view(self, task: Task, n: int) -> GroupView:
        """Begins to keep the groups of a task by a group size."""
        view = GroupView(n, task.index, 1 << len(self._views))
        for group in self.groups.values():
            view.refresh(group)
        self._views.append(view)
        self.views.append((task.name, n))
        task.views[n] = view
        self.group_sizes.add(n)
        return view

    def lag(self, task: Task, now: float) -> float | None:
        """The age in seconds of the oldest sample that the task has not acked; None if there is none."""
        backlog = task.backlog
        while backlog:
            sample = self.samples.get(backlog[0])
            if sample is not None and not sample.acked & task.bit:
                return now - sample.born
            backlog.popleft()
        return None

    # -- what consumers have ---------------------------------------------------------------------------------

    def grant(
        self, task: Task, samples: Sequence[Sample], owner: int, deadline: float, number: int, shares: int = 1
    ) -> Loan:
        """Loans samples to an owner, or (negative) to the sequence of rounds that has planned them."""
        lease = Loan(number, task, {sample.id: sample for sample in samples}, deadline, owner, shares)
        bit, leased, ready = task.bit, task.leased, task.ready
        was, now_is = 4 * task.index + READY, 4 * task.index + LEASED
        touched: dict[Group, None] = {}
        for sample in samples:
            if sample.ready & bit:  # was chosen by group, or by id
                ready.discard(sample)
            sample.leased |= bit
            leased[sample.id] = lease
            group = sample.group
            if group is not None:
                group.tally[was] -= 1
                group.tally[now_is] += 1
                touched[group] = None
        task.count_held(owner, len(samples))
        self.loans.add(lease)
        if owner >= 0:
            self.loans.give(lease, number, owner)
            task.delivered_total += len(samples)
        if touched:
            self._refresh(touched)
        return lease

    def complete(self, token: int) -> None:
        """Ends one share of a lease; the last one acks its samples."""
        lease = self.loans.tokens[token]
        lease.shares -= 1
        if lease.shares:
            self.loans.withdraw(lease, token)
        else:
            self._end(lease)
            task, bit, everyone = lease.of, lease.of.bit, self._every_task
            was, now_is = 4 * task.index + LEASED, 4 * task.index + ACKED
            touched: dict[Group, None] = {}
            for sample in lease.samples.values():
                del task.leased[sample.id]
                task.acked.add(sample.id)
                sample.leased ^= bit
                sample.acked |= bit
                group = sample.group
                if group is not None:
                    group.tally[was] -= 1
                    group.tally[now_is] += 1
                    touched[group] = None
                if sample.acked == everyone:
                    self._free(sample)
            task.acked_total += len(lease.samples)
            if touched:
                self._refresh(touched)
            if len(task.backlog) > 2 * (len(self.samples) + 64):
                task.backlog = deque([sample for sample in task.backlog if sample in self.samples])
        if self.recorder is not None:
            self.recorder(events.Acked(token))

    def give_back(self, lease: Loan, *, lapsed: bool) -> None:
        """Ends a lease for all who share it; its samples are ready again, in their old place."""
        self._end(lease)
        task, bit = lease.of, lease.of.bit
        was, now_is = 4 * task.index + LEASED, 4 * task.index + READY
        touched: dict[Group, None] = {}
        samples = list(lease.samples.values())
        for sample in samples:
            del task.leased[sample.id]
            sample.leased ^= bit
            group = sample.group
            if group is not None:
                group.tally[was] -= 1
                group.tally[now_is] += 1
                touched[group] = None
        task.ready.restore(samples)
        if lease.owner < 0:
            pass  # nobody had them
        elif lapsed:
            task.lapsed_total += len(samples)
        else:
            task.nacked_total += len(samples)
        self.woken.add(task.name)
        if touched:
            self._refresh(touched)
        if self.recorder is not None:
            self.recorder(events.Returned(lease.id, lapsed))

    def pass_on(self, lease: Loan, owner: int) -> None:
        """Lets a lease belong to another owner, without a token."""
        lease.of.count_held(lease.owner, -len(lease.samples))
        lease.owner = owner
        lease.of.count_held(owner, len(lease.samples))

    def prolong(self, token: int, deadline: float) -> None:
        """Moves the deadline of the lease with that fencing token."""
        self.loans.set_deadline(self.loans.tokens[token], deadline)

    def lease_numbered(self, number: int) -> Loan:
        """The lease of that id, whoever has it."""
        return self.loans.out[number]

    def _end(self, lease: Loan) -> None:
        self.loans.end(lease)
        lease.of.count_held(lease.owner, -len(lease.samples))
        if self.closed:  # a fetch that waited for these samples may now return less, or raise Closed
            self.woken.add(lease.of.name)

    # -- shared steps ----------------------------------------------------------------------------------------

    def hold(self, sample: Sample) -> None:
        """Keeps the payload of a sample, whatever becomes of it."""
        sample.holds += 1

    def unhold(self, sample: Sample) -> None:
        """Ends a `hold`."""
        sample.holds -= 1
        if not sample.holds and sample.id not in self.samples:
            self.freed.append(sample)
            self.room_made = True

    def _free(self, sample: Sample) -> None:
        del self.samples[sample.id]
        self.nbytes -= sample.nbytes
        self.room_made = True
        if not sample.holds:
            self.freed.append(sample)
        if sample.group is not None:
            del sample.group.ids[sample.id]

    def _group(self, key: str) -> Group:
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(key, [0] * (4 * len(self.tasks)))
        return group

    def _sized(self, key: str, size: int) -> Group:
        group = self._group(key)
        group.size = size
        return group

    def _unqueue(self, group: Group) -> None:
        for view in self._views:
            if group.queued & view.bit:
                view.unqueue(group)

    def _refresh(self, groups: Iterable[Group]) -> None:
        for group in groups:
            for task in self._task_list:
                for view in task.views.values():
                    if view.refresh(group):
                        self.woken.add(task.name)
            if not group.ids and self._is_over(group):
                del self.groups[group.key]  # the key may be used again
                for view in self._views:
                    view.remove(group)

    def _is_over(self, group: Group) -> bool:
        if group.size is not None:
            return group.arrived >= group.size
        return group.arrived >= max(self.group_sizes, default=0)
