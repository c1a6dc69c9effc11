"""Qwen3-VL on every split: the logprobs, gradients and steps of plain transformers in float64."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.torch_native import TorchNative
from safetensors.torch import load_file

# The first test of a session starts the ranks that all of them share: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

VOCABULARY = 101
SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
SPLITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3_vl", {}, {"tensor_parallel": 2}),
    ("qwen3_vl", {}, {"pipeline_parallel": 2}),
    ("qwen3_vl", {}, {"data_parallel": 2}),
    ("qwen3_vl", {}, {"context_parallel": 2}),
    ("qwen3_vl", {}, {"tensor_parallel": 2, "megatron": SEQUENCE}),
    ("qwen3_vl_moe", {}, {"expert_parallel": 2, "data_parallel": 2}),
    ("qwen3_vl", {}, {"tensor_parallel": 2, "megatron": {"share_encoding": False}}),
    ("qwen3_vl", {}, {"tensor_parallel": 2, "megatron": {**SEQUENCE, "share_encoding": False}}),
    ("qwen3_vl", {}, {"context_parallel": 2, "megatron": {"share_encoding": False}}),
    ("qwen3_vl", {"tied": False}, {"tensor_parallel": 2, "megatron": {**SEQUENCE, "recompute": "full"}}),
    ("qwen3_vl", {}, {"pipeline_parallel": 2, "megatron": {"recompute": "full"}}),
    ("qwen3_vl", {"layers": 4, "deepstack": (1,)}, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    ("qwen3_vl", {}, {"data_parallel": 2, "megatron": {"distributed_optimizer": True}}),
    ("qwen3_vl", {}, {"tensor_parallel": 2, "megatron": {**SEQUENCE, "distributed_optimizer": True}}),
    ("qwen3_vl_moe", {}, {"tensor_parallel": 2, "expert_parallel": 2, "megatron": SEQUENCE}),
    ("qwen3_vl_moe", {"tied": False}, {"pipeline_parallel": 2}),
    ("qwen3_vl_moe", {}, {"context_parallel": 2, "expert_parallel": 2}),
]
DEFAULT = 6
FROZEN: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    # The last stage has nothing to train, and a micro-batch of text nothing to change.
    ("qwen3_vl", ("language",), {"pipeline_parallel": 2}),
    ("qwen3_vl", ("vision",), {"tensor_parallel": 2, "megatron": SEQUENCE}),
    ("qwen3_vl", ("vision", "projector"), {"context_parallel": 2}),
    ("qwen3_vl", ("language", "vision"), {"data_parallel": 2, "megatron": {"distributed_optimizer": True}}),
    ("qwen3_vl", ("language",), {"tensor_parallel": 2}),
    ("qwen3_vl", ("projector",), {"pipeline_parallel": 2, "megatron": {"recompute": "full"}}),
    ("qwen3_vl_moe", ("language",), {"expert_parallel": 2, "data_parallel": 2}),
    ("qwen3_vl_moe", ("vision",), {"tensor_parallel": 2, "expert_parallel": 2, "megatron": SEQUENCE}),
]


def _name(split: tuple[str, dict[str, Any], dict[str, Any]]) -> str:
    kind, shape, actor = split
    words = [f"{key}={value}" for key, value in (*shape.items(), *actor.items()) if key != "megatron"]
    words += [f"{key}={value}" for key, value in actor.get("megatron", {}).items()]
    return "-".join([kind, *words])


@cache
def _expected(process_module: Callable[[str], Any], folder: str, frozen: tuple[str, ...] = ()) -> Any:
    return process_module("oracle").one_step(folder, VOCABULARY, frozen=frozen)


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(split, id=_name(split), marks=[] if index < DEFAULT else pytest.mark.slow)
        for index, split in enumerate(SPLITS)
    ],
)
def test_a_split_that_sees_agrees_with_transformers(
    split, two: Any, model: Callable[..., str], process_module: Callable[[str], Any], tmp_path: Path
) -> None:
    kind, shape, actor = split
    folder = model(kind, **shape)
    answers = two("one_step", folder=folder, actor=actor, out=str(tmp_path), vocabulary=VOCABULARY)
    _require_equal(answers, actor, tmp_path, _expected(process_module, folder), towers=20)


@pytest.mark.parametrize(
    ("kind", "frozen", "actor"),
    [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if index < 2 else pytest.mark.slow)
        for index, case in enumerate(FROZEN)
    ],
)
def test_what_is_frozen_stays_and_the_rest_steps_as_with_transformers(
    kind: str,
    frozen: tuple[str, ...],
    actor: dict[str, Any],
    two: Any,
    model: Callable[..., str],
    process_module: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    folder, actor = model(kind), actor | {"freeze": list(frozen)}
    answers = two("one_step", folder=folder, actor=actor, out=str(tmp_path), vocabulary=VOCABULARY)
    expected = _expected(process_module, folder, frozen)
    _require_equal(answers, actor, tmp_path, expected)
    # What no gradient was expected of is published all the same, with the very bits that it had.
    weights, before = (
        load_file(tmp_path / "weights"),
        process_module("oracle").split(load_file(Path(folder) / "model.safetensors")),
    )
    still = [name for name in weights if name not in expected["grads"]]
    assert still
    assert all(torch.equal(weights[name], before[name]) for name in still)


def test_a_step_without_pictures_moves_the_tower_alike_on_every_backend(
    two: Any, model: Callable[..., str], process_module: Callable[[str], Any], tmp_path: Path
) -> None:
    folder, seeing, problem = model("qwen3_vl"), process_module("seeing"), process_module("problem")
    alone = TorchNative(Path(folder), settings=TrainerSettings(**problem.SETTINGS), seed=3)
    seen = {}
    for work in seeing.pictures_then_text(VOCABULARY):
        seen = {name: tensor.clone() for name, tensor in alone.tensors()}
        for batch in work:
            alone.forward_backward(batch, problem.loss)
        alone.optim_step(1 / 40)
    after = dict(alone.tensors())
    tower = [name for name in after if ".visual." in name]
    assert sum(not torch.equal(after[name], seen[name]) for name in tower) > 0.9 * len(tower)
    for number, actor in enumerate(
        (
            {"backend": "megatron", "tensor_parallel": 2},
            {"backend": "megatron", "data_parallel": 2},
            {"data_parallel": 2, "fsdp": True},
            {"data_parallel": 2, "fsdp": False},
        )
    ):
        out = tmp_path / str(number)
        two("pictures_then_text", folder=folder, actor=actor, out=str(out), vocabulary=VOCABULARY)
        found: dict[str, torch.Tensor] = {}
        for file in out.glob("*.safetensors"):
            found |= load_file(file)
        for name in tower:
            # Adam divides by the gradient's size, so that where it is nearly 0 its rounding shows.
            difference = float((found[name] - after[name]).abs().mean())
            moved = float((after[name] - seen[name]).abs().mean())
            assert difference <= 1e-6 + 0.01 * moved, f"{actor} {name}: {difference}, moved by {moved}"


@pytest.mark.parametrize(
    ("actor", "calls"),
    [
        # Of 16, 8, 16 and 4 patches; of a clip that two rows show; of none; of an image that two rows show,
        # and one more.
        pytest.param({"tensor_parallel": 2}, [[2, 1, 1], [2, 1]], id="shared"),
        pytest.param(
            {"tensor_parallel": 2, "megatron": {"share_encoding": False}},
            [[4, 1, 2], [4, 1, 2]],
            id="all",
            marks=pytest.mark.slow,
        ),
        pytest.param({"context_parallel": 2}, [[2, 1, 1], [2, 1]], id="context", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel": 2}, [[4, 1, 2], []], id="stages", marks=pytest.mark.slow),
    ],
)
def test_every_different_item_is_encoded_once_by_one_of_the_ranks_that_share_it(
    actor: dict[str, Any], calls: list[list[int]], two: Any, model: Callable[..., str]
) -> None:
    answers = two("encoded", folder=model("qwen3_vl"), actor=actor, vocabulary=VOCABULARY)
    assert [answer["forward"] for answer in answers] == calls
    assert [answer["backward"] for answer in answers] == calls
    for answer in answers:
        assert len(answer["refused"]) == 2
        assert all("image 0 of row 0 needs a run of 4 image tokens" in said for said in answer["refused"])


def test_tokens_turn_along_three_axes_as_with_transformers(two: Any, model: Callable[..., str]) -> None:
    for answer in two("turned", folder=model("qwen3_vl"), actor={"tensor_parallel": 2}):
        assert answer["difference"] <= 1e-6
        assert answer["same"]
        assert answer["axes"] > 0.1


def test_rows_packed_for_transformer_engine_turn_like_each_token_alone(
    two: Any, model: Callable[..., str]
) -> None:
    folder = model("qwen3_vl")
    answers = two("turned_thd", folder=folder, actor={"context_parallel": 2}, vocabulary=VOCABULARY)
    for answer in answers:
        assert answer["difference"] <= 1e-6
        assert answer["tokens"] > 10
        assert answer["matters"] > 0.1


def test_what_cannot_be_built_or_gone_on_with_is_named(
    two: Any, model: Callable[..., str], tmp_path: Path
) -> None:
    actor: dict[str, Any] = {"pipeline_parallel": 2, "virtual_pipeline": 2}
    for answer in two("refused_actor", folder=model("qwen3_vl", layers=4), actor=actor):
        assert "leaves 1 layers to a stage, but this model adds features" in answer["said"]
    for answer in two(
        "refused_actor", folder=model("qwen3_vl"), actor={"data_parallel": 2, "freeze": ["audio"]}
    ):
        assert "names 'audio', but the model has language, vision, projector" in answer["said"]
    out = str(tmp_path / "checkpoint")
    frozen = {"data_parallel": 2, "freeze": ["vision"]}
    two("train_and_save", folder=model("qwen3_vl"), actor=frozen, out=out, vocabulary=VOCABULARY, steps=1)
    for answer in two("refused_actor", folder=model("qwen3_vl"), actor={"data_parallel": 2, "load": out}):
        assert "with actor.freeze = ['vision'], this one has []" in answer["said"]


def _require_equal(
    answers: list[Any], actor: dict[str, Any], tmp_path: Path, expected: Any, towers: int = 0
) -> None:
    if not actor.get("megatron", {}).get("distributed_optimizer"):
        grads = load_file(tmp_path / "grads")
        assert grads.keys() == expected["grads"].keys()
        large = 0
        for name, found in grads.items():
            exact = expected["grads"][name]
            difference, size = float((found.double() - exact).abs().max()), float(exact.abs().max())
            assert difference <= 1e-5 * max(1.0, size), f"{name}: {difference} of {size}"
            if ".visual." in name and size > 1e-2:
                large += 1
                assert difference <= 1e-5 * size, f"{name}: {difference} of {size}"
        assert large >= towers  # small ones would agree whatever they were

    norms = {answer["stats"][0] for answer in answers}
    assert max(norms) - min(norms) == 0  # the same answer on every rank
    assert norms.pop() == pytest.approx(float(expected["sums"]["norm"]), rel=1e-5)
    weights = load_file(tmp_path / "weights")
    for name, found in weights.items():
        difference = float((found.double() - expected["weights"][name]).abs().max())
        assert difference <= 5e-5, f"{name}: {difference}"

    scores: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("scores.*"):
        scores |= load_file(path)
    assert scores.keys() == expected["scores"].keys()
    for name, found in scores.items():
        # Behind a step: Adam divides by the gradient's size, so that where it is nearly 0 its rounding shows.
        allowed = 5e-5 if name.startswith("after") else 1e-5
        difference = float((found.double() - expected["scores"][name]).abs().max())
        assert difference <= allowed, f"{name}: {difference}"
