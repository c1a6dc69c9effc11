"""The scheduler against a model that knows nothing of heaps, views or counters."""

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transferqueue.errors import Closed, FieldNotReady, GroupMismatch, StaleLease, UnknownSample
from transferqueue.samplers import Balanced, Freshest, Groups, InOrder, TokenBudget
from transferqueue.scheduling.partition import Partition, Row, Wanted
from transferqueue.scheduling.ready import ReadyQueue
from transferqueue.values.columns import FieldSpec

SPEC = FieldSpec("int32", (), True)
N = 3
TASKS = {"whole": ["x", "y"], "single": ["x"], "late": ["y", "z"]}


class Schedule(RuleBasedStateMachine):
    """Any interleaving of what can happen to samples, over three tasks; one takes whole groups."""

    @initialize()
    def start(self) -> None:
        self.part = Partition("p", TASKS)
        self.now = 0.0
        self.next_id = 1000
        self.next_group = 0
        self.order: dict[int, int] = {}
        self.fields: dict[int, set[str]] = {}
        self.priority: dict[int, int] = {}
        self.version: dict[int, int] = {}
        self.group: dict[int, str | None] = {}
        self.size: dict[str, int] = {}
        self.arrived: dict[str, int] = {}
        self.acked: dict[str, set[int]] = {task: set() for task in TASKS}
        self.dropped: set[int] = set()
        self.freed: set[int] = set()
        self.out: dict[int, tuple[str, list[int], float]] = {}
        self.ended: list[int] = []

    # -- the model's own answers, by scanning everything -----------------------------------------------------

    def leased(self, task: str) -> set[int]:
        return {sample for name, ids, _ in self.out.values() if name == task for sample in ids}

    def ready(self, task: str) -> list[int]:
        gone = self.acked[task] | self.dropped | self.leased(task)
        samples = [s for s in self.order if s not in gone and set(TASKS[task]) <= self.fields[s]]
        return sorted(samples, key=lambda s: (self.priority[s], self.order[s]))

    def unready(self, task: str) -> list[int]:
        gone = self.acked[task] | self.dropped
        return [s for s in self.order if s not in gone and not set(TASKS[task]) <= self.fields[s]]

    def mates(self, sample: int) -> list[int]:
        """All members of a sample's group that were ever put."""
        return [s for s in self.order if self.group[s] == self.group[sample]]

    def ready_groups(self, task: str, max_priority: int | None, min_version: int | None) -> list[list[int]]:
        ready = set(self.ready(task))
        found = []
        for key in {key for key in self.group.values() if key is not None}:
            everyone = [s for s in self.order if self.group[s] == key]
            alive = [s for s in everyone if s not in self.dropped]
            if self.arrived[key] != self.size.get(key, N) or not alive or not set(alive) <= ready:
                continue
            priority, version = (
                max(self.priority[s] for s in everyone),
                min(self.version[s] for s in everyone),
            )
            if max_priority is not None and priority > max_priority:
                continue
            if min_version is not None and version < min_version:
                continue
            found.append((priority, self.order[everyone[0]], alive))
        return [alive for _, _, alive in sorted(found)]

    # -- rules -----------------------------------------------------------------------------------------------

    @rule(
        count=st.integers(1, 4),
        members=st.lists(st.integers(0, 3), min_size=4, max_size=4),
        fields=st.sampled_from([["x"], ["x", "y"], ["y", "z"], ["x", "y", "z"], ["z"]]),
        priority=st.lists(st.integers(0, 2), min_size=4, max_size=4),
        version=st.lists(st.integers(0, 2), min_size=4, max_size=4),
        announce=st.none() | st.integers(1, 4),
    )
    def put(
        self,
        count: int,
        members: list[int],
        fields: list[str],
        priority: list[int],
        version: list[int],
        announce: int | None,
    ) -> None:
        if self.part.closed:
            with pytest.raises(Closed):
                self.part.put([], {"x": SPEC}, {})
            return
        keys = [None if member == 3 else f"g{self.next_group + member}" for member in members[:count]]
        sizes = {} if announce is None or keys[0] is None else {keys[0]: announce}
        ids = list(range(self.next_id, self.next_id + count))
        rows = [Row(s, k, v, p, 1) for s, k, v, p in zip(ids, keys, version, priority, strict=False)]
        for key in {key for key in keys if key is not None}:
            if key in self.arrived and {s for s in self.order if self.group[s] == key} <= self.freed:
                self.next_group += 3  # a group that is gone; that its key may be used again has its own test
                return
            size = self.size.get(key, sizes.get(key))
            too_many = self.arrived.get(key, 0) + keys.count(key) > (size or N)
            if too_many or (key in sizes and self.size.get(key, sizes[key]) != sizes[key]):
                self.next_group += 3
                if self.part.tasks["whole"].views or size is not None:  # else no size is known yet
                    with pytest.raises(GroupMismatch):
                        self.part.put(rows, dict.fromkeys(fields, SPEC), sizes)
                return
        self.put_rows(keys, fields, priority, version, sizes)

    @precondition(lambda self: not self.part.closed)
    @rule(
        fields=st.sampled_from([["x", "y"], ["x", "y", "z"]]),
        priority=st.lists(st.integers(0, 2), min_size=N, max_size=N),
        version=st.lists(st.integers(0, 2), min_size=N, max_size=N),
    )
    def put_a_whole_group(self, fields: list[str], priority: list[int], version: list[int]) -> None:
        self.next_group += 3
        self.put_rows([f"g{self.next_group}"] * N, fields, priority, version, {})
        self.next_group += 3

    def put_rows(
        self,
        keys: Sequence[str | None],
        fields: list[str],
        priority: list[int],
        version: list[int],
        sizes: dict[str, int],
    ) -> None:
        ids = list(range(self.next_id, self.next_id + len(keys)))
        rows = [Row(s, k, v, p, 1) for s, k, v, p in zip(ids, keys, version, priority, strict=False)]
        self.part.put(rows, dict.fromkeys(fields, SPEC), sizes)
        self.next_id += len(keys)
        self.size |= sizes
        for sample, key, p, v in zip(ids, keys, priority, version, strict=False):
            self.order[sample] = len(self.order)
            self.fields[sample] = set(fields)
            self.priority[sample], self.version[sample], self.group[sample] = p, v, key
            if key is not None:
                self.arrived[key] = self.arrived.get(key, 0) + 1

    @rule(data=st.data(), field=st.sampled_from("xyz"))
    def update(self, data: st.DataObject, field: str) -> None:
        alive = [s for s in self.order if s not in self.freed]
        if not alive:
            with pytest.raises(UnknownSample):
                self.part.update([1], {field: SPEC}, [1])
            return
        ids = data.draw(st.lists(st.sampled_from(alive), min_size=1, max_size=4, unique=True))
        self.part.update(ids, {field: SPEC}, [1] * len(ids))
        for sample in ids:
            self.fields[sample].add(field)

    @rule(
        task=st.sampled_from(list(TASKS)),
        count=st.integers(1, 3),
        max_priority=st.none() | st.integers(0, 2),
        min_version=st.none() | st.integers(0, 2),
        partial=st.booleans(),
        at_least=st.none() | st.integers(1, 3),
        seconds=st.floats(1, 10),
        freshest=st.booleans(),
    )
    def fetch(
        self,
        task: str,
        count: int,
        max_priority: int | None,
        min_version: int | None,
        partial: bool,
        at_least: int | None,
        seconds: float,
        freshest: bool,
    ) -> None:
        whole = task == "whole"
        sampler, wanted = (Groups(N), count * N) if whole else (InOrder(), count)
        if freshest:
            sampler = Freshest(N if whole else None)
        enough = count if at_least is None else min(at_least, count)
        floor = enough * (N if whole else 1)
        request = Wanted(task, wanted, sampler, max_priority, min_version, floor, partial)
        fresh = {s for s in self.order if min_version is None or self.version[s] >= min_version}
        if whole:
            units = self.ready_groups(task, max_priority, min_version)
        else:
            fits = [
                s
                for s in self.ready(task)
                if (max_priority is None or self.priority[s] <= max_priority)
                and (min_version is None or self.version[s] >= min_version)
            ]
            units = [[s] for s in fits]
        if freshest:
            together = self.mates if whole else lambda sample: [sample]
            units.sort(key=lambda unit: -min(self.version[s] for s in together(unit[0])))
        try:
            lease = self.part.lease(request, now=self.now, seconds=seconds, owner=list(TASKS).index(task))
        except Closed:
            assert self.part.closed
            assert not units
            if not whole:
                assert not fresh & set(self.ready(task))
                assert not fresh & set(self.unready(task))
            return
        if lease is None:
            assert len(units) < (1 if partial else enough)
            return
        expected = [sample for unit in units[:count] for sample in unit]
        assert list(lease.ids) == expected  # order, wholeness, and never more than asked for
        assert len(units) >= enough or partial or self.part.closed
        self.out[lease.id] = (task, expected, self.now + seconds)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.out)))
        task, ids, _ = self.out.pop(lease)
        self.part.ack(lease, self.now)
        assert not self.acked[task] & set(ids)
        self.acked[task].update(ids)
        self.ended.append(lease)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.out)))
        del self.out[lease]
        self.part.nack(lease, self.now)
        self.ended.append(lease)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), seconds=st.floats(1, 10))
    def extend(self, data: st.DataObject, seconds: float) -> None:
        lease = data.draw(st.sampled_from(list(self.out)))
        self.part.extend(lease, seconds, self.now)
        task, ids, _ = self.out[lease]
        self.out[lease] = (task, ids, self.now + seconds)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def finish_late(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.ended))
        for finish in (self.part.ack, self.part.nack):
            with pytest.raises(StaleLease):
                finish(lease, self.now)
        with pytest.raises(StaleLease):
            self.part.extend(lease, 1, self.now)

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for lease in [lease for lease, (_, _, deadline) in self.out.items() if deadline <= self.now]:
            del self.out[lease]
            self.ended.append(lease)
        self.part.lapse(self.now)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        alive = [s for s in self.order if s not in self.freed]
        if alive:
            ids = data.draw(st.lists(st.sampled_from(alive), min_size=1, max_size=2, unique=True))
            self.part.drop(ids, "because")
            self.dropped.update(ids)
            for lease, (task, held, deadline) in self.out.items():
                self.out[lease] = (task, [s for s in held if s not in ids], deadline)

    @rule(member=st.integers(0, 2), more=st.integers(0, 2))
    def close_group(self, member: int, more: int) -> None:
        key = f"g{self.next_group + member}"
        if key in self.size:
            return
        size = self.arrived.get(key, 0) + more
        self.part.close_group(key, size + 1, tombstones=1)
        if size:
            self.size[key] = size

    @rule()
    def next_groups(self) -> None:
        self.next_group += 3  # keys are not used again, which keeps the model simple

    @rule()
    def close(self) -> None:
        if len(self.order) > 6:
            self.part.close()

    # -- what must always hold -------------------------------------------------------------------------------

    @invariant()
    def every_sample_is_in_exactly_one_place(self) -> None:
        for name, task in self.part.tasks.items():
            acked, leased = set(task.acked), set(task.leased)
            dropped = set(self.part.dropped) - acked
            pending = set(self.part.samples) - leased - acked
            places: Sequence[set[int]] = (acked, leased, dropped, pending)
            assert sum(map(len, places)) == len(self.order)
            assert set().union(*places) == set(self.order)
            assert acked == self.acked[name]
            assert leased == self.leased(name)
            assert dropped == self.dropped - acked
            assert [len(task.ready), sum(task.unready.values())] == [
                len(self.ready(name)),
                len(self.unready(name)),
            ]
            assert sum(task.held.values()) == len(leased)

    @invariant()
    def payload_goes_when_nobody_needs_it(self) -> None:
        freed = [sample.id for sample in self.part.freed]
        assert len(freed) == len(set(freed))
        self.freed.update(freed)
        done = set.intersection(*self.acked.values())
        assert self.freed == done | self.dropped
        assert set(self.part.samples) == set(self.order) - self.freed

    @invariant()
    def groups_do_not_outlive_their_members(self) -> None:
        for group in self.part.groups.values():
            missing = group.arrived != (group.size if group.size is not None else N)
            assert group.ids or missing


