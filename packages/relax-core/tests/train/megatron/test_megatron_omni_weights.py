"""A thinker's folder, or that of a whole Omni, to megatron and back; its checkpoints, and frozen towers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

# The first test of a session starts the ranks that all of them share: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

KIND = "qwen3_omni_moe_thinker"
VOCABULARY = 101
SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
EXPERTS: dict[str, Any] = {"expert_parallel": 2, "data_parallel": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel": 2}
TENSOR: dict[str, Any] = {"tensor_parallel": 2, "megatron": SEQUENCE}


@pytest.fixture
def folder(model: Callable[..., str]) -> str:
    return model(KIND, tied=False)


@pytest.fixture
def whole(folder: str, tmp_path: Path) -> str:
    """The same thinker in a folder that holds what speaks as well."""
    made = tmp_path / "whole"
    made.mkdir()
    config = {"thinker_config": json.loads((Path(folder) / "config.json").read_text())}
    (made / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", **config}))
    own = {f"thinker.{name}": tensor for name, tensor in _tensors(folder).items()}
    spoken = {"talker.model.norm.weight": torch.ones(3), "code2wav.code_offset": torch.arange(2)}
    save_file(own | spoken, made / "model.safetensors", metadata={"format": "pt"})
    return str(made)


def _tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        part = load_file(path)
        assert not found.keys() & part.keys()
        found |= part
    return found


def _require_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(
    "actor",
    [
        pytest.param(EXPERTS, id="experts"),
        pytest.param(PIPELINE, id="pipeline", marks=pytest.mark.slow),
        pytest.param({**TENSOR, "expert_tensor_parallel": 2}, id="tensor", marks=pytest.mark.slow),
    ],
)
def test_a_thinker_and_a_whole_omni_come_back_bit_for_bit(
    actor: dict[str, Any], two: Any, folder: str, whole: str, tmp_path: Path
) -> None:
    for answer in two("names", folder=folder, actor=actor):
        assert answer["held"] == answer["said"]
    for source in (folder, whole):
        out = tmp_path / f"{Path(source).name}-out"
        two("round_trip", folder=source, actor=actor, out=str(out), limit=30000)
        _require_equal(_tensors(out), _tensors(source))
        ours, theirs = (json.loads((Path(place) / "config.json").read_text()) for place in (out, source))
        assert ours["model_type"] == theirs["model_type"]


@pytest.mark.parametrize(
    ("actor", "others"),
    [
        pytest.param(EXPERTS, [PIPELINE], id="experts"),
        pytest.param(PIPELINE, [TENSOR, EXPERTS], id="pipeline", marks=pytest.mark.slow),
        pytest.param(
            {**TENSOR, "freeze": ["audio", "vision"]},
            [{**PIPELINE, "freeze": ["audio", "vision"]}],
            id="frozen",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_resumes_bit_for_bit_and_under_another_split(
    actor: dict[str, Any], others: list[dict[str, Any]], two: Any, folder: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "checkpoint")
    saved = two("train_and_save", folder=folder, actor=actor, out=out, vocabulary=VOCABULARY)
    assert two("load_and_go_on", folder=folder, actor=actor, out=out, vocabulary=VOCABULARY) == saved
    for other in others:
        loaded = two("load_and_go_on", folder=folder, actor=other, out=out, vocabulary=VOCABULARY)
        # Gradients after the same moments and weights: equal only if all of them were read to their places.
        assert loaded[0]["norm"] == pytest.approx(saved[0]["norm"], rel=1e-5)
        assert _by_length(loaded) == pytest.approx(_by_length(saved), abs=2e-5)


def _by_length(answers: list[Any]) -> list[float]:
    parts = [part for answer in answers for part in answer["scores"] or []]
    return [score for part in sorted(parts, key=lambda part: (len(part), part)) for score in part]


@pytest.mark.parametrize(
    ("parts", "actor"),
    [
        pytest.param(["audio"], TENSOR, id="audio"),
        pytest.param(["language", "vision"], PIPELINE, id="sound alone", marks=pytest.mark.slow),
        pytest.param(["vision", "audio", "projector"], EXPERTS, id="language alone", marks=pytest.mark.slow),
    ],
)
def test_what_is_frozen_stays_and_the_others_move(
    parts: list[str], actor: dict[str, Any], two: Any, folder: str, tmp_path: Path
) -> None:
    from relax.backends.train.freeze import part_of

    two(
        "save_and_export",
        folder=folder,
        actor={**actor, "freeze": parts},
        out=str(tmp_path),
        vocabulary=VOCABULARY,
    )
    before, after = _tensors(folder), _tensors(tmp_path / "exported")
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still >= {name for name in before if part_of(name) in parts}
    moved = {part_of(name) for name in before.keys() - still}
    assert moved == {"language", "vision", "audio", "projector"} - set(parts)


@pytest.mark.slow
def test_a_checkpoint_converts_to_what_its_ranks_export(
    two: Any, folder: str, whole: str, tmp_path: Path
) -> None:
    from relax.backends.train.megatron.convert import convert

    for source in (folder, whole):
        place = tmp_path / f"{Path(source).name}-made"
        place.mkdir()
        two("save_and_export", folder=source, actor=EXPERTS, out=str(place), vocabulary=VOCABULARY)
        convert(place / "checkpoint", place / "converted", Path(source), limit=30000)
        _require_equal(_tensors(place / "converted"), _tensors(place / "exported"))


def test_routes_are_followed_while_something_is_shown(two: Any, folder: str, tmp_path: Path) -> None:
    found = {}
    for name, actor in (("pipeline", PIPELINE), ("tensor", TENSOR)):
        (tmp_path / name).mkdir()
        answers = two("replayed", folder=folder, actor=actor, out=str(tmp_path / name), vocabulary=VOCABULARY)
        found[name] = load_file(tmp_path / name / "grads")
        if name == "pipeline":  # the router of a tensor rank sees a part of the tokens
            for answer in answers:
                assert answer["followed"]
                assert all(same and count > 30 for same, count in answer["followed"].values())
                assert all(answer["live"].values())
    for key, expected in found["pipeline"].items():
        torch.testing.assert_close(found["tensor"][key], expected, atol=1e-5, rtol=1e-5, msg=key)
    routers = [gradient for key, gradient in found["pipeline"].items() if key.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert all(float(router.abs().max()) > 1e-4 for router in routers)  # probabilities come from live scores
