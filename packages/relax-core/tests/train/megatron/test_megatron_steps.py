"""What a rank does beside a plain step: routes, values, warm-ups, dummies, and what it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from relax.backends.models import build_model
from safetensors.torch import load_file

# The first test of a session starts the ranks that all of them share: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

VOCABULARY = 101


@pytest.mark.parametrize(
    ("kind", "decoder"),
    [
        pytest.param("qwen3_moe", "model.", id="text"),
        pytest.param("qwen3_vl_moe", "model.language_model.", id="seeing", marks=pytest.mark.slow),
    ],
)
def test_given_routes_are_followed_in_every_split_and_when_recomputed(
    kind: str, decoder: str, two: Any, model: Callable[..., str], tmp_path: Path
) -> None:
    folder = model(kind)
    splits: dict[str, dict[str, Any]] = {
        "pipeline": {"pipeline_parallel": 2},
        "recomputed": {"pipeline_parallel": 2, "megatron": {"recompute": "full"}},
        "experts": {"expert_parallel": 2, "data_parallel": 2},
        "sequence": {"tensor_parallel": 2, "megatron": {"sequence_parallel": True}},
        "context": {"context_parallel": 2},
    }
    found = {}
    for name, actor in splits.items():
        (tmp_path / name).mkdir()
        answers = two("replayed", folder=folder, actor=actor, out=str(tmp_path / name), vocabulary=VOCABULARY)
        found[name] = load_file(tmp_path / name / "grads")
        if name in ("pipeline", "recomputed", "experts"):  # the others see a part of the tokens
            for answer in answers:
                assert answer["followed"]
                assert all(followed and count > 4 for followed, count in answer["followed"].values())
                assert all(answer["live"].values())
    for name in splits:
        for key, expected in found["pipeline"].items():
            torch.testing.assert_close(found[name][key], expected, atol=1e-5, rtol=1e-5, msg=f"{name} {key}")
    router = found["pipeline"][f"{decoder}layers.0.mlp.gate.weight"]
    assert float(router.abs().max()) > 1e-4  # probabilities come from live scores


@pytest.mark.parametrize(
    ("kind", "actor"),
    [
        pytest.param("qwen3", {"tensor_parallel": 2, "megatron": {"sequence_parallel": True}}, id="tensor"),
        pytest.param("qwen3", {"pipeline_parallel": 2}, id="pipeline"),
        pytest.param("qwen3_vl", {"pipeline_parallel": 2}, id="seeing", marks=pytest.mark.slow),
    ],
)
def test_a_critic_gives_values_that_learn(
    kind: str,
    actor: dict[str, Any],
    two: Any,
    model: Callable[..., str],
    process_module: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    answers = two("values", folder=model(kind), actor=actor, vocabulary=VOCABULARY, out=str(tmp_path / "c"))
    assert any("score.weight" in answer["names"] for answer in answers)
    assert not any("lm_head.weight" in answer["names"] for answer in answers)
    spoken = next(answer for answer in answers if answer["first"] is not None)
    assert all(value == 0.0 for part in spoken["first"] for value in part)
    values = torch.tensor([value for part in spoken["trained"] for value in part])
    assert float((values - 0.7).square().mean()) < 0.1
    assert spoken["again"] == spoken["trained"]
    if kind == "qwen3":
        work = process_module("problem").batches_for(model(kind), 5, VOCABULARY)
        norm = _first_norm_of_a_critic(model(kind), work)
        assert [answer["norm"] for answer in answers] == pytest.approx([norm, norm], rel=1e-5)


@torch.no_grad()
def _first_norm_of_a_critic(folder: str, work: list[Any]) -> float:
    """Of the mean over 60 of (value - 0.7)^2 when all values are 0: only the head has a gradient then, which
    is -1.4 times the sum of the hidden states that predict.
    """
    decoder: Any = build_model(folder).double().get_decoder()
    total = torch.zeros(decoder.config.hidden_size, dtype=torch.float64)
    for batch in work:
        for row, prompt in zip(
            batch.tokens.split(batch.offsets.diff().tolist()), batch.prompt_lengths.tolist(), strict=True
        ):
            hidden = decoder(input_ids=row[None], use_cache=False).last_hidden_state[0]
            total += hidden[prompt - 1 : -1].sum(0)
    return float(1.4 * total.norm() / 60)


@pytest.mark.parametrize(
    "megatron",
    [
        pytest.param({}, id="plain"),
        pytest.param({"distributed_optimizer": True}, id="distributed", marks=pytest.mark.slow),
    ],
)
def test_a_warm_up_learns_and_leaves_no_moments(
    megatron: dict[str, Any], two: Any, model: Callable[..., str]
) -> None:
    actor = {"data_parallel": 2, "megatron": megatron}
    answers = two("warm_up", folder=model("qwen3"), actor=actor, vocabulary=VOCABULARY)
    totals = [sum(sums) for sums in zip(*(answer["sums"] for answer in answers), strict=True)]
    assert totals[-1] < 0.95 * totals[0]
    for answer in answers:
        assert answer["steps"] == 1
        # The first step of Adam moves by lr at most, beside the decay; moments of the warm-up would say else.
        assert answer["moved"] <= 1.01 * answer["lr"] + answer["lr"] * 0.1 * 4


@pytest.mark.parametrize(
    "actor",
    [
        pytest.param({"tensor_parallel": 2}, id="tensor"),
        pytest.param({"pipeline_parallel": 2}, id="pipeline", marks=pytest.mark.slow),
        pytest.param({"data_parallel": 2}, id="data", marks=pytest.mark.slow),
        pytest.param(
            {"data_parallel": 2, "dtype": "bfloat16", "megatron": {"distributed_optimizer": True}},
            id="half",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_that_must_change_nothing_change_nothing(
    actor: dict[str, Any], two: Any, model: Callable[..., str]
) -> None:
    for answer in two("odd_steps", folder=model("qwen3"), actor=actor, vocabulary=VOCABULARY):
        assert answer["skipped"]
        assert answer["same"]
        assert answer["steps"] == 0
        assert len(answer["refused"]) == 4
        assert "made to score only" in answer["refused"][3]
        assert answer["alike"]
        assert "token ids run from" in answer["refused"][2]
        assert answer["difference"] <= 1e-6
        assert answer["apart"] <= 1e-6, "micro-batches in calls of their own add up to the same"
        if answer["counts"]:
            assert answer["counts"][0] == answer["counts"][1]


def test_a_split_that_does_not_divide_the_model_is_refused_and_names_the_field(
    two: Any, model: Callable[..., str]
) -> None:
    sequence = {"sequence_parallel": True}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("qwen3", {"num_key_value_heads": 1}, {"tensor_parallel": 2}, "num_key_value_heads is 1"),
        ("qwen3", {"layers": 3}, {"pipeline_parallel": 2}, "num_hidden_layers is 3"),
        ("qwen3", {}, {"pipeline_parallel": 2, "virtual_pipeline": 2}, "num_hidden_layers is 2"),
        ("qwen3_moe", {"num_experts": 3}, {"expert_parallel": 2, "data_parallel": 2}, "num_experts is 3"),
        ("qwen3_moe", {}, {"tensor_parallel": 2}, "set actor.megatron.sequence_parallel=true"),
        ("qwen3", {}, {"expert_parallel": 2, "data_parallel": 2}, "a model that has no experts"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 15},
            {"tensor_parallel": 2, "expert_tensor_parallel": 2, "megatron": sequence},
            "moe_intermediate_size is 15, which actor.expert_tensor_parallel = 2 does not divide",
        ),
    ]
    for kind, shape, actor, message in cases:
        for answer in two("refused_actor", folder=model(kind, **shape), actor={**actor, "load": ""}):
            assert message in answer["said"], answer["said"]
            assert answer["said"].startswith("SettingsError")


def test_groups_of_megatron_wait_as_long_as_those_of_the_gang(two: Any, model: Callable[..., str]) -> None:
    """Not its own half an hour: a rank that is stopped is found out by a collective that ends."""
    asked = {"folder": model("qwen3"), "actor": {"tensor_parallel": 2}, "seconds": 90.0}
    assert two("patience", **asked) == [90.0, 90.0]
