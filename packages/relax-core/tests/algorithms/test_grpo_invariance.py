"""The loss of a step does not depend on how its rows were split, ordered or packed, nor on dummy rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relax.algorithms import build
from relax.algorithms.spec import LossInputs

ALGORITHMS = {
    "token": build("dapo", {"kl_coef": 0.1}),
    "sequence": build("grpo", {"kl_coef": 0.1, "kl_unbiased": True, "delta": 1.5}),
    "fixed": build("dr_grpo", {"max_length": 9, "kl_coef": 0.05, "kl_estimator": "k2"}),
}


@pytest.mark.parametrize("aggregation", ALGORITHMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=10), seed=st.integers(0, 999))
def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_metrics(
    aggregation, data, lengths, seed, make_batch, take_rows, mean_loss
):
    algorithm = ALGORITHMS[aggregation]
    batch = make_batch(lengths, seed=seed)
    whole = algorithm.loss(batch)
    if whole.count == 0:
        return
    (expected,) = torch.autograd.grad(mean_loss([whole]), batch.logprobs)

    places = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    order = data.draw(st.permutations(range(len(lengths))))
    # A place that no row was sent to makes an empty micro-batch, which must change nothing.
    parts = [
        algorithm.loss(take_rows(batch, [row for row in order if places[row] == place])) for place in range(4)
    ]
    (gradient,) = torch.autograd.grad(mean_loss(parts), batch.logprobs)
    torch.testing.assert_close(mean_loss(parts), mean_loss([whole]), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    for name, (total, count) in whole.metrics.items():
        found = [part.metrics[name] for part in parts if name in part.metrics]
        merged = max if name.endswith("_max") else sum
        assert merged(value for value, _ in found) == pytest.approx(total, rel=1e-9, abs=1e-12), name
        if merged is sum:
            assert sum(part for _, part in found) == count


@pytest.mark.parametrize("aggregation", ALGORITHMS)
def test_a_dummy_row_with_mask_zero_changes_nothing(aggregation, make_batch, take_rows):
    algorithm = ALGORITHMS[aggregation]
    batch = make_batch([5, 3, 7])
    expected = algorithm.loss(batch)
    padded = take_rows(batch, [0, 1, 2, 1])
    padded = replace(padded, mask=padded.mask.index_fill(0, torch.arange(15, 18), 0))
    found = algorithm.loss(padded)
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.count == expected.count
    assert found.metrics.keys() == expected.metrics.keys()
    for name, pair in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(pair), name


def test_aggregations_weigh_tokens_as_they_say():
    advantages = torch.tensor([1.0, 2.0, 0.0, 4.0], dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1], dtype=torch.uint8)
    logprobs = torch.zeros(4, dtype=torch.float64)
    inputs = LossInputs(logprobs, logprobs, advantages, mask, torch.tensor([0, 1, 4]))
    for chosen, loss, count in (
        ({"aggregation": "token"}, -7.0, 3),
        ({"aggregation": "sequence"}, -4.0, 2),
        ({"aggregation": "fixed", "max_length": 10}, -7.0, 20),
    ):
        outputs = build("grpo", chosen).loss(inputs)
        assert (float(outputs.loss), outputs.count) == (loss, count)
