"""Reading a model folder (or a hub id): its configs and its tokenizer, and nothing of the model itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_processor.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]
_SLOW_TOKENIZERS = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model folder says about its inputs. Absent JSON files are empty dicts."""

    folder: Path
    tokenizer: Any
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    video_preprocessor: Mapping[str, Any]
    generation_config: Mapping[str, Any]


def read_model(name: str | os.PathLike[str], revision: str | None = None) -> ModelFiles:
    """Read a local folder, or fetch the small files of a hub id into transformers' own cache.

    Raises:
        ConfigError: no such folder or id, a file missing or not JSON, or no tokenizer.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = _from_hub(os.fspath(name), revision)
    config = _read_json(folder / "config.json")
    nested = _read_json(folder / "processor_config.json")
    return ModelFiles(
        folder=folder,
        tokenizer=_load_tokenizer(folder),
        config=config,
        preprocessor=_read_json(folder / "preprocessor_config.json")
        or {**(nested.get("feature_extractor") or {}), **(nested.get("image_processor") or {})},
        video_preprocessor=nested.get("video_processor")
        or _read_json(folder / "video_preprocessor_config.json"),
        generation_config=_read_json(folder / "generation_config.json"),
    )


def _from_hub(name: str, revision: str | None) -> Path:
    if Path(name).exists():
        raise ConfigError(f"{name} is a file: pass the model's folder")
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(
            f"there is no folder {name}, and that is no hub id (owner/name) either: check the path"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES))
    except (OSError, ValueError) as error:  # its HTTP errors are OSErrors, its cache and name errors either
        raise ConfigError(
            f"there is no folder {name} here, and as a hub id it cannot be fetched: {error} "
            "(check the name, or download the model and pass its folder)"
        ) from error


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; an object was expected")
    return value


def _load_tokenizer(folder: Path) -> Any:
    try:
        if (folder / "tokenizer.json").exists():
            # This class reads tokenizer.json as it stands and imports neither torch nor any model class.
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        elif any((folder / name).exists() for name in _SLOW_TOKENIZERS):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        else:
            raise ConfigError(
                f"{folder} has no tokenizer (tokenizer.json): save one there with tokenizer.save_pretrained"
            )
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = _read_json(folder / "chat_template.json").get("chat_template")
    return tokenizer
