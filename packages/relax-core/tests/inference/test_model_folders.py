"""Model folders that are damaged or not what they say: refused with the file's name, by every reader."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax.backends.inference.errors import EngineError
from relax.backends.inference.sglang.model import ServedModel
from relax.backends.model_files import INDEX, SINGLE, ModelFolderError, read_config, weight_files
from relax.backends.models import build_model, load_config
from relax.backends.tiny import write_tiny
from relax.config import ConfigError, RunConfig
from relax.orchestration.model_folder import check_folder

SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("whole"))
    build_model(folder).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def said(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def written(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(
        content.encode() if isinstance(content, str) else content
    )


def cut(folder: Path) -> None:
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:-5])


def split(index: Any) -> Callable[[Path], object]:
    """The weights as the first of two shards, with that index; None: without one."""

    def change(folder: Path) -> None:
        (folder / SINGLE).rename(folder / SHARD)
        if index is not None:
            (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))

    return change


FILES = {
    "a config that is no JSON": (written("config.json", "{nope"), "config.json cannot be read"),
    "a config that is no text": (written("config.json", b"\xff\xfe\x00"), "config.json cannot be read"),
    "a list": (written("config.json", "[1]"), "config.json: it holds a list, and keys and values"),
    "nothing": (written("config.json", "null"), "config.json: it holds a NoneType"),
    "a model of no type": (said(model_type=None), "config.json: model_type = None, and it has to name"),
    "a size that is a word": (said(hidden_size="big"), "config.json: hidden_size = 'big', and it has to be"),
    "a size that is negative": (said(num_hidden_layers=-1), "num_hidden_layers = -1"),
    "a size that is true": (said(num_attention_heads=True), "num_attention_heads = True"),
    "a context of none": (said(max_position_embeddings=0), "max_position_embeddings = 0"),
    "a part that is a word": (said(text_config="x"), "config.json: text_config holds a str"),
    "a size of a part": (said(text_config={"vocab_size": "x"}), "text_config.vocab_size = 'x'"),
    "weights that end early": (cut, "model.safetensors is damaged .*copied or downloaded to the end"),
    "weights of no bytes": (written(SINGLE, b""), "model.safetensors is damaged"),
    "an index that is no JSON": (split("{"), "model.safetensors.index.json cannot be read"),
    "an index of nothing": (split([]), "model.safetensors.index.json cannot be read"),
    "an index of numbers": (split({"weight_map": {"a": 1}}), "has to name a file for each tensor"),
    "a shard that is not there": (
        split({"weight_map": {"a": "b.safetensors"}}),
        "b.safetensors is not there",
    ),
}


@pytest.mark.parametrize("damage", FILES)
def test_damaged_files_are_told_of_before_anything_is_started(damage: str, folder: Path) -> None:
    spoil, message = FILES[damage]
    spoil(folder)
    read = read_config if "config" in message or " = " in message else weight_files
    with pytest.raises(ModelFolderError, match=message):
        read(folder)
    with pytest.raises(ConfigError, match=message):
        check_folder(folder, RunConfig.model_validate({"model": str(folder)}))
    with pytest.raises(EngineError, match=message):
        ServedModel.read(folder, "float32", folder / "completed", 0)


def test_shards_without_an_index_are_no_weights(folder: Path) -> None:
    """They are not passed over for weights that are drawn at random."""
    split(None)(folder)
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        check_folder(folder, RunConfig.model_validate({"model": str(folder)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "big"}, "config.json cannot be read by transformers: .*'hidden_size'"),
        ({"num_hidden_layers": 3}, "config.json cannot be read by transformers"),
        ({"rope_parameters": "x"}, "config.json cannot be read by transformers"),
        ({"model_type": "qwen9"}, "config.json cannot be read by transformers: .*`qwen9`"),
        ({"dtype": "float7"}, "config.json cannot be read by transformers: .*float7"),
    ],
)
def test_what_transformers_does_not_understand_is_named_with_its_file(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    said(**changes)(folder)
    with pytest.raises(ModelFolderError, match=rf"(?s){message}"):
        load_config(folder)


@pytest.mark.parametrize(
    ("changes", "weights", "message"),
    [
        ({"hidden_act": "zzz"}, True, "no model can be made of .*config.json: KeyError: 'zzz'"),
        ({"hidden_act": "zzz"}, False, "no model can be made of .*config.json: KeyError: 'zzz'"),
        (
            {"vocab_size": 10},
            True,
            r"do not fit Qwen3ForCausalLM, which its config.json .*embed_tokens.weight is \[103, 64\], "
            r"expected \[10, 64\]",
        ),
        ({"model_type": "qwen3_moe"}, True, "do not fit Qwen3MoeForCausalLM.*missing_keys.*mlp.experts"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(
    changes: dict[str, Any], weights: bool, message: str, folder: Path
) -> None:
    said(**changes)(folder)
    with pytest.raises(ModelFolderError, match=rf"(?s){message}"):
        build_model(folder, weights=weights)
