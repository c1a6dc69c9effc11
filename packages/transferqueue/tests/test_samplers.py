"""What each sampler takes, and how lengths are balanced and packed."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transferqueue.errors import Closed, FieldNotReady, GroupMismatch, InvalidArgument
from transferqueue.samplers import Balanced, Freshest, Groups, InOrder, Sampler, TokenBudget
from transferqueue.scheduling.packing import bins_needed, pack, split_equally, split_to
from transferqueue.scheduling.partition import Partition, Row, Wanted
from transferqueue.scheduling.samples import Lease
from transferqueue.values.columns import FieldSpec

SPEC = FieldSpec("int32", (), True)


def stocked(
    lengths: Sequence[int] = (),
    *,
    versions: Sequence[int] | int = 0,
    priorities: Sequence[int] | int = 0,
    group: int | None = None,
) -> Partition:
    """A partition of samples 0, 1, ... that task "t" may have, in groups of consecutive ids."""
    part = Partition("p", {"t": ["x"]}, length_field="x")
    rows = [
        Row(
            s,
            None if group is None else f"g{s // group}",
            versions if isinstance(versions, int) else versions[s],
            priorities if isinstance(priorities, int) else priorities[s],
            1,
            length,
        )
        for s, length in enumerate(lengths)
    ]
    part.put(rows, {"x": SPEC}, {})
    return part


def lease(part: Partition, wanted: Wanted, owner: int = 1) -> Lease | None:
    wanted.check()
    return part.lease(wanted, now=0.0, seconds=10, owner=owner)


def served(part: Partition, sampler: Sampler, count: int = 100, **terms: object) -> list[int] | None:
    loan = lease(part, Wanted("t", count, sampler, **terms))  # type: ignore[arg-type]
    return None if loan is None else loan.ids


def test_lower_priorities_go_first_in_every_sampler_but_freshest() -> None:
    for sampler in (InOrder(), TokenBudget(3)):
        part = stocked([1, 1, 1], priorities=[2, 0, 1])
        assert served(part, sampler, 3) == [1, 2, 0]
    assert served(stocked([1] * 4, priorities=[1, 1, 0, 0], group=2), Groups(2), 4) == [2, 3, 0, 1]


def test_freshest_serves_the_newest_version_and_within_it_the_first_put() -> None:
    part = stocked([1] * 6, versions=[0, 2, 1, 2, 0, 1])
    assert served(part, Freshest(), 3) == [1, 3, 2]
    part.put([Row(6, None, 9, 0, 1)], {"x": SPEC}, {})
    assert served(part, Freshest(), 4) == [6, 5, 0, 4]
    assert served(part, Freshest(), 1) is None


def test_freshest_by_groups_goes_by_the_oldest_member() -> None:
    part = stocked([1] * 6, versions=[3, 0, 1, 1, 2, 2], group=2)
    assert served(part, Freshest(2), 4) == [4, 5, 2, 3]


def test_freshest_keeps_to_bounds_on_priority_and_version() -> None:
    part = stocked([1] * 6, versions=[2, 2, 1, 1, 0, 0], priorities=[5, 1, 0, 1, 0, 0])
    assert served(part, Freshest(), 3, max_priority=1, min_version=1) == [1, 2, 3]
    assert served(part, Freshest(), 3, max_priority=1, min_version=1) is None
    assert served(part, Freshest(), 3) == [0, 4, 5]


def test_a_token_budget_takes_what_fits_in_order() -> None:
    part = stocked([4, 3, 3, 1, 9, 1, 1])
    assert served(part, TokenBudget(10)) == [0, 1, 2]  # exactly full
    assert served(part, TokenBudget(8)) == [3]  # the next is longer than the budget, and comes alone
    assert served(part, TokenBudget(8)) == [4]
    assert served(part, TokenBudget(8)) is None  # more may come
    assert served(part, TokenBudget(8), at_least=2) == [5, 6]


def test_a_token_budget_never_takes_more_samples_than_the_batch_size() -> None:
    part = stocked([0] * 5)
    assert served(part, TokenBudget(10), 2) == [0, 1]


def test_a_token_budget_with_groups_takes_whole_ones() -> None:
    part = stocked([2, 2, 2, 2, 2, 2, 9, 9], group=2)
    assert served(part, TokenBudget(11, 2)) == [0, 1, 2, 3]
    assert served(part, TokenBudget(11, 2)) == [4, 5]
    assert served(part, TokenBudget(11, 2)) == [6, 7]


def test_what_a_token_budget_leaves_at_the_end_of_the_stream_is_served() -> None:
    part = stocked([1, 1])
    assert served(part, TokenBudget(8)) is None
    part.close()
    loan = lease(part, Wanted("t", 100, TokenBudget(8)))
    assert loan is not None
    assert (loan.ids, loan.is_last) == ([0, 1], True)
    with pytest.raises(Closed):
        served(part, TokenBudget(8))


def test_lengths_follow_updates() -> None:
    part = stocked([1, 1, 1])
    part.update([1], {"x": SPEC}, [0], [9])
    assert served(part, TokenBudget(9)) == [0]
    part.nack(1, 0.0)
    part.drop([1], "because")
    part.close()
    assert served(part, TokenBudget(9)) == [0, 2]


def test_length_samplers_need_a_length_field() -> None:
    part = Partition("p", {"t": ["x"]})
    for sampler in (TokenBudget(8), Balanced()):
        with pytest.raises(InvalidArgument, match="length_field"):
            served(part, sampler)


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted("t", 0),
        Wanted("t", 4, at_least=5),
        Wanted("t", 5, Groups(2)),
        Wanted("t", 4, Groups(0)),
        Wanted("t", 6, Balanced(n=2), world_size=2),
        Wanted("t", 4, TokenBudget(0)),
        Wanted("t", 4, Balanced(0)),
        Wanted("t", 4, rank=2, world_size=2),
        Wanted("t", 4, member=2, sharers=2),
        Wanted("t", 4, world_size=1 << 40),
        Wanted("t", 4, sharers=1 << 40),
        Wanted("t", 4, key="k" * 600),
        Wanted("t", 4, max_staleness=-1),
        Wanted("t", 4, Groups(4), global_batch=6),
        Wanted("t", 4, Balanced(), global_batch=8),
    ],
)
def test_what_can_never_be_served_is_refused(wanted: Wanted) -> None:
    with pytest.raises(InvalidArgument):
        wanted.check()


def test_a_task_is_not_asked_for_ever_more_group_sizes() -> None:
    part = stocked()
    for n in range(1, 65):
        served(part, Groups(n), n)
    with pytest.raises(InvalidArgument, match="use one"):
        served(part, Groups(65), 65)
    assert served(part, Groups(8), 8) is None


def test_a_view_of_smaller_groups_than_there_are_is_refused() -> None:
    with pytest.raises(GroupMismatch):
        served(stocked([1] * 4, group=4), Groups(2), 2)


# -- staleness -----------------------------------------------------------------------------------------------


def test_staleness_is_measured_at_the_moment_of_serving() -> None:
    part = stocked([1] * 4, versions=[0, 1, 2, 3])
    assert served(part, InOrder(), 1, max_staleness=2) == [1]
    part.advance(5)
    assert served(part, InOrder(), 1, max_staleness=2) == [3]
    part.advance(4)  # the clock never goes back
    assert served(part, InOrder(), 1, max_staleness=2) is None
    assert served(part, InOrder(), 1, max_staleness=3) == [2]
    assert served(part, InOrder(), 1) == [0]


def test_staleness_judges_groups_by_their_oldest_member() -> None:
    part = stocked([1] * 4, versions=[0, 3, 2, 3], group=2)
    assert served(part, Groups(2), 2, max_staleness=1) == [2, 3]


def test_samples_that_are_too_old_do_not_hold_up_the_end_of_the_stream() -> None:
    part = stocked([1] * 3, versions=[0, 0, 5])
    part.put([Row(3, None, 0, 0, 1)], {"y": SPEC}, {})  # never ready, and too old anyway
    part.put([Row(s, "g", 0, 0, 1) for s in (4, 5)], {"x": SPEC}, {})
    part.close()
    assert served(part, InOrder(), 8, max_staleness=1) == [2]
    for sampler in (InOrder(), Freshest(), Groups(2)):
        with pytest.raises(Closed):
            served(part, sampler, 8, max_staleness=1)
    assert served(part, Groups(2), 8) == [4, 5]


# -- samplers of users ---------------------------------------------------------------------------------------


def test_a_choice_is_leased_exactly_or_not_at_all() -> None:
    part = stocked([5, 6, 7], versions=[1, 2, 3], group=3)
    found = part.candidates(Wanted("t", 1), 10, now=3.0, owner=1)
    assert found is not None
    assert [(one.id, one.group, one.version, one.length, one.age) for one in found] == [
        (0, "g0", 1, 5, 3.0), (1, "g0", 2, 6, 3.0), (2, "g0", 3, 7, 3.0),
    ]  # fmt: skip
    loan = part.lease_ids("t", [2, 0], now=0.0, seconds=10, owner=1)
    assert loan is not None
    assert loan.ids == [2, 0]
    assert part.lease_ids("t", [1, 0], now=0.0, seconds=10, owner=1) is None
    assert part.lease_ids("t", [1, 77], now=0.0, seconds=10, owner=1) is None
    assert set(part.tasks["t"].leased) == {0, 2}
    with pytest.raises(FieldNotReady):
        part.lease_ids("t", [1], now=0.0, seconds=10, owner=1, require=["y"])
    for wrong in ([1, 1], []):
        with pytest.raises(InvalidArgument):
            part.lease_ids("t", wrong, now=0.0, seconds=10, owner=1)


def test_candidates_wait_and_end_as_a_fetch_does() -> None:
    part = stocked([1, 1], priorities=[0, 5])
    assert part.candidates(Wanted("t", 3), 10, now=0.0, owner=1) is None
    assert part.candidates(Wanted("t", 2, max_priority=1), 10, now=0.0, owner=1) is None
    found = part.candidates(Wanted("t", 1, max_priority=1), 10, now=0.0, owner=1)
    assert found is not None
    assert [one.id for one in found] == [0]
    part.close()
    found = part.candidates(Wanted("t", 3), 1, now=0.0, owner=1)
    assert found is not None
    assert [one.id for one in found] == [0]
    part.ack(part.lease_ids("t", [0, 1], now=0.0, seconds=10, owner=1).id, 0.0)  # type: ignore[union-attr]
    with pytest.raises(Closed):
        part.candidates(Wanted("t", 1), 10, now=0.0, owner=1)


# -- admission -----------------------------------------------------------------------------------------------


def test_admission_counts_what_is_there_and_what_is_promised() -> None:
    part = Partition("p", {"t": ["x"]}, max_samples=4)

    def admit(samples: int, owner: int = 1, seconds: float = 10) -> int | None:
        ticket = part.admit(0, samples, now=0.0, seconds=seconds, owner=owner)
        return None if ticket is None else ticket.id

    part.put([Row(0, None, 0, 0, 1)], {"x": SPEC}, {})
    first = admit(2)
    assert first is not None
    assert admit(2) is None
    assert part.fits(1)
    assert not part.fits(2)
    assert part.fits(3, first)
    part.put([Row(1, None, 0, 0, 1)], {"x": SPEC}, {}, 0.0, first)
    assert part.admission.promised == 1
    assert not part.fits(2)  # redeeming moved room, and made none
    assert part.fits(2, first)
    second = admit(1, owner=2, seconds=5)
    assert second is not None
    assert admit(1) is None
    part.room_made = False
    assert part.next_lapse() == 5
    part.lapse(5.0)
    assert part.room_made
    assert admit(1, owner=3) is not None
    part.release(3)
    part.unpromise(first)
    part.unpromise(first)  # a ticket that has ended stays so
    assert part.admission.promised == 0
    part.put([Row(2, None, 0, 0, 1)], {"x": SPEC}, {}, 0.0, first)  # as does its put
    assert part.fits(1)
    loan = lease(part, Wanted("t", 1))
    assert loan is not None
    part.ack(loan.id, 0.0)
    assert admit(2) is not None


def test_admission_refuses_what_can_never_be_granted() -> None:
    part = Partition("p", {"t": ["x"]}, max_samples=4, max_staleness=1)
    with pytest.raises(InvalidArgument, match="at most 4"):
        part.admit(0, 5, now=0.0, seconds=1, owner=1)
    assert part.admit(0, 1, now=0.0, seconds=1, owner=1) is not None  # no version was heard of yet
    part.advance(3)
    assert part.admit(2, 1, now=0.0, seconds=1, owner=1) is not None
    with pytest.raises(InvalidArgument, match="2 behind the clock"):
        part.admit(1, 1, now=0.0, seconds=1, owner=1)
    part.close()
    with pytest.raises(Closed):
        part.admit(3, 1, now=0.0, seconds=1, owner=1)


# -- packing -------------------------------------------------------------------------------------------------

lengths_of = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@given(lengths_of, st.integers(1, 8))
def test_an_equal_split_gives_each_rank_the_same_number(lengths: list[int], ranks: int) -> None:
    parts = split_equally(lengths, ranks)
    assert sorted(unit for part in parts for unit in part) == list(range(len(lengths)))
    counts = {len(part) for part in parts}
    assert max(counts) - min(counts) <= (1 if len(lengths) % ranks else 0)
    spread = [sum(lengths[unit] for unit in part) for part in parts]
    assert max(spread) - min(spread) <= max(lengths)  # as any greedy split keeps


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=8, max_size=8))
def test_an_equal_split_in_two_is_close_to_the_best_there_is(lengths: list[int]) -> None:
    whole = sum(lengths)
    best = min(
        abs(whole - 2 * sum(lengths[unit] for unit in half)) for half in itertools.combinations(range(8), 4)
    )
    parts = split_equally(lengths, 2)
    sums = [sum(lengths[unit] for unit in part) for part in parts]
    gap = abs(sums[0] - sums[1])
    assert best <= gap <= max(best + 6, whole / 6)
    for one, other in itertools.product(*parts):  # no exchange of two would help
        assert abs(sums[0] - sums[1] - 2 * (lengths[one] - lengths[other])) >= gap


def test_one_long_unit_is_balanced_by_the_others() -> None:
    lengths = [1, 1, 1, 1, 4, 4, 4, 10]
    assert [sum(lengths[unit] for unit in part) for part in split_equally(lengths, 2)] == [13, 13]


def test_an_equal_split_of_a_real_batch_is_balanced_within_a_hundredth() -> None:
    rng = random.Random(0)
    lengths = [min(8192, int(rng.lognormvariate(6.5, 0.9))) for _ in range(512)]
    sums = [sum(lengths[unit] for unit in part) for part in split_equally(lengths, 8)]
    dealt = [sum(lengths[rank::8]) for rank in range(8)]
    assert max(sums) - min(sums) < sum(lengths) / 8 / 100
    assert max(dealt) - min(dealt) > sum(lengths) / 8 / 20  # where dealing them out is not


@given(lengths_of, st.integers(1, 60), st.integers(0, 4))
def test_packing_keeps_to_the_budget_in_exactly_as_many_bins_as_asked_for(
    lengths: list[int], budget: int, more: int
) -> None:
    bins = bins_needed(lengths, budget) + more
    packed = pack(lengths, budget, bins)
    assert len(packed) == bins
    assert sorted(unit for units in packed for unit in units) == list(range(len(lengths)))
    assert all(len(units) == 1 or sum(lengths[unit] for unit in units) <= budget for units in packed if units)
    assert sum(map(bool, packed)) == min(bins, len(lengths)) or any(len(units) <= 1 for units in packed)
    if not all(packed):
        assert all(len(units) <= 1 for units in packed)  # a bin is empty only where no other could be split
    halves = split_to([list(range(len(lengths)))], lengths, 3)
    assert len(halves) == 3
    assert sum(map(bool, halves)) == min(3, len(lengths))


@given(lengths_of, st.integers(1, 60))
def test_packing_needs_few_bins(lengths: list[int], budget: int) -> None:
    fitting = [length for length in lengths if length <= budget]
    alone = len(lengths) - len(fitting)
    least = -(-sum(fitting) // budget)
    assert alone + least <= bins_needed(lengths, budget) <= alone + 2 * least + 1
