"""Samplers called by hand, as a catalog calls them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transferqueue.compat.transfer_queue import (
    BaseSampler,
    GRPOGroupNSampler,
    InvalidRequest,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from transferqueue.compat.transfer_queue.balance import get_seqlen_balanced_partitions
from transferqueue.compat.transfer_queue.sampler import made


class Tagged:
    """A partition as samplers see it, whose samples were put in the order of their indexes."""

    def __init__(self, lengths: dict[int, int], first: int = 0) -> None:
        self._lengths, self._first = lengths, first

    def get_custom_meta(self, indexes):
        return {at: {"total_lengths": self._lengths[at]} for at in indexes}

    def ordinal(self, index: int) -> int:
        return index - self._first


def test_the_base_is_abstract():
    with pytest.raises(TypeError):
        BaseSampler()  # type: ignore[abstract]


def test_sequential_takes_the_first_and_consumes_them():
    assert SequentialSampler()([5, 7, 9], 2) == ([5, 7], [5, 7])
    assert SequentialSampler()([5], 2, anything="else") == ([5], [5])
    assert SequentialSampler()([], 2) == ([], [])


def test_groups_by_hand_are_runs_of_consecutive_indexes():
    sampler = GRPOGroupNSampler(n_samples_per_prompt=3)
    assert sampler.sample([0, 1, 3, 4, 6, 7], 6) == ([], [])
    chosen = [3, 4, 5, 9, 10, 11]
    assert sampler.sample([11, 0, 1, 3, 4, 5, 6, 7, 9, 10], 6) == (chosen, chosen)


def test_groups_of_a_partition_are_never_mixed():
    """Samples 1, 2 of prompt 0 and 3 of prompt 1 are consecutive, and no group."""
    partition = Tagged({}, first=10)
    sampler = GRPOGroupNSampler(n_samples_per_prompt=3)
    assert sampler.sample([11, 12, 13], 3, partition=partition) == ([], [])
    assert sampler.sample([11, 12, 13, 14, 15], 3, partition=partition)[0] == [13, 14, 15]


def test_group_sizes_must_divide_the_batch():
    with pytest.raises(ValueError, match="no multiple"):
        GRPOGroupNSampler(4).sample([0, 1, 2, 3], 6)
    with pytest.raises(ValueError, match="positive"):
        GRPOGroupNSampler(0)


def test_processes_of_a_rank_get_the_same_batch_and_other_ranks_others():
    sampler = RankAwareSampler()

    def ask(ready, rank, index, task="train"):
        return sampler(ready, 2, dp_rank=rank, batch_index=index, task_name=task, partition_id="p")[0]

    assert ask([0, 1, 2, 3], 0, 0) == [0, 1]
    assert ask([2, 3], 1, 0) == [2, 3]
    assert ask([], 0, 0) == [0, 1]
    assert ask([4], 0, 1) == []
    assert ask([4, 5], 0, 1) == [4, 5]
    assert ask([0, 1], 0, 0, task="other") == [0, 1]
    assert sampler.has_cached_result("p", "train", {"dp_rank": 1, "batch_index": 0})
    assert not sampler.has_cached_result("p", "train", {"dp_rank": 1, "batch_index": 1})
    assert not sampler.has_cached_result("p", "train", {})
    sampler.clear_cache("p")
    assert not sampler.has_cached_result("p", "train", {"dp_rank": 1, "batch_index": 0})
    with pytest.raises(ValueError, match="-1"):
        ask([0, 1], -1, 0)


def test_a_rank_gets_the_same_groups_again():
    sampler = GRPOGroupNSampler(2)
    config = {"dp_rank": 0, "batch_index": 3, "task_name": "t", "partition_id": "p"}
    assert sampler([0, 1, 2, 3], 2, **config)[0] == [0, 1]
    assert sampler([2, 3], 2, **config)[0] == [0, 1]


def test_balanced_ranks_get_whole_groups_equal_counts_and_close_sums():
    lengths = {at: length for at, length in enumerate([100, 90, 10, 20, 50, 60, 55, 45])}
    sampler = SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    asked = {"task_name": "t", "partition_id": "p", "batch_index": 0, "partition": Tagged(lengths)}
    first, consumed = sampler(list(range(8)), 4, dp_rank=0, **asked)
    second, _ = sampler([], 4, dp_rank=1, **asked)
    assert sorted(first + second) == list(range(8))
    assert consumed == list(range(8)), "the other rank's samples must not be taken for another batch"
    for share in (first, second):
        assert all(share[at] + 1 == share[at + 1] and share[at] % 2 == 0 for at in (0, 2))
    assert sorted(sum(lengths[at] for at in share) for share in (first, second)) == [210, 220]
    assert sampler.sample([], 4, dp_rank=7, **asked) == ([], [])
    sampler.clear_cache("p")
    assert sampler.sample([0, 1], 4, dp_rank=0, **asked) == ([], [])


def test_balancing_refuses_what_cannot_be_dealt_alike():
    with pytest.raises(ValueError, match="dp_size"):
        SeqlenBalancedSampler(2, 0)
    with pytest.raises(ValueError, match="dealt to 2 ranks"):
        SeqlenBalancedSampler(2, 2).sample(list(range(6)), 3, partition=None)


def test_state_survives_a_checkpoint():
    sampler = SeqlenBalancedSampler(1, 2)
    asked = {"task_name": "t", "partition_id": "p", "batch_index": 0}
    first = sampler([0, 1, 2, 3], 2, dp_rank=0, **asked)[0]
    again = SeqlenBalancedSampler(1, 2)
    again.load_checkpoint(sampler.save_checkpoint())
    assert again([], 2, dp_rank=0, **asked)[0] == first


def test_a_configuration_may_name_a_sampler_a_class_or_an_instance():
    mine = RankAwareSampler()
    assert made(mine) is mine
    assert isinstance(made(RankAwareSampler), RankAwareSampler)
    assert isinstance(made("GRPOGroupNSampler"), GRPOGroupNSampler)
    with pytest.raises(InvalidRequest, match="no sampler 'Nothing'"):
        made("Nothing")
    with pytest.raises(InvalidRequest, match="is a int"):
        made(3)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 8), st.booleans())
def test_partitions_hold_every_item_once_and_none_is_empty(weights: list[int], bins: int, equal: bool):
    if bins > len(weights) or (equal and len(weights) % bins):
        with pytest.raises(InvalidRequest):
            get_seqlen_balanced_partitions(weights, bins, equal)
        return
    lists = get_seqlen_balanced_partitions(weights, bins, equal)
    assert sorted(at for one in lists for at in one) == list(range(len(weights)))
    assert all(lists)
    if equal:
        assert len({len(one) for one in lists}) == 1


@given(st.lists(st.integers(1, 4096), min_size=8, max_size=64))
def test_balanced_sums_differ_by_less_than_the_largest_item_needs(weights: list[int]):
    sums = [sum(weights[at] for at in one) for one in get_seqlen_balanced_partitions(weights, 4, False)]
    assert max(sums) <= sum(weights) / 4 + max(weights), "the bound of any list schedule"
