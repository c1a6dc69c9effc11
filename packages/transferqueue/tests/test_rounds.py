"""Rounds: every rank gets the same number of micro-batches, whatever happens on the way."""

from typing import Any

import pytest
from transferqueue.errors import Closed, FieldNotReady, InvalidArgument, StaleLease
from transferqueue.samplers import Balanced, Freshest, InOrder, Sampler, TokenBudget
from transferqueue.scheduling.partition import Partition, Row, Wanted
from transferqueue.scheduling.samples import Lease
from transferqueue.values.columns import FieldSpec

SPEC = FieldSpec("int32", (), True)


class Store:
    """A partition, its clock, and clients that are ranks: client = rank + 1 unless said otherwise."""

    def __init__(self, samples: int = 0, group: int | None = None, length: int = 1) -> None:
        self.part = Partition("p", {"t": ["x"]}, length_field="x")
        self.now = 0.0
        self.put(samples, group, length)

    def put(self, samples: int, group: int | None = None, length: int = 1, version: int = 0) -> None:
        first = self.part.orders
        keys = [None if group is None else f"g{s // group}" for s in range(first, first + samples)]
        rows = [Row(first + at, key, version, 0, 1, length) for at, key in enumerate(keys)]
        self.part.put(rows, {"x": SPEC}, {})

    def ask(
        self, rank: int, count: int, sampler: Sampler | None = None, *, owner: int | None = None, **terms: Any
    ) -> Lease | None:
        terms.setdefault("world_size", 2)
        wanted = Wanted("t", count, sampler or InOrder(), rank=rank, **terms)
        wanted.check()
        return self.part.lease(wanted, now=self.now, seconds=10, owner=rank + 1 if owner is None else owner)

    def get(self, rank: int, count: int, sampler: Sampler | None = None, **terms: Any) -> Lease:
        loan = self.ask(rank, count, sampler, **terms)
        assert loan is not None
        return loan

    def ack(self, loan: Lease) -> None:
        self.part.ack(loan.id, self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.part.lapse(self.now)


def test_a_round_is_planned_for_all_ranks_or_not_at_all() -> None:
    store = Store(3)
    assert store.ask(0, 2) is None
    store.put(1)
    assert store.get(1, 2).ids == [2, 3]
    assert store.get(0, 2).ids == [0, 1]
    assert store.ask(0, 2) is None


def test_planning_wakes_the_other_ranks() -> None:
    store = Store(4)
    store.part.woken.clear()
    store.get(1, 2)
    assert store.part.woken == {"t"}


def test_the_kth_request_of_a_rank_is_round_k() -> None:
    store = Store(8)
    assert [store.get(0, 2).ids for _ in range(2)] == [[0, 1], [4, 5]]
    assert [store.get(1, 2).ids for _ in range(2)] == [[2, 3], [6, 7]]


def test_keys_name_sequences_of_their_own() -> None:
    store = Store(8)
    assert store.get(0, 2, key="step-1").ids == [0, 1]
    assert store.get(1, 2, key="step-2").ids == [6, 7]
    assert store.get(1, 2, key="step-1").ids == [2, 3]
    assert store.get(0, 2, key="step-2").ids == [4, 5]


def test_ranks_that_ask_differently_are_told() -> None:
    store = Store(8)
    store.get(0, 2)
    for terms in ({"count": 4}, {"count": 2, "world_size": 4}, {"count": 2, "sampler": Freshest()}):
        with pytest.raises(InvalidArgument, match="another key"):
            store.ask(1, **terms)  # type: ignore[arg-type]


def test_terms_may_change_between_rounds_for_all_ranks_alike() -> None:
    store = Store(8)
    for rank in (0, 1):
        store.get(rank, 1)
    assert [store.get(rank, 2).ids for rank in (1, 0)] == [[4, 5], [2, 3]]
    assert store.ask(0, 4, Freshest()) is None
    store.get(1, 1)
    with pytest.raises(InvalidArgument, match="another key"):
        store.get(0, 4, Freshest())


def test_at_the_end_what_is_left_is_spread_and_who_gets_nothing_gets_a_copy() -> None:
    store = Store(3)
    store.part.close()
    loans = [store.get(rank, 2, world_size=4) for rank in range(4)]
    assert [loan.ids for loan in loans] == [[0], [1], [2], [0]]
    assert [loan.dummy for loan in loans] == [False, False, False, True]
    assert all(loan.is_last for loan in loans)
    assert loans[3].id == 0  # no lease: there is nothing to ack
    for rank in range(4):
        with pytest.raises(Closed):
            store.ask(rank, 2, world_size=4)


def test_what_a_dummy_copies_stays_readable_until_its_rank_has_it() -> None:
    store = Store(1)
    store.part.close()
    store.ack(store.get(0, 1))
    assert store.part.samples == {}
    assert store.part.freed == []
    dummy = store.get(1, 1)
    assert (dummy.ids, dummy.dummy) == ([0], True)
    assert [sample.id for sample in store.part.freed] == [0]


def test_the_end_of_the_stream_falls_on_the_same_round_for_all() -> None:
    store = Store(2)
    store.part.close()
    first, second = store.get(0, 1), store.get(1, 1)
    store.ack(first)
    with pytest.raises(Closed):
        store.ask(0, 1)  # does not wait for rank 1, which may wait for it
    store.part.nack(second.id, 0)
    with pytest.raises(Closed):
        store.ask(1, 1)
    assert store.get(1, 1).dummy  # a new sequence, after both were told
    assert store.get(0, 1).ids == [1]


def test_the_end_waits_for_leases_of_clients_outside_the_rounds() -> None:
    store = Store(3)
    outsider = store.part.lease(Wanted("t", 1), now=0, seconds=10, owner=9)
    assert outsider is not None
    store.part.close()
    for rank in (0, 1):
        store.get(rank, 1)
    assert store.ask(0, 1) is None
    store.part.nack(outsider.id, 0)
    assert (store.get(0, 1).ids, store.get(1, 1).dummy) == ([0], True)


def test_what_comes_back_goes_into_a_later_round() -> None:
    store = Store(4)
    store.part.nack(store.get(0, 2).id, 0)
    store.get(1, 2)
    store.put(2)
    assert store.get(0, 2).ids == [0, 1]
    assert store.get(1, 2).ids == [4, 5]
    store.pass_time(10)  # round 1 lapses, whole
    assert store.get(1, 2).ids == [2, 3]
    assert store.get(0, 2).ids == [0, 1]


def test_a_part_that_nobody_asks_for_in_time_goes_back_and_its_rank_gets_a_copy() -> None:
    store = Store(4)
    store.get(0, 2)
    store.pass_time(9)
    assert store.part.next_lapse() == 10
    store.pass_time(1)
    assert len(store.part.tasks["t"].ready) == 4
    late = store.get(1, 2)
    assert (late.ids, late.dummy) == ([2], True)
    assert store.get(1, 2).ids == [2, 3]
    assert store.get(0, 2).ids == [0, 1]


def test_a_sequence_in_use_keeps_what_it_has_planned() -> None:
    store = Store(8)
    plan = [store.get(0, 8, Balanced(1)) for _ in range(4)]
    for loan in plan:
        store.part.extend(loan.id, 100, store.now)
    for _ in range(3):
        store.pass_time(6)
        assert not store.get(1, 8, Balanced(1)).dummy


def test_a_part_whose_samples_were_dropped_becomes_a_copy_or_gets_smaller() -> None:
    store = Store(4)
    store.get(0, 2)
    store.part.drop([2], "because")
    assert store.get(1, 2).ids == [3]
    store.put(4)
    store.get(0, 2)
    store.part.drop([6, 7], "because")
    loan = store.get(1, 2)
    assert (loan.ids, loan.dummy, loan.id) == ([6], True, 0)
    assert sorted(sample.id for sample in store.part.freed) == [2, 6, 7]


def test_a_global_batch_ends_on_its_last_sample() -> None:
    store = Store(12)
    rounds = [[store.get(rank, 2, global_batch=6) for rank in range(2)] for _ in range(4)]
    assert [[loan.ids for loan in loans] for loans in rounds] == [
        [[0, 1], [2, 3]], [[4], [5]], [[6, 7], [8, 9]], [[10], [11]],
    ]  # fmt: skip
    assert [loans[0].is_last for loans in rounds] == [False, True, False, True]


def test_a_global_batch_streams_micro_batches_by_tokens() -> None:
    store = Store(5, length=3)
    first = [store.get(rank, 8, TokenBudget(7), global_batch=8) for rank in range(2)]
    assert [loan.ids for loan in first] == [[0, 1], [2, 3]]
    assert store.ask(0, 8, TokenBudget(7), global_batch=8) is None
    store.put(4, length=3)
    second = [store.get(rank, 8, TokenBudget(7), global_batch=8) for rank in range(2)]
    assert [loan.ids for loan in second] == [[4, 5], [6, 7]]
    assert [loan.is_last for loan in first + second] == [False, False, True, True]
    assert store.ask(0, 8, TokenBudget(7), global_batch=8) is None  # the next global batch has one of eight


def test_rounds_by_tokens_are_spread_where_the_stream_ends() -> None:
    store = Store(3, length=1)
    store.part.close()
    loans = [store.get(rank, 8, TokenBudget(100)) for rank in range(2)]
    assert sorted(s for loan in loans for s in loan.ids) == [0, 1, 2]
    assert not any(loan.dummy for loan in loans)


def test_a_balanced_batch_gives_ranks_equal_numbers_and_equally_many_micro_batches() -> None:
    store = Store()
    lengths = [9, 1, 2, 8, 7, 3, 4, 6, 5, 5, 1, 1]
    store.part.put([Row(s, None, 0, 0, 1, n) for s, n in enumerate(lengths)], {"x": SPEC}, {})
    sampler = Balanced(10)
    got: list[list[Lease]] = [[], []]
    for rank in (0, 1):
        while not got[rank] or not got[rank][-1].is_last:
            got[rank].append(store.get(rank, 12, sampler))
    assert len(got[0]) == len(got[1])
    assert [sum(len(loan.ids) for loan in loans) for loans in got] == [6, 6]
    totals = [sum(sum(lengths[s] for s in loan.ids) for loan in loans) for loans in got]
    assert totals == [26, 26]
    assert all(sum(lengths[s] for s in loan.ids) <= 10 for loans in got for loan in loans)
    assert sorted(s for loans in got for loan in loans for s in loan.ids) == list(range(12))


def test_a_balanced_batch_keeps_groups_on_one_rank() -> None:
    store = Store(16, group=4, length=2)
    got = [[store.get(rank, 16, Balanced(5, 4)) for _ in range(4)] for rank in (0, 1)]
    assert [loan.is_last for loan in got[0]] == [False] * 3 + [True]
    groups = [{s // 4 for loan in loans for s in loan.ids} for loans in got]
    assert not groups[0] & groups[1]
    assert all(len(loan.ids) == 2 for loans in got for loan in loans)


def test_sharers_get_the_same_samples_which_are_done_when_all_have_acked() -> None:
    store = Store(2)
    loans = [store.get(0, 2, world_size=1, sharers=3, key="k", owner=owner) for owner in (1, 2, 3)]
    assert [loan.ids for loan in loans] == [[0, 1]] * 3
    assert len({loan.id for loan in loans}) == 3
    for loan in loans:
        assert len(store.part.tasks["t"].acked) == 0
        store.ack(loan)
        with pytest.raises(StaleLease):
            store.ack(loan)
    assert len(store.part.tasks["t"].acked) == 2
    assert store.part.samples == {}


def test_sharers_of_one_client_say_which_they_are() -> None:
    store = Store(4)
    loans = [store.get(0, 2, world_size=1, sharers=2, member=m, owner=1) for m in (0, 1, 0)]
    assert [loan.ids for loan in loans] == [[0, 1], [0, 1], [2, 3]]
    store.put(2)
    for owner in (1, 2):
        store.get(0, 1, world_size=1, sharers=2, owner=owner, key="other")
    with pytest.raises(InvalidArgument, match="member="):
        store.get(0, 1, world_size=1, sharers=2, owner=3, key="other")


@pytest.mark.parametrize("how", ["nack", "lapse", "leave"])
def test_a_sharer_that_gives_up_fences_the_others(how: str) -> None:
    store = Store(2)

    def ask(owner: int) -> Lease:
        return store.get(0, 2, world_size=1, sharers=3, key="k", owner=owner)

    first, second = ask(1), ask(2)
    if how == "nack":
        store.part.nack(first.id, 0)
    elif how == "lapse":
        store.pass_time(10)
    else:
        store.part.release(1)
    assert len(store.part.tasks["t"].ready) == 2
    with pytest.raises(StaleLease):
        store.ack(second)
    if how != "leave":
        with pytest.raises(StaleLease):
            ask(3)  # the third had not asked yet
    loans = [ask(owner) for owner in (4 if how == "leave" else 1, 2, 3)]
    assert [loan.ids for loan in loans] == [[0, 1]] * 3
    for loan in loans:
        store.ack(loan)
    assert store.part.samples == {}


def test_sharers_all_see_a_sample_that_is_dropped_in_between() -> None:
    store = Store(2)
    store.get(0, 2, world_size=1, sharers=2, owner=1)
    store.part.drop([0], "because")
    assert store.part.freed == []
    assert store.get(0, 2, world_size=1, sharers=2, owner=2).ids == [0, 1]
    assert [sample.id for sample in store.part.freed] == [0]


def test_who_leaves_ends_the_sequence_after_the_rounds_he_got() -> None:
    store = Store(12)
    assert [store.get(0, 2, world_size=3).ids for _ in range(2)] == [[0, 1], [6, 7]]
    assert store.get(1, 2, world_size=3).ids == [2, 3]
    store.part.release(2)  # rank 1, with its lease
    assert store.get(2, 2, world_size=3).ids == [4, 5]  # round 0, as the others had
    store.put(2)
    ids = [store.get(rank, 2, world_size=3, owner=10 + rank).ids for rank in (0, 2, 1)]
    assert ids == [[2, 3], [10, 11], [8, 9]]  # a new sequence from what was returned; rank 0 keeps 6 and 7


def test_a_job_that_starts_again_begins_from_round_0() -> None:
    store = Store(8)
    for rank in (0, 0, 1):
        store.get(rank, 1)
    store.part.release(1)
    store.part.release(2)
    assert store.part.rounds.series == {}
    assert [store.get(rank, 4, owner=7 + rank).ids for rank in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_part_that_did_not_arrive_is_handed_out_again() -> None:
    store = Store(4)
    lost = store.get(0, 1)
    store.part.take_back(lost, 0)
    assert lost.id not in store.part.leases
    assert store.part.tasks["t"].delivered_total == 0
    again, other = store.get(0, 1), store.get(1, 1)
    assert (again.ids, other.ids) == ([0], [1])
    store.part.take_back(other, 0)  # the last of its round
    assert store.get(0, 1).ids == [2]
    assert store.get(1, 1).ids == [1]
    store.ack(again)
    direct = store.part.lease(Wanted("t", 1), now=0, seconds=1, owner=9)
    assert direct is None


def test_a_sharer_that_missed_what_is_gone_is_told_so() -> None:
    store = Store(2)
    loans = [store.get(0, 2, world_size=1, sharers=2, owner=owner) for owner in (1, 2)]
    store.part.drop([0], "because")
    store.part.take_back(loans[1], 0)  # it can not get sample 0 any more
    with pytest.raises(StaleLease):
        store.ack(loans[0])
    with pytest.raises(StaleLease):
        store.get(0, 2, world_size=1, sharers=2, owner=2)
    assert store.part.samples[1] in store.part.tasks["t"].ready


def test_a_loan_that_can_not_be_handed_out_again_returns() -> None:
    store = Store(4)
    first = store.get(0, 1)
    store.get(0, 1)
    store.part.take_back(first, 0)  # the rank has gone on
    assert store.part.samples[0] in store.part.tasks["t"].ready
    plain = store.part.lease(Wanted("t", 1), now=0, seconds=1, owner=9)
    assert plain is not None
    store.part.take_back(plain, 0)
    store.part.take_back(plain, 0)
    assert store.part.samples[0] in store.part.tasks["t"].ready


def test_required_fields_are_checked_before_anything_is_planned() -> None:
    store = Store(4)
    with pytest.raises(FieldNotReady):
        store.part.lease(Wanted("t", 2, world_size=2), now=0, seconds=1, owner=1, require=["y"])
    assert store.part.rounds.series == {}
    assert len(store.part.tasks["t"].ready) == 4
    store.get(0, 2)
    with pytest.raises(FieldNotReady):
        store.part.lease(Wanted("t", 2, world_size=2, rank=1), now=0, seconds=1, owner=2, require=["y"])
    assert store.get(1, 2).ids == [2, 3]


def test_a_key_for_every_step_costs_nothing_in_the_end() -> None:
    store = Store()
    for step in range(1000):
        store.put(2)
        store.now += 1
        for rank in range(2):
            store.ack(store.get(rank, 2, Balanced(), key=f"step-{step}"))
    assert len(store.part.rounds.series) < 100


def test_sequences_that_nobody_finishes_are_limited() -> None:
    store = Store(4096)

    def begin_many() -> None:
        for step in range(2000):
            store.get(0, 1, key=f"step-{step}")

    with pytest.raises(InvalidArgument, match="every rank"):
        begin_many()
    store.pass_time(10)
    assert store.get(0, 1, key="one more").ids == [0]
