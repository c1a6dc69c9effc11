"""Model families: what each kind of model wants its media turned into.

A family is one module with a `create` function, and one line here. A module is imported when its family is
first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from omni_processor.errors import ConfigError
from omni_processor.families.base import Family

FAMILIES: dict[str, str] = {
    "text": "omni_processor.families.text",
    "qwen3_vl": "omni_processor.families.qwen3_vl",
    "qwen3_omni": "omni_processor.families.qwen3_omni",
}
"""Family name -> module with ``create(tokenizer, config, preprocessor, video) -> Family``."""

MODEL_TYPES: dict[str, str] = {
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_omni_moe": "qwen3_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni",
}
"""``model_type`` of a config.json -> family name. Models without media of their own are family ``text``."""


def create(
    name: str,
    tokenizer: Any,
    config: Mapping[str, Any] | None = None,
    preprocessor: Mapping[str, Any] | None = None,
    video_preprocessor: Mapping[str, Any] | None = None,
) -> Family:
    """Make a family by name.

    Args:
        name: a key of `FAMILIES`.
        tokenizer: the model's transformers tokenizer.
        config: the model's config.json as a dict; may be left out when the tokenizer says enough.
        preprocessor: its (image) preprocessor config as a dict; left out, the family's published defaults
            hold.
        video_preprocessor: its video preprocessor config as a dict; left out, the image's is read for it.

    Raises:
        ConfigError: an unknown name, or configs the family cannot follow.
    """
    if name not in FAMILIES:
        raise ConfigError(f"no model family {name!r}: known are {', '.join(sorted(FAMILIES))}")
    module = importlib.import_module(FAMILIES[name])
    return module.create(tokenizer, config or {}, preprocessor or {}, video_preprocessor or {})


def family_of(config: Mapping[str, Any]) -> str:
    """The family a config.json belongs to.

    Raises:
        ConfigError: a model with media towers of no known family.
    """
    model_type = config.get("model_type", "")
    if model_type in MODEL_TYPES:
        return MODEL_TYPES[model_type]
    towers = sorted(key for key in ("vision_config", "audio_config", "thinker_config") if key in config)
    if towers:
        raise ConfigError(
            f"model_type {model_type!r} has {', '.join(towers)} but no family here: known are "
            f"{', '.join(sorted(MODEL_TYPES))}; family='text' uses its text alone"
        )
    return "text"


__all__ = ["FAMILIES", "MODEL_TYPES", "Family", "create", "family_of"]
