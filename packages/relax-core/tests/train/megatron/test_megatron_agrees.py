"""One batch, one loss, one gradient: every split comes to what plain transformers comes to in float64."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

# The first test of a session starts the ranks that all of them share: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

VOCABULARY = 101
SPLITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", {}, {"tensor_parallel": 2}),
    # What a stage has sent may be given up, as training with Megatron usually does.
    (
        "qwen3",
        {},
        {
            "pipeline_parallel": 2,
            "megatron": {"transformer_config": {"deallocate_pipeline_outputs": True}},
        },
    ),
    ("qwen3", {}, {"data_parallel": 2}),
    ("qwen3", {}, {"context_parallel": 2}),
    ("qwen3", {}, {"tensor_parallel": 2, "megatron": {"sequence_parallel": True, "recompute": "selective"}}),
    ("qwen3", {"layers": 4}, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    ("qwen3_moe", {}, {"expert_parallel": 2, "data_parallel": 2}),
    (
        "qwen3_moe",
        {},
        {"expert_parallel": 2, "tensor_parallel": 2, "megatron": {"sequence_parallel": True}},
    ),
    (
        "qwen3_moe",
        {},
        {"expert_tensor_parallel": 2, "tensor_parallel": 2, "megatron": {"sequence_parallel": True}},
    ),
    ("qwen3_moe", {}, {"context_parallel": 2, "expert_parallel": 2}),
    (
        "qwen3_moe",
        {},
        {"expert_parallel": 2, "data_parallel": 2, "megatron": {"token_dispatcher": "allgather"}},
    ),
    ("qwen3", {}, {"data_parallel": 2, "megatron": {"distributed_optimizer": True}}),
    ("qwen3_moe", {"tied": False}, {"pipeline_parallel": 2, "megatron": {"recompute": "full"}}),
    ("qwen2", {}, {"pipeline_parallel": 2}),
    ("llama", {"tied": False}, {"tensor_parallel": 2}),
]


SEVERAL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "qwen3_moe",
        {},
        {
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "expert_parallel": 2,
            "megatron": {"sequence_parallel": True, "recompute": "full"},
        },
    ),
    (
        "qwen3_moe",
        {},
        {
            "tensor_parallel": 2,
            "data_parallel": 2,
            "expert_parallel": 4,
            "megatron": {"sequence_parallel": True, "distributed_optimizer": True, "recompute": "full"},
        },
    ),
    (
        "qwen3_moe",
        {"tied": False},
        {
            "pipeline_parallel": 2,
            "data_parallel": 2,
            "expert_parallel": 2,
            "megatron": {"distributed_optimizer": True, "recompute": "selective"},
        },
    ),
    ("qwen3", {}, {"tensor_parallel": 2, "context_parallel": 2, "megatron": {"sequence_parallel": True}}),
    (
        "qwen3",
        {"layers": 4},
        {
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "virtual_pipeline": 2,
            "megatron": {"sequence_parallel": True, "distributed_optimizer": True},
        },
    ),
    ("qwen3", {"layers": 4}, {"pipeline_parallel": 4}),
]
"""Several kinds of parallelism at once, on four ranks."""


def _name(split: tuple[str, dict[str, Any], dict[str, Any]]) -> str:
    kind, _, actor = split
    words = [f"{key}={value}" for key, value in actor.items() if key != "megatron"]
    words += [f"{key}={value}" for key, value in actor.get("megatron", {}).items()]
    return "-".join([kind, *words])


@cache
def _expected(process_module: Callable[[str], Any], folder: str) -> Any:
    return process_module("oracle").one_step(folder, VOCABULARY)


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(split, id=_name(split), marks=[] if index < 7 else pytest.mark.slow)
        for index, split in enumerate(SPLITS)
    ],
)
def test_a_split_agrees_with_transformers(
    split, two: Any, model: Callable[..., str], process_module: Callable[[str], Any], tmp_path: Path
) -> None:
    _require_agreement(split, two, model, process_module, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("split", SEVERAL, ids=_name)
def test_several_kinds_of_parallelism_at_once_agree_with_transformers(
    split, four: Any, model: Callable[..., str], process_module: Callable[[str], Any], tmp_path: Path
) -> None:
    _require_agreement(split, four, model, process_module, tmp_path)


def _require_agreement(
    split: tuple[str, dict[str, Any], dict[str, Any]],
    ranks: Any,
    model: Callable[..., str],
    process_module: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    kind, shape, actor = split
    folder = model(kind, **shape)
    answers = ranks("one_step", folder=folder, actor=actor, out=str(tmp_path), vocabulary=VOCABULARY)
    expected = _expected(process_module, folder)

    scores: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("scores.*"):
        scores |= load_file(path)
    assert scores.keys() == expected["scores"].keys()
    for name, found in scores.items():
        torch.testing.assert_close(found.double(), expected["scores"][name], atol=1e-5, rtol=0)

    loss = sum(answer["loss"][0] for answer in answers if answer["loss"])
    count = sum(answer["loss"][1] for answer in answers if answer["loss"])
    assert loss == pytest.approx(float(expected["sums"]["loss"]), rel=1e-5)
    assert count == float(expected["sums"]["count"])

    if not actor.get("megatron", {}).get("distributed_optimizer"):
        # With it each replica has the finished gradient of its own shard only; the step below shows them all.
        grads = load_file(tmp_path / "grads")
        assert grads.keys() == expected["grads"].keys()
        for name, found in grads.items():
            torch.testing.assert_close(
                found.double(), expected["grads"][name], atol=1e-5, rtol=1e-5, msg=name
            )

    norms = {answer["stats"][0] for answer in answers}
    assert max(norms) - min(norms) == 0  # the same answer on every rank
    assert norms.pop() == pytest.approx(float(expected["sums"]["norm"]), rel=1e-5)
    weights = load_file(tmp_path / "weights")
    for name, found in weights.items():
        # Adam divides by the gradient's size, so that where it is nearly 0 its rounding shows.
        torch.testing.assert_close(found.double(), expected["weights"][name], atol=5e-5, rtol=0, msg=name)
    assert any(answer["coordinates"][3] for answer in answers)
