"""The main job with every role in this process: it learns, is exact, repeats, resumes and replays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from relax.orchestration.launcher import RoleFailed

Local = Callable[..., Any]
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "actor.micro_batch_size=8",
    "rollout.max_new_tokens=8",
)


@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        ("colocate", 0),
        ("async", 1),
        pytest.param("colocate", 1, marks=pytest.mark.slow),
        pytest.param("async", 0, marks=pytest.mark.slow),  # by default on Ray: the quick start
    ],
)
def test_the_sevens_task_is_learnt(local: Local, mode: str, seed: int) -> None:
    run = local("quickstart", f"mode={mode}", f"max_staleness={int(mode == 'async')}", f"seed={seed}")
    assert len(run.rewards) == 60
    assert run.rewards[0] < 0.2
    assert np.mean(run.rewards[-6:]) > 0.95
    assert max(step["staleness/max"] for step in run.metrics) <= (1 if mode == "async" else 0)
    (accounts,) = run.accounting
    assert accounts["faults"] == []
    assert accounts["trained"] == 60 * 64
    assert accounts["put"] == accounts["trained"]


def test_staleness_zero_is_exactly_on_policy(local: Local) -> None:
    run = local("quickstart", *SMALL, "max_staleness=0", "steps=8", "rollout.temperature=0.8")
    assert max(step["loss/ratio_gap_max"] for step in run.metrics) <= 1e-4
    assert max(step["staleness/max"] for step in run.metrics) == 0


def test_staleness_is_bounded_by_the_recorded_versions(local: Local) -> None:
    run = local("quickstart", *SMALL, "max_staleness=1", "steps=12")
    entries = [entry for entry in run.lines("schedule/segment-0/actor.jsonl")]
    ages = [entry["step"] - oldest for entry in entries for oldest in entry["oldest_versions"]]
    assert len(ages) == 12 * 4
    assert set(ages) <= {0, 1}
    assert 1 in ages


def test_colocate_repeats_bit_for_bit(local: Local) -> None:
    first, again = (
        local("quickstart", *SMALL, "mode=colocate", "max_staleness=0", "steps=6", name=n) for n in "ab"
    )
    assert first.untimed == again.untimed
    assert first.trained() == again.trained()


def test_colocate_resumes_bit_for_bit(local: Local) -> None:
    words = (*SMALL, "mode=colocate", "max_staleness=0")
    whole = local("quickstart", *words, "steps=8", name="whole")
    local("quickstart", *words, "steps=3", name="parts")
    parts = local("quickstart", "steps=8", name="parts", resume=True)
    assert parts.untimed == whole.untimed
    assert parts.trained() == whole.trained()


def test_async_resumes_with_exact_accounts(local: Local) -> None:
    local("quickstart", *SMALL, "steps=4", name="parts")
    parts = local("quickstart", "steps=9", name="parts", resume=True)
    ordinals = [ordinal for _, group in parts.trained() for ordinal in group]
    assert sorted(ordinals) == list(range(9 * 4))
    assert [accounts["faults"] for accounts in parts.accounting] == [[], []]


@pytest.mark.parametrize("mode", ["async", "colocate"])
def test_a_run_replays_bit_for_bit(local: Local, mode: str) -> None:
    words = (*SMALL, "steps=8", f"mode={mode}")
    recorded = local("quickstart", *words, name="recorded")
    replayed = local("quickstart", *words, name="replayed", replay=recorded)
    assert replayed.untimed == recorded.untimed
    assert replayed.trained() == recorded.trained()


def test_a_kl_term_brings_a_reference_role_that_stays_where_the_policy_began(local: Local) -> None:
    words = (*SMALL, "algorithm.kl_coef=0.1", "actor.lr=1e-2")
    run = local("quickstart", *words, "steps=6", name="kl")
    kl = [step["loss/reference_kl"] for step in run.metrics]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert max(kl[1:]) > 1e-3
    assert (run.folder / "initial" / "model.safetensors").is_file()
    resumed = local("quickstart", "steps=8", name="kl", resume=True)
    assert resumed.metrics[-1]["loss/reference_kl"] > 1e-3
    assert [accounts["faults"] for accounts in resumed.accounting] == [[], []]


def test_a_run_that_diverges_is_ended_by_name(local: Local) -> None:
    with pytest.raises(RoleFailed, match="training has diverged"):
        local("quickstart", *SMALL, "actor.lr=1e30", "actor.max_skipped_steps=1", "steps=30")
