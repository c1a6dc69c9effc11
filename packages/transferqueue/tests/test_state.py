"""What is dumped, or repeated from its events, is the same partition: by any interleaving of everything."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transferqueue.errors import InvalidArgument, QueueError
from transferqueue.samplers import Balanced, Freshest, Groups, InOrder, Sampler, TokenBudget
from transferqueue.scheduling.events import Event
from transferqueue.scheduling.partition import Partition, Row, Wanted
from transferqueue.scheduling.replay import apply
from transferqueue.scheduling.samples import Lease
from transferqueue.scheduling.state import PartitionState
from transferqueue.values.columns import FieldSpec

SPEC = FieldSpec("int32", (), True)
N = 2
TASKS = {"a": ["x"], "b": ["x", "y"]}
SAMPLERS: list[Sampler] = [
    InOrder(), Groups(N), Freshest(), Freshest(N), TokenBudget(6), TokenBudget(6, N),
    Balanced(), Balanced(6, N),
]  # fmt: skip

encode_event = msgspec.msgpack.Encoder().encode
decode_event = msgspec.msgpack.Decoder(Event).decode
encode_state = msgspec.msgpack.Encoder().encode
decode_state = msgspec.msgpack.Decoder(PartitionState).decode


def made() -> Partition:
    return Partition("p", TASKS, length_field="x", max_samples=40, max_staleness=2)


def outcome(call: Callable[[Partition], Any], part: Partition) -> Any:
    try:
        result = call(part)
    except QueueError as error:
        return type(error), str(error)
    if isinstance(result, Lease):
        return (
            result.id,
            result.ids,
            [s.length for s in result.samples],
            result.is_last,
            result.dummy,
            result.seat,
        )
    return result


class Twins(RuleBasedStateMachine):
    """Three partitions: one that lives, one that was loaded from its dump, one that repeats its events."""

    @initialize()
    def start(self) -> None:
        self.part, self.twin, self.shadow = made(), made(), made()
        self.now = 0.0
        self.part.recorder = lambda event: apply(self.shadow, decode_event(encode_event(event)), self.now)
        self.next_id = 1
        self.loans: list[Lease] = []

    def both(self, call: Callable[[Partition], Any]) -> Any:
        mine = outcome(call, self.part)
        other = outcome(call, self.twin)
        assert mine == other
        return mine

    @rule()
    def load(self) -> None:
        self.part.freed.clear()
        self.twin = Partition.load(decode_state(encode_state(self.part.dump(self.now))), self.now)

    @rule(
        count=st.integers(1, 4),
        groups=st.booleans(),
        fields=st.sampled_from([["x"], ["x", "y"], ["y"]]),
        version=st.integers(0, 3),
        priority=st.lists(st.integers(0, 2), min_size=4, max_size=4),
        length=st.lists(st.integers(0, 7), min_size=4, max_size=4),
        ticket=st.none() | st.integers(1, 4),
        size=st.none() | st.integers(1, 4),
    )
    def put(
        self,
        count: int,
        groups: bool,
        fields: list[str],
        version: int,
        priority: list[int],
        length: list[int],
        ticket: int | None,
        size: int | None,
    ) -> None:
        first = self.next_id
        self.next_id += count
        keys = [f"g{(first + at) // N}" if groups else None for at in range(count)]
        sizes = {} if size is None or keys[0] is None else {keys[0]: size}

        def call(part: Partition) -> list[int]:
            rows = [
                Row(first + at, keys[at], version, priority[at], 5, length[at], [at]) for at in range(count)
            ]
            return [s.id for s in part.put(rows, dict.fromkeys(fields, SPEC), sizes, self.now, ticket)]

        self.both(call)

    @rule(data=st.data(), field=st.sampled_from("xy"), length=st.none() | st.integers(0, 7))
    def update(self, data: st.DataObject, field: str, length: int | None) -> None:
        if self.part.samples:
            ids = data.draw(st.lists(st.sampled_from(list(self.part.samples)), max_size=3, unique=True))
            lengths = None if length is None else [length] * len(ids)
            places = [["more"]] * len(ids)
            self.both(
                lambda part: [s.id for s in part.update(ids, {field: SPEC}, [1] * len(ids), lengths, places)]
            )

    @rule(
        task=st.sampled_from(list(TASKS)),
        count=st.integers(1, 2),
        sampler=st.sampled_from(SAMPLERS),
        bounds=st.tuples(*[st.none() | st.integers(0, 3)] * 3),
        partial=st.booleans(),
        rank=st.integers(0, 1),
        world_size=st.integers(1, 2),
        key=st.none() | st.sampled_from("kl"),
        sharers=st.integers(1, 2),
        global_batch=st.none() | st.just(2 * N),
        seconds=st.integers(1, 8),
        owner=st.integers(1, 4),
        require=st.sampled_from([(), ("y",)]),
    )
    def fetch(self, seconds: int, owner: int, require: tuple[str, ...], bounds: tuple, **terms: Any) -> None:
        terms["rank"] %= terms["world_size"]
        terms["count"] *= N * terms["world_size"]
        if isinstance(terms["sampler"], Balanced):
            terms["global_batch"] = None
        top, oldest, staleness = bounds
        wanted = Wanted(**terms, max_priority=top, min_version=oldest, max_staleness=staleness)
        wanted.check()
        loans: list[Lease] = []

        def call(part: Partition) -> Lease | None:
            loan = part.lease(wanted, now=self.now, seconds=seconds, owner=owner, require=require)
            if loan is not None:
                loans.append(loan)
            return loan

        self.both(call)
        self.loans.extend(loans[:1])

    @rule(task=st.sampled_from(list(TASKS)), count=st.integers(1, 3), owner=st.integers(1, 4))
    def choose(self, task: str, count: int, owner: int) -> None:
        wanted = Wanted(task, count, at_least=1)
        found = self.both(lambda part: part.candidates(wanted, 5, now=self.now, owner=owner))
        if isinstance(found, list):
            ids = [one.id for one in found][::-1][:count]
            self.both(lambda part: part.lease_ids(task, ids, now=self.now, seconds=5, owner=owner))

    @precondition(lambda self: self.loans)
    @rule(data=st.data(), what=st.sampled_from(["ack", "nack", "extend", "take_back"]))
    def end(self, data: st.DataObject, what: str) -> None:
        loan = data.draw(st.sampled_from(self.loans))
        if what == "take_back":
            self.both(lambda part: part.take_back(loan, self.now))
        elif what == "extend":
            self.both(lambda part: part.extend(loan.id, 4, self.now))
        else:
            self.both(lambda part: getattr(part, what)(loan.id, self.now))

    @rule(seconds=st.integers(0, 12))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds / 2
        self.both(lambda part: part.lapse(self.now))
        self.both(lambda part: part.next_lapse())

    @rule(owner=st.integers(1, 4))
    def leave(self, owner: int) -> None:
        self.both(lambda part: part.release(owner))

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.part.samples:
            ids = data.draw(st.lists(st.sampled_from(list(self.part.samples)), min_size=1, max_size=2))
            self.both(lambda part: part.drop(ids, "because"))

    @rule(key=st.integers(0, 20), size=st.integers(0, 4))
    def close_group(self, key: int, size: int) -> None:
        self.both(lambda part: part.close_group(f"g{key}", size, 0))

    @rule(version=st.integers(0, 5))
    def advance(self, version: int) -> None:
        self.both(lambda part: part.advance(version))

    @rule(
        version=st.integers(0, 5),
        samples=st.integers(1, 20),
        seconds=st.integers(1, 9),
        owner=st.integers(1, 4),
    )
    def admit(self, version: int, samples: int, seconds: int, owner: int) -> None:
        def call(part: Partition) -> Any:
            ticket = part.admit(version, samples, now=self.now, seconds=seconds, owner=owner)
            return ticket and (ticket.id, ticket.samples, ticket.deadline)

        self.both(call)
        self.both(lambda part: part.fits(samples, 1))

    @precondition(lambda self: self.next_id > 12)
    @rule()
    def close(self) -> None:
        self.both(lambda part: part.close())

    @invariant()
    def all_three_are_the_same(self) -> None:
        self.part.freed.clear()
        self.shadow.freed.clear()
        self.twin.freed.clear()
        state = self.part.dump(self.now)
        assert self.twin.dump(self.now) == state
        assert self.shadow.dump(self.now) == state
        for task in TASKS:
            ages = {part.lag(part.tasks[task], self.now) for part in (self.part, self.twin, self.shadow)}
            assert len(ages) == 1


Twins.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_dumped_and_repeated_partitions_are_the_same = Twins.TestCase


class DeepTwins(Twins):
    pass


DeepTwins.TestCase.settings = settings(max_examples=600, stateful_step_count=60, deadline=None)
test_dumped_and_repeated_partitions_are_the_same_in_depth = pytest.mark.timeout(900)(
    pytest.mark.slow(DeepTwins.TestCase)
)


def test_a_dump_moves_with_the_clock_and_knows_its_format() -> None:
    part = made()
    part.put([Row(1, None, 0, 0, 5)], {"x": SPEC}, {}, now=100.0)
    loan = part.lease(Wanted("a", 1), now=100.0, seconds=10, owner=1)
    assert loan is not None
    later = Partition.load(part.dump(104.0), 1000.0)
    assert later.next_lapse() == 1006.0
    assert later.lag(later.tasks["a"], 1000.0) == 4.0
    with pytest.raises(InvalidArgument, match="format 99"):
        Partition.load(msgspec.structs.replace(part.dump(104.0), format=99), 0.0)