Schedule.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
test_any_interleaving_keeps_the_account = Schedule.TestCase


class Item:
    """Something to order; the queue keeps its own marks in it."""

    def __init__(self, priority: int, order: int, version: int) -> None:
        self.priority, self.order, self.version = priority, order, version
        self.ready = self.queued = 0


class Order(RuleBasedStateMachine):
    """The ready queue against sorting, over enough changes to rebuild its lanes."""

    @initialize()
    def start(self) -> None:
        self.queue: ReadyQueue[Item] = ReadyQueue(4)
        self.inside: dict[Item, None] = {}
        self.outside: list[Item] = []
        self.next = 0

    @rule(items=st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 2)), min_size=1, max_size=60))
    def add(self, items: list[tuple[int, int]]) -> None:
        for priority, version in items:
            self.next += 1
            item = Item(priority, self.next, version)
            self.queue.add(item)
            self.inside[item] = None

    @rule(every=st.integers(1, 4))
    def discard(self, every: int) -> None:
        for item in list(self.inside)[::every]:
            self.queue.discard(item)
            del self.inside[item]
            self.outside.append(item)

    @rule(every=st.integers(1, 4), together=st.booleans())
    def come_back(self, every: int, together: bool) -> None:
        items = self.outside[::every]
        del self.outside[::every]
        if together:
            self.queue.restore(sorted(items, key=lambda item: (item.priority, item.order)))
        else:
            for item in items:
                self.queue.add(item)
        self.inside.update(dict.fromkeys(items))

    @rule(
        count=st.integers(1, 20),
        top=st.none() | st.integers(-2, 2),
        oldest=st.none() | st.integers(0, 2),
        newest_first=st.booleans(),
        limit=st.none() | st.integers(0, 20),
        back=st.booleans(),
    )
    def take(
        self,
        count: int,
        top: int | None,
        oldest: int | None,
        newest_first: bool,
        limit: int | None,
        back: bool,
    ) -> None:
        fits = [
            item
            for item in sorted(
                self.inside,
                key=lambda item: (-item.version if newest_first else 0, item.priority, item.order),
            )
            if (top is None or item.priority <= top) and (oldest is None or item.version >= oldest)
        ]
        asked: list[Item] = []

        def fit(item: Item) -> bool:
            asked.append(item)
            return limit is not None and len(asked) <= limit

        taken = self.queue.take(count, top, oldest, None if limit is None else fit, newest_first)
        assert taken == fits[: count if limit is None else min(limit, count)]
        if back:
            self.queue.restore(taken)
        else:
            for item in taken:
                del self.inside[item]
                self.outside.append(item)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.queue) == len(self.inside)
        assert all(item in self.queue for item in self.inside)
        assert not any(item in self.queue for item in self.outside)
        assert self.queue.newest() == max((item.version for item in self.inside), default=None)
        entries = sum(len(lane.fifo) + len(lane.heap) for lane in self.queue._lanes.values())
        assert entries == self.queue._entries <= 2 * len(self.inside) + 64 + 60


