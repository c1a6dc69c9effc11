"""What the files of a model folder say, without building anything: config.json and the weights' index.

Read by commands that must answer in seconds, so neither torch nor transformers is imported.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
INNER = ("text_config", "thinker_config", "vision_config", "audio_config")
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


class ModelFolderError(ValueError):
    """A model folder that cannot be used: what is missing or does not fit, and where."""


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json, its parts being mappings and its sizes positive whole numbers.

    Raises:
        ModelFolderError: naming the file, the key and its value.
    """
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{file} cannot be read: {error}") from error
    _check(file, content, "")
    if not isinstance(content.get("model_type"), str):
        raise ModelFolderError(
            f"{file}: model_type = {content.get('model_type')!r}, and it has to name a family of "
            f"transformers, such as 'qwen3'; take the config.json that the model was saved with"
        )
    return content


def _check(file: Path, content: Any, at: str) -> None:
    if not isinstance(content, dict):
        raise ModelFolderError(
            f"{file}: {at.rstrip('.') or 'it'} holds a {type(content).__name__}, and keys and values are "
            f"expected; take the config.json that the model was saved with"
        )
    for name in SIZES:
        size = content.get(name, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ModelFolderError(
                f"{file}: {at}{name} = {size!r}, and it has to be a whole number above 0; take the "
                f"config.json that the model was saved with"
            )
    for name in INNER:
        if content.get(name) is not None:
            _check(file, content[name], f"{at}{name}.")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors that hold the weights, their headers read; none where there are no weights.

    Raises:
        ModelFolderError: naming the file that is missing or damaged.
    """
    files = [folder / name for name in _listed(folder)]
    for file in files:
        if not file.is_file():
            raise ModelFolderError(
                f"{file} is not there, and {folder / INDEX} says that it holds weights: was the model copied "
                f"or downloaded to the end?"
            )
        try:
            with safe_open(file, "np"):
                pass
        except (OSError, SafetensorError) as error:
            raise ModelFolderError(
                f"{file} is damaged ({error}): was it copied or downloaded to the end?"
            ) from error
    return files


def _listed(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return [SINGLE] if (folder / SINGLE).is_file() else []
    try:
        names = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelFolderError(f"{index} cannot be read: {error!r}") from error
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
        raise ModelFolderError(f"{index}: weight_map has to name a file for each tensor")
    return sorted(set(names.values()))
