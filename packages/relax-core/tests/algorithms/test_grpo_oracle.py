"""Loss, gradient and metrics against two public trainers, TRL and verl, in float64 on masks with holes."""

import json
from pathlib import Path

import pytest
import torch
from relax.algorithms import build
from relax.algorithms.kl import kl

TOLERANCE = {"rtol": 0, "atol": 1e-9}

TRL = {
    "grpo": ("grpo", {}),
    "bnpo": ("grpo", {"aggregation": "token"}),
    "dapo": ("dapo", {}),
    "dr_grpo": ("dr_grpo", {"max_length": 16}),
    "grpo_cliphigher": ("grpo", {"clip_high": 0.28}),
    "grpo_delta": ("grpo", {"delta": 1.5}),
    "grpo_kl": ("grpo", {"kl_coef": 0.1}),
    "grpo_kl_unbiased": ("grpo", {"kl_coef": 0.1, "kl_unbiased": True}),
}

# verl's sums over a row are `fixed` with a length of 1, or of its padded width, 12.
VERL = {
    "token-mean": {"aggregation": "token"},
    "seq-mean-token-mean": {"aggregation": "sequence"},
    "seq-mean-token-sum": {"aggregation": "fixed", "max_length": 1},
    "seq-mean-token-sum-norm": {"aggregation": "fixed", "max_length": 12},
}


def loss_and_gradient(algorithm, inputs, keep):
    outputs = algorithm.loss(inputs)
    loss = outputs.loss / outputs.count
    loss.backward()
    gradient = torch.zeros(keep.shape, dtype=torch.float64)
    gradient[keep] = inputs.logprobs.grad
    return loss.detach(), gradient, outputs


@pytest.mark.parametrize("case", TRL)
def test_loss_and_gradient_equal_trl(case, oracle, flatten):
    name, settings = TRL[case]
    algorithm = build(name, settings)
    expected = oracle(f"trl_{case}")
    inputs, keep = flatten(expected, reference="reference_logprobs" in algorithm.needs)
    loss, gradient, outputs = loss_and_gradient(algorithm, inputs, keep)
    torch.testing.assert_close(loss, torch.as_tensor(expected["loss"]), **TOLERANCE)
    torch.testing.assert_close(gradient, torch.as_tensor(expected["grad"]), **TOLERANCE)
    theirs = json.loads(str(expected["metrics"]))
    ours = {key: total / count for key, (total, count) in outputs.metrics.items()}
    assert ours["clip_low"] == pytest.approx(theirs["clip_ratio/low_mean"], abs=1e-6)
    assert ours["clip_high"] == pytest.approx(theirs["clip_ratio/high_mean"], abs=1e-6)
    assert ours.get("reference_kl") == pytest.approx(theirs.get("kl"), abs=1e-9)


def test_one_of_four_equal_micro_batches_equals_trl_under_gradient_accumulation(oracle, flatten):
    expected = oracle("trl_grpo_ga4")
    inputs, _ = flatten(expected)
    outputs = build("grpo").loss(inputs)
    loss = outputs.loss / (4 * outputs.count)
    loss.backward()
    torch.testing.assert_close(loss.detach(), torch.as_tensor(expected["loss"]), **TOLERANCE)


@pytest.mark.parametrize("aggregation", VERL)
@pytest.mark.parametrize("suffix", ["", "_eps"])
def test_loss_and_gradient_equal_verl(aggregation, suffix, oracle, flatten):
    expected = oracle(f"verl_vanilla_{aggregation}{suffix}")
    clip = {"clip_high": 0.28} if suffix else {}
    inputs, keep = flatten(expected)
    loss, gradient, _ = loss_and_gradient(build("grpo", VERL[aggregation] | clip), inputs, keep)
    torch.testing.assert_close(loss, torch.as_tensor(expected["loss"]), **TOLERANCE)
    torch.testing.assert_close(gradient, torch.as_tensor(expected["grad"]), **TOLERANCE)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_and_gradients_equal_verl(estimator, oracle):
    expected = oracle("verl_kl")
    logprobs = torch.as_tensor(expected["logp"]).requires_grad_()
    mask = torch.as_tensor(expected["mask"])
    estimates = kl(logprobs - torch.as_tensor(expected["ref_logp"]), estimator)
    loss = (estimates * mask).sum() / mask.sum()
    loss.backward()
    for name, found in (("pertoken", estimates), ("loss", loss), ("grad", logprobs.grad)):
        assert found is not None
        wanted = torch.as_tensor(expected[f"{estimator}_{name}"])
        torch.testing.assert_close(found.detach(), wanted, **TOLERANCE)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_adds_its_weighted_mean(estimator, oracle, flatten):
    expected = oracle("verl_kl")
    expected["advantages"] = torch.zeros(8).numpy()
    inputs, keep = flatten(expected, reference=True)
    settings = {"aggregation": "token", "kl_coef": 0.5, "kl_estimator": estimator}
    loss, gradient, _ = loss_and_gradient(build("grpo", settings), inputs, keep)
    torch.testing.assert_close(loss, 0.5 * torch.as_tensor(expected[f"{estimator}_loss"]), **TOLERANCE)
    torch.testing.assert_close(gradient, 0.5 * torch.as_tensor(expected[f"{estimator}_grad"]), **TOLERANCE)


def test_stored_losses_equal_the_trainers_own_summary(oracle):
    summary = json.loads((Path(__file__).parent / "oracle" / "loss_summary.json").read_text())
    assert len(summary) == len(TRL) + 1 + 2 * len(VERL)
    for case, loss in summary.items():
        assert float(oracle(case)["loss"]) == pytest.approx(loss, abs=1e-12), case