Order.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_the_ready_queue_is_a_sorted_list = Order.TestCase


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted("t", 32),
        Wanted("t", 32, Groups(8)),
        Wanted("t", 32, Freshest(8)),
        Wanted("t", 32, Freshest(), max_staleness=1),
        Wanted("t", 1 << 20, TokenBudget(32, 8)),
        Wanted("t", 16, Groups(8), world_size=2),
        Wanted("t", 32, Balanced(8), world_size=2),
    ],
    ids=lambda wanted: f"{wanted.sampler}-{wanted.world_size}",
)
def test_work_of_a_call_does_not_grow_with_the_samples_there_are(wanted: Wanted) -> None:
    """Counts what a fetch and an ack touch, where a clock would measure the machine."""

    def touched(samples: int) -> int:
        part = Partition("p", {"t": ["x"]}, length_field="x")
        for start in range(0, samples, 8):
            rows = [Row(s, f"g{start}", start % 3, 0, 1, 1) for s in range(start, start + 8)]
            part.put(rows, {"x": SPEC}, {})
        part.view(part.tasks["t"], 8)
        count = 0

        class Counted(dict):
            def __getitem__(self, key: object) -> object:
                nonlocal count
                count += 1
                return super().__getitem__(key)

            def __iter__(self):  # type: ignore[no-untyped-def]
                nonlocal count
                count += len(self)
                return super().__iter__()

            def values(self):  # type: ignore[no-untyped-def]
                nonlocal count
                count += len(self)
                return super().values()

        part.samples, part.groups = Counted(part.samples), Counted(part.groups)
        lease = part.lease(wanted, now=0, seconds=10, owner=1)
        assert lease is not None
        part.ack(lease.id, 1)
        return count

    assert touched(20_000) == touched(400)


