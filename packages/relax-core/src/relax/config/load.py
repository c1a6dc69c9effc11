"""Read a configuration: defaults, the YAML file, the `RELAX_...` environment, then `key=value` words."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from relax.config.base import ConfigError
from relax.config.run import RunConfig

ENV_PREFIX = "RELAX_"
OPENING = "\"'{["
SHORT_FORMS = {"model": "path", "data": "path", "environment": "name", "reward": "name", "algorithm": "name"}
"""Keys that may be given as one word, and the sub-key the word then means."""


def load(file: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Resolve a configuration.

    Args:
        file: YAML file, or None for the defaults alone.
        overrides: words `dotted.key=value`; values are read as YAML.

    Raises:
        ConfigError: unreadable file, unknown key (the nearest is named), wrong value.
    """
    return resolve(
        _read(file) if file else {}, parse_overrides(overrides), str(file) if file else "the defaults"
    )


def resolve(content: Mapping[str, Any], overrides: Mapping[str, Any], origin: str) -> RunConfig:
    """Merge a mapping, the environment and overrides (strongest last) into a checked configuration."""

    content, overrides = _long(content), _long(overrides)
    for key in ("reward", "environment"):
        chosen, given = overrides.get(key), content.get(key)
        if (
            isinstance(chosen, dict)
            and isinstance(given, dict)
            and chosen.get("name") not in (None, given.get("name"))
        ):
            content[key] = {}  # arguments of another thing than the one that is chosen now

    class Loader(RunConfig, BaseSettings):
        model_config = SettingsConfigDict(
            extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter="__"
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                InitSettingsSource(settings_cls, init_kwargs=overrides),
                EnvSettingsSource(settings_cls),
                InitSettingsSource(settings_cls, init_kwargs=content),
            )

    try:
        loaded = Loader()
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None
    return RunConfig.model_validate(loaded.model_dump())


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`["actor.lr=1e-6"]` -> `{"actor": {"lr": 1e-6}}`."""
    tree: dict[str, Any] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise ConfigError(f"{word!r} is not of the form key=value, for example actor.lr=1e-6")
        node = tree
        *path, last = key.split(".")
        for part in path:
            if part in SHORT_FORMS and isinstance(node.get(part), str):
                node[part] = {SHORT_FORMS[part]: node[part]}
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{word!r}: {part!r} was already given a value of its own")
        node[last] = _scalar(text, word)
    return tree


def dump(config: RunConfig) -> str:
    """The configuration as YAML that `load` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.yaml")], 1)
        hint = f"; {file.parent / near[0]} is there" if near else ""
        raise ConfigError(f"no configuration file {file}{hint}") from None
    except IsADirectoryError:
        inside = file / "config.yaml"
        hint = f"; {inside} is there" if inside.is_file() else ""
        raise ConfigError(f"{file} is a folder, and no configuration file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a {type(content).__name__}, expected keys and values")
    return content


def _scalar(text: str, word: str) -> Any:
    """A value as YAML; but without quotes or brackets it is one word: a path may hold `#` or `: `."""
    if not text:
        return ""
    whole = text[0] in OPENING
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        if not whole:
            return text
        raise ConfigError(f"{word!r}: the value is not YAML: {error}") from None
    if isinstance(value, str) and not whole:  # YAML 1.1 reads 1e-6 as text
        try:
            return float(value) if any(c.isdigit() for c in value) and "_" not in value else text
        except ValueError:
            return text
    if (isinstance(value, dict | list) and not whole) or (value is None and text[0] not in "nN~"):
        return text
    return value


def _long(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Short forms written out, so that sources merge key by key."""
    return {
        key: {SHORT_FORMS[key]: value} if key in SHORT_FORMS and isinstance(value, str) else value
        for key, value in tree.items()
    }


def _explain(error: ValidationError, origin: str) -> str:
    lines = []
    for item in error.errors():
        if item["type"] == "default_factory_not_called":  # follows from another fault that is listed
            continue
        path = [str(part) for part in item["loc"]]
        key = ".".join(path)
        if item["type"] == "extra_forbidden":
            lines.append(f"{key} = {item['input']!r}: there is no such key{_nearest(path)}")
        elif item["type"] in ("model_type", "model_attributes_type") and (group := _group(path)) is not None:
            lines.append(
                f"{key} = {item['input']!r}: it has keys of its own: {', '.join(group.model_fields)}"
            )
        else:
            lines.append(f"{key} = {item['input']!r}: {item['msg']}")
    return f"{origin} (with the words and RELAX_ variables given):\n  " + "\n  ".join(lines)


def _group(path: Sequence[str]) -> type[BaseModel] | None:
    """The settings that a path of keys leads to; None where it leads to none."""
    model: type[BaseModel] = RunConfig
    for part in path:
        field = model.model_fields.get(part)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return None
        model = annotation
    return model


def _nearest(path: Sequence[str]) -> str:
    model = _group(path[:-1])
    if model is None:
        return ""
    every = _all_keys(RunConfig)
    here = difflib.get_close_matches(path[-1], list(model.model_fields), 1, cutoff=0.5)
    if here:
        return f"; did you mean {'.'.join([*path[:-1], here[0]])}?"
    moved = [key for key in every if key.rsplit(".", 1)[-1] == path[-1]]
    if moved:
        return f"; did you mean {moved[0]}?"
    return f"; the keys here are {', '.join(model.model_fields)}"


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys
