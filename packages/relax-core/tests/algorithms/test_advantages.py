import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relax.algorithms import AlgorithmError, build
from relax.algorithms.advantages import group_advantages, spread_over_tokens
from relax.algorithms.spec import AdvantageInputs


def test_advantages_equal_trl(oracle):
    case = oracle("trl_advantages")
    # The first group has a NaN reward, which TRL turns into 0 and we refuse.
    rewards = torch.as_tensor(case["rewards"])[4:]
    groups = torch.arange(2).repeat_interleave(4)
    # TRL works in float32 here: 2e-8 off.
    for normalize, expected in ((True, "adv_group"), (False, "adv_none")):
        ours = group_advantages(rewards, groups, normalize_std=normalize)
        torch.testing.assert_close(ours, torch.as_tensor(case[expected])[4:], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("case", "std_eps", "tolerance"),
    [("trl_grpo", 1e-4, 1e-7), ("verl_vanilla_token-mean", 1e-6, 1e-9)],
)
def test_advantages_equal_the_ones_the_losses_were_made_with(case, std_eps, tolerance, oracle):
    expected = torch.as_tensor(oracle(case)["advantages"])
    if expected.dim() == 2:
        expected = expected[:, 0]  # every row's first token is sampled
    groups = torch.arange(2).repeat_interleave(4)
    ours = group_advantages(torch.as_tensor(oracle(case)["rewards"]), groups, std_eps=std_eps)
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.floats(-1e3, 1e3)), min_size=1, max_size=24),
    order=st.randoms(use_true_random=False),
    normalize=st.booleans(),
)
def test_position_means_nothing_and_every_group_is_centred(rows, order, normalize):
    groups = torch.tensor([7919 * group - 3 for group, _ in rows])
    rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
    result = group_advantages(rewards, groups, normalize_std=normalize)
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    again = group_advantages(rewards[shuffled], groups[shuffled], normalize_std=normalize)
    torch.testing.assert_close(again, result[shuffled], rtol=1e-9, atol=1e-9)
    for group in groups.unique():
        members = groups == group
        assert abs(float(result[members].sum())) < 1e-6
        alone = [Fraction(reward) for reward in rewards[members].tolist()]
        mean = sum(alone) / len(alone)  # exact: the division below would blow rounding up
        centred = [reward - mean for reward in alone]
        std = math.sqrt(sum(c * c for c in centred) / (len(alone) - 1)) if len(alone) > 1 else 0.0
        scale = std + 1e-4 if normalize and len(alone) > 1 else 1.0
        expected = torch.tensor([float(c) / scale for c in centred], dtype=torch.float64)
        torch.testing.assert_close(result[members], expected, rtol=1e-7, atol=1e-9)


def test_equal_rewards_and_groups_of_one_give_exactly_zero():
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0])
    result = group_advantages(rewards, torch.tensor([3, 3, 3, 9]))
    assert result.tolist() == [0.0] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused_by_row_and_group(bad):
    with pytest.raises(AlgorithmError, match=r"row 1 \(group 42\) is (nan|inf), and 1 of 3"):
        group_advantages(torch.tensor([1.0, bad, 0.0]), torch.tensor([42, 42, 42]))


def test_rewards_and_groups_of_different_lengths_are_refused():
    with pytest.raises(AlgorithmError, match=r"rewards \[2\] and groups \[3\]"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


def test_a_row_spreads_over_its_sampled_tokens_only():
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.uint8)
    result = spread_over_tokens(torch.tensor([2.0, -1.0, 5.0]), mask, torch.tensor([0, 3, 3, 5]))
    assert result.tolist() == [2.0, 0.0, 2.0, 5.0, 0.0]
    assert result.dtype == torch.float32


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo"])
def test_an_algorithm_gives_each_token_its_rows_advantage(name):
    algorithm = build(name, {"max_length": 4})
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        groups=torch.tensor([5, 8, 5, 8]),
        mask=torch.tensor([1, 1, 1, 1, 0, 1], dtype=torch.uint8),
        offsets=torch.tensor([0, 1, 2, 5, 6]),
    )
    scale = 0.5 if name == "dr_grpo" else 0.5 / (0.5**0.5 + 1e-4)
    expected = torch.tensor([1, -1, -1, -1, 0, 1]) * scale
    torch.testing.assert_close(algorithm.advantages(inputs), expected, rtol=1e-6, atol=0)


def test_an_empty_batch_has_no_advantages():
    none = torch.zeros(0, dtype=torch.int64)
    inputs = AdvantageInputs(torch.zeros(0), none, none.to(torch.uint8), torch.zeros(1, dtype=torch.int64))
    assert build("grpo").advantages(inputs).shape == (0,)