def test_a_key_may_be_used_again_once_its_group_is_gone() -> None:
    part = Partition("p", {"t": ["x"]})
    for start in range(0, 9, 3):
        part.put([Row(s, "g", 0, 0, 1) for s in range(start, start + 3)], {"x": SPEC}, {})
        lease = part.lease(Wanted("t", 3, Groups(3)), now=0, seconds=10, owner=1)
        assert lease is not None
        assert list(lease.ids) == list(range(start, start + 3))
        part.ack(lease.id, 1)
    assert part.groups == {}


def test_incomplete_groups_do_not_hold_up_the_end_of_the_stream() -> None:
    part = Partition("p", {"t": ["x"]})
    part.put([Row(s, "g", 0, 0, 1) for s in range(2)], {"x": SPEC}, {})
    part.close()
    with pytest.raises(Closed):
        part.lease(Wanted("t", 3, Groups(3)), now=0, seconds=10, owner=1)
    assert set(part.samples) == {0, 1}


def test_an_extended_lease_lapses_at_its_new_deadline_only() -> None:
    part = Partition("p", {"t": ["x"]})
    part.put([Row(1, None, 0, 0, 1)], {"x": SPEC}, {})
    lease = part.lease(Wanted("t", 1), now=0, seconds=1, owner=1)
    assert lease is not None
    part.extend(lease.id, 10, now=0.5)
    part.lapse(5)
    assert set(part.tasks["t"].leased) == {1}
    assert part.next_lapse() == 10.5
    part.lapse(10.5)
    assert part.leases == {}
    assert part.samples[1] in part.tasks["t"].ready


