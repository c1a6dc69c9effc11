"""Adapters of no layer, and weights of another model: told by name before a server or a role is started."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from relax.backends.models import build_model
from relax.backends.tiny import write_tiny
from relax.config import ConfigError
from relax.config.cluster import Cluster, Node
from relax.orchestration.misfits import check_misfits, misfits
from relax.orchestration.resolution import resolve_on

KINDS = ("qwen3", "qwen3_moe", "qwen3_vl")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of each kind, with weights."""
    found = {}
    for kind in KINDS:
        found[kind] = write_tiny(tmp_path_factory.mktemp(kind), kind)
        build_model(found[kind]).save_pretrained(found[kind])
    return found


@pytest.fixture
def served(config: Any) -> Any:
    """A configuration with a server for a folder: served(folder, "actor.lora.rank=2")."""

    def build(folder: Path, *words: str) -> Any:
        return config(f"model={folder}", "data.answer_column=a", "rollout.engine=sglang", *words)

    return build


def said(folder: Path, at: Path, **changes: Any) -> Path:
    """A copy of the folder whose config.json says something else."""
    there = Path(shutil.copytree(folder, at / "model"))
    file = there / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return there


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_as_it_was_saved_fits(kind, folders, served):
    assert list(misfits(served(folders[kind]), folders[kind])) == []


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        (
            "qwen3",
            {"vocab_size": 90},
            r"model.embed_tokens.weight is \[103, 64\] and has to be \[90, 64\]\. Put",
        ),
        (
            "qwen3",
            {"intermediate_size": 96},
            r"mlp.down_proj.weight is .* and has to be \[64, 96\]; .* more\. Put",
        ),
        ("qwen3", {"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ("qwen3_moe", {"num_local_experts": 2}, r"experts.down_proj is \[8, .*\] and has to be \[2, "),
    ],
)
def test_weights_of_another_model_are_named_before_a_server_starts(
    kind, changes, expected, folders, served, tmp_path
):
    folder = said(folders[kind], tmp_path, **changes)
    with pytest.raises(ConfigError, match=rf"(?s)model.path = .* are not those of the model .*{expected}"):
        check_misfits(served(folder), folder)
    # What loads the weights refuses them itself.
    assert list(misfits(served(folder, "rollout.engine=transformers"), folder)) == []


def test_layers_that_are_not_there_take_no_adapter(config, folders):
    words = ("data.answer_column=a", "actor.lora.rank=2")
    assert list(misfits(config(*words), folders["qwen3"])) == []
    (fault,) = misfits(config(*words, "actor.lora.targets=[q_proj, c_attn, gate]"), folders["qwen3"])
    assert fault.startswith(
        "actor.lora.targets names ['c_attn', 'gate'], and the model has no linear layers of"
    )
    assert "q_proj, up_proj, v_proj" in fault
    # Experts are tensors of all of them and no layers.
    (fault,) = misfits(config(*words, "actor.lora.targets=[q_proj, up_proj]"), folders["qwen3_moe"])
    assert "names ['up_proj']" in fault


def test_a_head_that_is_the_embedding_too_takes_no_adapter(config, folders):
    words = ("data.answer_column=a", "actor.lora.rank=2", "actor.lora.targets=[q_proj, lm_head]")
    (fault,) = misfits(config(*words), folders["qwen3"])
    assert fault.startswith("actor.lora.targets names ['lm_head'], whose weight is the embedding's, too")


def test_a_described_cluster_is_told_of_them_too(config, folders):
    words = ("data.answer_column=a", "actor.lora.rank=2", "actor.lora.targets=[c_attn]")
    node = Node("n", cpus=8, gpus=0, gpu_memory=0, memory=2**36)
    found = resolve_on(config(f"model={folders['qwen3']}", *words), Cluster("by hand", (node,)))
    assert any(fault.startswith("actor.lora.targets names ['c_attn']") for fault in found.faults)


def test_adapters_need_peft(config, folders, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (fault,) = misfits(config("data.answer_column=a", "actor.lora.rank=2"), folders["qwen3"])
    assert "actor.lora.rank = 2 needs peft, which is not installed" in fault
