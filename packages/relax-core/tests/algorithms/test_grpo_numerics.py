import math
from dataclasses import replace

import pytest
import torch
from relax.algorithms import AlgorithmError, build
from relax.algorithms.spec import LossInputs

EVERY = {
    "token": build("dapo", {"kl_coef": 0.1}),
    "sequence": build("grpo", {"kl_coef": 0.1, "kl_unbiased": True}),
    "fixed": build("dr_grpo", {"max_length": 8, "delta": 2.0}),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [-1000.0, -100.0, 100.0, 1000.0, float("-inf")])
def test_huge_ratios_leave_loss_gradient_and_metrics_finite(name, dtype, shift, make_batch):
    batch = make_batch([4, 4], dtype=dtype)
    logprobs = (batch.logprobs.detach() + shift).requires_grad_()
    batch = replace(batch, logprobs=logprobs)
    outputs = EVERY[name].loss(batch)
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(logprobs.grad).all()
    for metric, (total, count) in outputs.metrics.items():
        assert math.isfinite(total), metric
        assert count > 0


@pytest.mark.parametrize("name", EVERY)
def test_tokens_outside_the_mask_take_no_part_whatever_stands_there(name, make_batch):
    batch = make_batch([6, 5])
    hole = (batch.mask == 0).nonzero().flatten()
    assert len(hole)
    spoilt = {
        column: getattr(batch, column).detach().index_fill(0, hole, value)
        for column, value in {
            "logprobs": float("nan"),
            "old_logprobs": float("-inf"),
            "advantages": float("nan"),
            "reference_logprobs": float("inf"),
        }.items()
    }
    spoilt["logprobs"].requires_grad_()
    expected, found = EVERY[name].loss(batch), EVERY[name].loss(replace(batch, **spoilt))
    expected.loss.backward()
    found.loss.backward()
    assert torch.equal(found.loss, expected.loss)
    assert found.metrics == expected.metrics
    assert torch.equal(spoilt["logprobs"].grad, batch.logprobs.grad)
    assert (batch.logprobs.grad[hole] == 0).all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("lengths", [[], [0], [3, 0, 2]])
def test_a_micro_batch_without_sampled_tokens_is_a_differentiable_zero(name, lengths, make_batch):
    batch = make_batch(lengths)
    batch = replace(batch, mask=torch.zeros_like(batch.mask))
    outputs = EVERY[name].loss(batch)
    outputs.loss.backward()
    assert (float(outputs.loss.detach()), outputs.count) == (0.0, 0.0)
    assert (batch.logprobs.grad == 0).all()
    assert all(value == (0.0, 0.0) for value in outputs.metrics.values())


@pytest.mark.parametrize("name", EVERY)
def test_float32_agrees_with_float64(name, make_batch):
    lengths = [16] * 16
    double, single = make_batch(lengths), make_batch(lengths, dtype=torch.float32)
    expected, found = EVERY[name].loss(double), EVERY[name].loss(single)
    expected.loss.backward()
    found.loss.backward()
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss.double(), expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single.logprobs.grad.double(), double.logprobs.grad, rtol=1e-4, atol=1e-6)


def test_half_precision_logprobs_are_worked_on_in_float32(make_batch):
    assert EVERY["token"].loss(make_batch([4], dtype=torch.bfloat16)).loss.dtype == torch.float32


def test_a_nan_of_a_sampled_token_shows_in_the_loss(make_batch):
    batch = make_batch([4])
    sampled = int((batch.mask == 1).nonzero()[0])
    spoilt = batch.logprobs.detach().clone()
    spoilt[sampled] = float("nan")
    assert torch.isnan(EVERY["token"].loss(replace(batch, logprobs=spoilt)).loss)


def test_on_policy_the_gradient_is_the_policy_gradient_and_the_ratio_one(make_batch):
    batch = make_batch([5, 4])
    batch = replace(batch, old_logprobs=batch.logprobs.detach().clone())
    outputs = build("dapo").loss(batch)
    outputs.loss.backward()
    torch.testing.assert_close(batch.logprobs.grad, -batch.advantages)
    tokens = float(batch.mask.sum())
    assert outputs.metrics == {
        "ratio": (tokens, tokens),
        "clip_low": (0.0, tokens),
        "clip_high": (0.0, tokens),
        "approx_kl": (0.0, tokens),
        "ratio_max": (1.0, 1.0),
        "ratio_gap_max": (0.0, 1.0),
    }


def test_the_gradient_is_the_derivative_of_the_loss(make_batch):
    batch = make_batch([3, 4], seed=3)
    for algorithm in EVERY.values():
        assert torch.autograd.gradcheck(
            lambda logprobs, loss=algorithm.loss: loss(replace(batch, logprobs=logprobs)).loss, batch.logprobs
        )


def test_the_metrics_name_the_extreme_ratios():
    old = torch.zeros(4)
    logprobs = torch.tensor([0.5, 2.0, 1.25, 9.0]).log()
    inputs = LossInputs(
        logprobs, old, torch.tensor([-1.0, 1.0, -1.0, 0.0]), torch.tensor([1, 1, 1, 0]), torch.tensor([0, 4])
    )
    metrics = build("grpo").loss(inputs).metrics
    assert metrics["ratio"] == pytest.approx((3.75, 3))
    assert metrics["ratio_max"] == pytest.approx((2.0, 1))
    assert metrics["ratio_gap_max"] == pytest.approx((1.0, 1))
    assert (metrics["clip_low"], metrics["clip_high"]) == ((1, 3), (1, 3))


def test_columns_that_do_not_fit_are_refused_by_name(make_batch):
    batch = make_batch([4])
    with pytest.raises(AlgorithmError, match=r"advantages has shape \[3\], logprobs \[4\]"):
        EVERY["token"].loss(replace(batch, advantages=batch.advantages[:3]))
    with pytest.raises(AlgorithmError, match=r"kl_coef=0.1 needs reference_logprobs"):
        EVERY["token"].loss(replace(batch, reference_logprobs=None))