def test_a_group_that_was_served_in_part_by_another_sampler_is_not_waited_for() -> None:
    part = Partition("p", {"t": ["x"]})
    part.put([Row(s, "g", 0, 0, 1) for s in range(2)], {"x": SPEC}, {})
    part.put([Row(2, "g", 0, 0, 1)], {"y": SPEC}, {})
    lease = part.lease(Wanted("t", 1), now=0, seconds=10, owner=1)
    assert lease is not None
    part.ack(lease.id, 1)
    part.close()
    with pytest.raises(Closed):
        part.lease(Wanted("t", 3, Groups(3)), now=1, seconds=10, owner=2)
    part.update([2], {"x": SPEC}, [1])
    with pytest.raises(Closed):
        part.lease(Wanted("t", 3, Groups(3)), now=1, seconds=10, owner=2)


def test_a_fetch_of_a_field_that_is_not_written_leases_nothing() -> None:
    part = Partition("p", {"t": ["x"]})
    part.put([Row(s, "g", 0, 0, 1) for s in range(2)], {"x": SPEC, "y": SPEC}, {})
    part.put([Row(2, "g", 0, 0, 1)], {"x": SPEC}, {})
    for sampler in (InOrder(), Groups(3)):
        for field, ids in (("y", [2]), ("never", [0, 1, 2])):
            with pytest.raises(FieldNotReady) as error:
                part.lease(Wanted("t", 3, sampler), now=0, seconds=1, owner=1, require=["x", field])
            assert (error.value.field, error.value.ids) == (field, ids)
        assert part.fields_mask(["never"]) is None
        assert part.leases == {}
        lease = part.lease(Wanted("t", 3, sampler), now=0, seconds=1, owner=1, require=["x"])
        assert lease is not None
        assert list(lease.ids) == [0, 1, 2]
        part.nack(lease.id, 0)


def test_lag_is_the_age_of_the_oldest_sample_that_the_task_has_not_acked() -> None:
    part = Partition("p", {"t": ["x"], "u": ["y"]})
    for s in range(300):
        part.put([Row(s, None, 0, -s, 1)], {"x": SPEC}, {}, now=float(s))
    assert part.lag(part.tasks["t"], 300.0) == 300.0
    for _ in range(299):  # the newest first
        lease = part.lease(Wanted("t", 1), now=300, seconds=10, owner=1)
        assert lease is not None
        part.ack(lease.id, 300)
        assert part.lag(part.tasks["t"], 300.0) == 300.0
    part.drop([0], "because")
    assert part.lag(part.tasks["t"], 300.0) is None
    assert part.lag(part.tasks["u"], 300.0) == 299.0
    task = part.tasks["t"]
    assert (part.put_samples_total, part.put_bytes_total, part.dropped_total) == (300, 300, 1)
    assert (task.delivered_total, task.acked_total, task.nacked_total, task.lapsed_total) == (299, 299, 0, 0)


def test_a_sample_costs_less_than_500_bytes() -> None:
    part = Partition("p", {"t": ["x"], "u": ["x", "y"]})
    part.view(part.tasks["t"], 8)
    samples = 20_000
    tracemalloc.start()
    for start in range(10**12, 10**12 + samples, 8):
        part.put(
            [Row(s, f"g{start}", 3, 0, 4096, 512) for s in range(start, start + 8)], {"x": SPEC}, {}, 0.5
        )
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / samples < 500
