"""The policy's folder: made on the spot, given, or from the hub; checked before anything starts."""

import inspect
import json
from pathlib import Path

from relax.backends.model_files import INDEX, SINGLE, ModelFolderError, read_config, weight_files
from relax.backends.tiny import write_tiny
from relax.config import ConfigError, RunConfig
from relax.registry import nearest

TINY = {"tiny": "qwen3", "tiny_moe": "qwen3_moe", "tiny_vl": "qwen3_vl", "tiny_omni": "qwen3_omni"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def model_folder(config: RunConfig, made_at: Path) -> Path:
    """The local folder with the policy's config, tokenizer and, unless tiny, weights.

    Args:
        config: of the run.
        made_at: where a tiny model is written, or was by an earlier start of the run.

    Raises:
        ConfigError: the folder lacks what a run needs, or the hub has no such model.
    """
    path = config.model.path
    if path in TINY:
        if not (made_at / "config.json").is_file():
            sizes = [
                name for name in inspect.signature(write_tiny).parameters if name not in ("folder", "kind")
            ]
            for name in config.model.tiny:
                if name not in sizes:
                    raise ConfigError(
                        f"model.tiny.{name} = {config.model.tiny[name]}: there is no such size"
                        f"{nearest(name, sizes)}; there are {', '.join(sizes)}"
                    )
            try:
                write_tiny(made_at, TINY[path], **config.model.tiny)  # pyright: ignore[reportArgumentType]
            except (TypeError, ValueError) as error:
                raise ConfigError(f"model.tiny = {config.model.tiny}: {error}") from error
        return made_at
    if config.model.tiny:
        raise ConfigError(f"model.tiny is for model.path = {', '.join(TINY)}, not {path!r}")
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith(".") or folder.exists():
            raise ConfigError(f"model.path = {path!r}: there is no such folder")
        folder = _from_hub(config)
    check_folder(folder, config)
    return folder.absolute()


def check_folder(folder: Path, config: RunConfig) -> None:
    """Raise ConfigError for a folder that a run could not use."""
    path = config.model.path
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path = {path!r}: {folder} has no config.json, so it is no Hugging Face model folder"
        )
    try:
        content = read_config(folder)
    except ModelFolderError as error:
        raise ConfigError(f"model.path = {path!r}: {error}") from error
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model.path = {path!r}: {folder} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); "
            f"save one there "
            "with tokenizer.save_pretrained(folder)"
        )
    try:
        weights = weight_files(folder)
    except ModelFolderError as error:
        raise ConfigError(f"model.path = {path!r}: {error}") from error
    if not weights:
        raise ConfigError(
            f"model.path = {path!r}: {folder} has no *.safetensors weights, neither {SINGLE} nor {INDEX}; "
            f"save them with model.save_pretrained(folder)"
        )
    own = (content.get("text_config") or content).get("max_position_embeddings")
    if own and config.rollout.max_new_tokens >= own:
        raise ConfigError(
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens} leaves no room for a prompt in the "
            f"model's context "
            f"of {own} tokens"
        )


def _from_hub(config: RunConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    path = config.model.path
    try:
        return Path(
            snapshot_download(
                path,
                revision=config.model.revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
            )
        )
    except HFValidationError as error:
        raise ConfigError(f"model.path = {path!r} is neither a local folder nor a hub id: {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model.path = {path!r}: there is no such local folder, and the hub did not give it ({error}); "
            "for a local model give the path of its folder"
        ) from error


def takes_media(folder: Path) -> bool:
    """Whether the model sees or hears."""
    content = json.loads((folder / "config.json").read_text())
    return any(tower in content for tower in ("vision_config", "audio_config", "thinker_config"))
