"""The demonstrations: a few steps of each in every run of the tests, all of each among the slow ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from relax.distributed.bus import Sample

Local = Callable[..., Any]
SMALL = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "actor.micro_batch_size=16", "steps=3")


def test_pictures_flow_from_the_data_to_the_trainer(local: Local, put: list[Sample]) -> None:
    run = local("digits", *SMALL, "actor.supervised.steps=2")
    assert len(run.metrics) == 3
    assert len(put) == 48
    assert {len(sample.media) for sample in put} == {1}
    assert {sample.media[0]["image_grid_thw"].tolist()[0][0] for sample in put} == {1}
    assert all(step["loss/ratio_gap_max"] < 0.5 for step in run.metrics)
    assert run.metrics[0]["loss/ratio_gap_max"] <= 1e-4, (
        "step 0 is on-policy: engine and trainer saw one picture"
    )
    assert run.accounting[0]["faults"] == []


def test_tool_observations_are_shown_and_masked_out(local: Local, put: list[Sample]) -> None:
    local("calculator", *SMALL, "actor.supervised.steps=110")
    several = [sample for sample in put if sample.turns > 1]
    assert several, "no episode took a second turn"
    for sample in several:
        mask = np.asarray(sample.loss_mask)
        assert 0 < mask.sum() < len(mask)
        assert not np.asarray(sample.rollout_logprobs)[mask == 0].any()
        covered = sum(end - start for _, start, end in sample.policy_versions.tolist())
        assert covered == mask.sum()


def rises(run: Any, metric: str) -> float:
    """From the mean of the first five steps to the mean of the last ten."""
    values = [step.get(metric, 0.0) for step in run.metrics]
    return float(np.mean(values[-10:]) - np.mean(values[:5]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "metric", "least"),
    [
        ("addition", "reward/mean", 0.2),
        ("calculator", "reward/exact", 0.2),
        ("digits", "reward/mean", 0.3),
    ],
)
def test_a_demonstration_learns(local: Local, config: str, metric: str, least: float) -> None:
    run = local(config)
    assert rises(run, metric) >= least
    assert run.accounting[0]["faults"] == []
