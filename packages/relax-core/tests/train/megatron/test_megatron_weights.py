"""Hugging Face to megatron and back, and checkpoints that resume, also under another split."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

# The first test of a session starts the ranks that all of them share: a minute on a busy machine.
pytestmark = pytest.mark.timeout(300)

VOCABULARY = 101
SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
FAMILIES: list[tuple[str, bool, dict[str, Any]]] = [
    ("llama", False, {"tensor_parallel": 2}),
    ("llama", True, {"pipeline_parallel": 2}),
    ("qwen2", True, {"tensor_parallel": 2}),
    ("qwen2", False, {"pipeline_parallel": 2}),
    ("qwen3", True, {"tensor_parallel": 2}),
    ("qwen3", False, {"data_parallel": 2}),
    ("qwen3_moe", True, {"expert_parallel": 2, "data_parallel": 2}),
    (
        "qwen3_moe",
        False,
        {"expert_tensor_parallel": 2, "tensor_parallel": 2, "megatron": SEQUENCE},
    ),
    ("qwen3_vl", True, {"pipeline_parallel": 2}),
    ("qwen3_vl", False, {"tensor_parallel": 2}),
    ("qwen3_vl_moe", False, {"expert_parallel": 2, "data_parallel": 2}),
    ("qwen3_vl_moe", True, {"expert_tensor_parallel": 2, "tensor_parallel": 2, "megatron": SEQUENCE}),
]
SLOW = 10


def _tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        part = load_file(path)
        assert not found.keys() & part.keys()
        found |= part
    return found


@pytest.mark.parametrize(
    ("kind", "tied", "actor"),
    [
        pytest.param(*family, id="-".join(map(str, family)), marks=[pytest.mark.slow] if index > SLOW else [])
        for index, family in enumerate(FAMILIES)
    ],
)
def test_a_family_comes_back_bit_for_bit(
    kind: str, tied: bool, actor: dict[str, Any], two: Any, model: Callable[..., str], tmp_path: Path
) -> None:
    folder = model(kind, tied=tied)
    for answer in two("names", folder=folder, actor=actor):
        assert answer["held"] == answer["said"]
    out = tmp_path / "out"
    two("round_trip", folder=folder, actor=actor, out=str(out))
    source, made = _tensors(folder), _tensors(out)
    assert source.keys() == made.keys()
    assert all(torch.equal(source[name], made[name]) for name in source)
    assert json.loads((out / "config.json").read_text())["model_type"] == kind


@pytest.mark.parametrize(
    "actor",
    [
        pytest.param({"expert_parallel": 2, "data_parallel": 2}, id="experts"),
        pytest.param(
            {"expert_tensor_parallel": 2, "tensor_parallel": 2, "megatron": SEQUENCE},
            id="parts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_experts_that_lie_input_by_output_come_back_so(
    actor: dict[str, Any], two: Any, model: Callable[..., str], tmp_path: Path
) -> None:
    plain = Path(model("qwen3_vl_moe"))
    folder, out = tmp_path / "published", tmp_path / "out"
    shutil.copytree(plain, folder)
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in _tensors(plain).items()
    }
    save_file(turned, folder / "model.safetensors", {"format": "pt"})
    two("round_trip", folder=str(folder), actor=actor, out=str(out))
    made = _tensors(out)
    assert turned.keys() == made.keys()
    assert all(torch.equal(turned[name], made[name]) for name in turned)
    # And they are the same model: read as it is, the plain folder gives the same parts.
    two("round_trip", folder=str(plain), actor=actor, out=str(tmp_path / "again"))
    again = _tensors(tmp_path / "again")
    for name in turned:
        if ".experts." in name:
            assert torch.equal(again[name], made[name].transpose(1, 2))


def test_an_export_in_several_files_has_an_index_and_loads(
    two: Any, model: Callable[..., str], tmp_path: Path
):
    from transformers import AutoModelForCausalLM

    folder = model("qwen3")
    out = tmp_path / "out"
    answers = two("round_trip", folder=folder, actor={"tensor_parallel": 2}, out=str(out), limit=20000)
    files = [name for name in answers[0]["files"] if name.endswith(".safetensors")]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert set(index["weight_map"].values()) == set(files)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(place).eval() for place in (out, folder))
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


RESHARDED: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("qwen3", {"tensor_parallel": 2}, [{"pipeline_parallel": 2}, {"data_parallel": 2}]),
    ("qwen3", {"pipeline_parallel": 2}, [{"tensor_parallel": 2}]),
    (
        "qwen3_moe",
        {"expert_parallel": 2, "data_parallel": 2, "megatron": {"distributed_optimizer": True}},
        [{"pipeline_parallel": 2}, {"tensor_parallel": 2, "megatron": SEQUENCE}],
    ),
    ("qwen3_vl", {"tensor_parallel": 2}, [{"pipeline_parallel": 2}, {"data_parallel": 2}]),
    (
        "qwen3_vl_moe",
        {"expert_parallel": 2, "data_parallel": 2, "megatron": {"distributed_optimizer": True}},
        [{"pipeline_parallel": 2}, {"tensor_parallel": 2, "megatron": SEQUENCE}],
    ),
    (
        "qwen3_vl",
        {"tensor_parallel": 2, "freeze": ["vision"]},
        [
            {"pipeline_parallel": 2, "freeze": ["vision"]},
            {"data_parallel": 2, "freeze": ["vision"], "megatron": {"distributed_optimizer": True}},
        ],
    ),
    (
        "qwen3_vl",
        {"pipeline_parallel": 2, "freeze": ["language"]},
        [{"tensor_parallel": 2, "freeze": ["language"]}],
    ),
]


@pytest.mark.parametrize(
    ("kind", "actor", "others"),
    [
        pytest.param(*RESHARDED[0], id="tensor"),
        pytest.param(*RESHARDED[1], id="pipeline"),
        pytest.param(*RESHARDED[2], id="experts", marks=pytest.mark.slow),
        pytest.param(*RESHARDED[3], id="seeing"),
        pytest.param(*RESHARDED[4], id="seeing-experts", marks=pytest.mark.slow),
        pytest.param(*RESHARDED[5], id="frozen", marks=pytest.mark.slow),
        pytest.param(*RESHARDED[6], id="frozen-language", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_resumes_bit_for_bit_and_under_another_split(
    kind: str,
    actor: dict[str, Any],
    others: list[dict[str, Any]],
    two: Any,
    model: Callable[..., str],
    tmp_path: Path,
) -> None:
    folder, out = model(kind), str(tmp_path / "checkpoint")
    saved = two("train_and_save", folder=folder, actor=actor, out=out, vocabulary=VOCABULARY)
    assert two("load_and_go_on", folder=folder, actor=actor, out=out, vocabulary=VOCABULARY) == saved
    for other in others:
        loaded = two("load_and_go_on", folder=folder, actor=other, out=out, vocabulary=VOCABULARY)
        assert {answer["steps"] for answer in loaded} == {answer["steps"] for answer in saved}
        # Gradients after the same moments and weights: equal only if all of them were read to their places.
        assert loaded[0]["norm"] == pytest.approx(saved[0]["norm"], rel=1e-5)
        assert _by_length(loaded) == pytest.approx(_by_length(saved), abs=1e-5)


def _by_length(answers: list[Any]) -> list[float]:
    """Scores of all micro-batches, whichever rank gave them, in an order of their own."""
    parts = [part for answer in answers for part in answer["scores"] or []]
    return [score for part in sorted(parts, key=len) for score in part]


@pytest.mark.slow
def test_half_precision_keeps_masters_through_a_checkpoint(
    two: Any, model: Callable[..., str], tmp_path: Path
) -> None:
    for kind, name, megatron in (
        ("qwen3", "plain", {}),
        ("qwen3", "split", {"distributed_optimizer": True}),
        ("qwen3_vl", "seeing", {"distributed_optimizer": True}),
    ):
        actor = {"data_parallel": 2, "dtype": "bfloat16", "megatron": megatron}
        out = str(tmp_path / name)
        for answer in two("half", folder=model(kind), actor=actor, vocabulary=VOCABULARY, out=out):
            assert answer["equal"]
            assert answer["kinds"] == ["torch.bfloat16"]
            assert answer["norm"] > 0


@pytest.mark.parametrize(
    ("kind", "actor"),
    [
        pytest.param("qwen3", {"tensor_parallel": 2}, id="qwen3"),
        pytest.param("qwen2", {"pipeline_parallel": 2}, id="qwen2", marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe",
            {"expert_parallel": 2, "data_parallel": 2},
            id="qwen3_moe",
            marks=pytest.mark.slow,
        ),
        pytest.param("qwen3_vl", {"pipeline_parallel": 2}, id="qwen3_vl"),
        pytest.param(
            "qwen3_vl_moe",
            {"expert_parallel": 2, "data_parallel": 2},
            id="qwen3_vl_moe",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_converts_to_what_its_ranks_export(
    kind: str, actor: dict[str, Any], two: Any, model: Callable[..., str], tmp_path: Path
) -> None:
    from relax.backends.train.megatron.convert import convert

    folder = model(kind, tied=not kind.endswith("moe"))
    two("save_and_export", folder=folder, actor=actor, out=str(tmp_path), vocabulary=VOCABULARY)
    files = convert(tmp_path / "checkpoint", tmp_path / "converted", Path(folder), limit=30000)
    assert len(files) > 1
    exported, converted = _tensors(tmp_path / "exported"), _tensors(tmp_path / "converted")
    assert exported.keys() == converted.keys()
    assert all(torch.equal(exported[name], converted[name]) for name in exported)
    (norm,) = (
        name for name in exported if name.endswith(("model.norm.weight", "language_model.norm.weight"))
    )
    assert not torch.equal(exported[norm], _tensors(folder)[norm])


def test_a_damaged_or_foreign_checkpoint_is_refused_by_every_rank_and_names_the_file(
    two: Any, model: Callable[..., str], tmp_path: Path
) -> None:
    folder, actor, whole = model("qwen3"), {"tensor_parallel": 2}, tmp_path / "whole"
    two("train_and_save", folder=folder, actor=actor, out=str(whole), vocabulary=VOCABULARY, steps=1)
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"

    def refused(place: Path, folder: str = folder, actor: dict[str, Any] = actor) -> str:
        answers = two("refused_actor", folder=folder, actor={**actor, "load": str(place)})
        (said,) = {answer["said"] for answer in answers}
        return said

    def cut_short(path: Path) -> None:
        os.truncate(path, path.stat().st_size - 1)

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    (other,) = whole.glob("__1_*")
    for number, (name, damage, message) in enumerate(
        [
            (other.name, cut_short, f"{other.name} has sha256"),
            (other.name, change, f"{other.name} has sha256"),
            (other.name, Path.unlink, f"lacks {other.name}"),
            (".metadata", cut_short, ".metadata has sha256"),
            ("rng-00001.safetensors", Path.unlink, "lacks rng-00001.safetensors"),
            ("sha256-00001.json", Path.unlink, "sha256-00001.json cannot be read"),
            ("relax.json", cut_short, "relax.json has sha256"),
            ("relax.json", Path.unlink, "relax.json is missing"),
        ]
    ):
        place = tmp_path / f"damaged-{number}"
        shutil.copytree(whole, place)
        damage(place / name)
        said = refused(place)
        assert message in said, said
        assert str(place) in said
        assert said.startswith(("StateCorruptError", "StateMissingError")), said
    assert "model_type = qwen3, this one has llama" in refused(whole, model("llama"))
    assert "num_hidden_layers = 2, this one has 4" in refused(whole, model("qwen3", layers=4))
    assert "num_key_value_heads = 2, this one has 4" in refused(whole, model("qwen3", num_key_value_heads=4))
    assert "tie_word_embeddings = True, this one has False" in refused(whole, model("qwen3", tied=False))
    assert "torch.float32, this one is in torch.bfloat16" in refused(
        whole, actor={**actor, "dtype": "bfloat16"}
    )


def test_a_full_disk_is_named_and_older_checkpoints_stay(
    two: Any, model: Callable[..., str], tmp_path: Path
) -> None:
    for answer in two(
        "full_disk",
        folder=model("qwen3"),
        actor={"tensor_parallel": 2},
        out=str(tmp_path),
        vocabulary=VOCABULARY,
    ):
        assert f"state folder {tmp_path / 'new'} cannot be written" in answer["said"]
        assert "File too large" in answer["said"]
        assert answer["steps"] == 1
        assert answer["left"] == ["new", "old"]


@pytest.mark.slow
def test_the_conversion_tool_says_what_is_wrong(model: Callable[..., str], tmp_path: Path) -> None:
    tool = Path(__file__).parents[5] / "scripts" / "tools" / "convert_torch_dist_to_hf_bridge.py"
    arguments = ["--input-dir", str(tmp_path), "--output-dir", str(tmp_path / "out"), "--origin-hf-dir"]
    found = subprocess.run(
        [sys.executable, str(tool), *arguments, model("qwen3")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 1
    assert "is no torch_dist checkpoint" in found.stderr
