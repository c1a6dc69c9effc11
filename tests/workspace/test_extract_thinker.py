"""The thinker of an omni model, written as a model of its own."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file


@pytest.fixture
def whole(tmp_path):
    folder = tmp_path / "omni"
    folder.mkdir()
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": {"hidden_size": 4}}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": thinker, "talker_config": {}})
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    first = {"thinker.model.a": np.arange(4, dtype=np.float32), "talker.b": np.ones(2, np.float32)}
    save_file(first, folder / "model-1.safetensors")
    save_file({"thinker.audio_tower.c": np.zeros(3, np.float16)}, folder / "model-2.safetensors")
    save_file({"code2wav.d": np.zeros(3, np.float32)}, folder / "model-3.safetensors")
    return folder


def extract(root, *words):
    command = [sys.executable, str(root / "scripts/tools/extract_thinker.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_it_has_the_thinkers_tensors_config_and_tokenizer(root, whole, tmp_path):
    out = tmp_path / "thinker"
    done = extract(root, whole, out)
    assert done.stdout == f"2 tensors written to {out}\n", done.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen3_omni_moe_thinker"
    assert config["architectures"] == ["Qwen3OmniMoeThinkerForConditionalGeneration"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 4 + 3 * 2
    held = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert held.keys() == {"model.a", "audio_tower.c"}
    np.testing.assert_array_equal(held["model.a"], np.arange(4, dtype=np.float32))
    assert held["audio_tower.c"].dtype == np.float16
    assert (out / "tokenizer.json").read_text() == "{}"
    assert extract(root, whole, out).returncode == 1  # what is there is not written over


def test_a_model_without_a_thinker_is_refused(root, whole, tmp_path):
    (whole / "config.json").write_text('{"model_type": "qwen3"}')
    done = extract(root, whole, tmp_path / "out")
    assert done.returncode == 1
    assert "is a 'qwen3' without a thinker" in done.stderr
    assert not (tmp_path / "out").exists()
