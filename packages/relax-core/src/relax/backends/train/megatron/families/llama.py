"""Llama, and what is built exactly like it (Mistral's files name another model_type and are not read)."""

from collections.abc import Mapping
from typing import Any

from relax.backends.train.megatron.families.base import Family, require, shape_of


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    require(config, "hidden_act", "silu")
    return {"qk_layernorm": False, "add_qkv_bias": False}


LLAMA = Family(model_types=("llama",), fields=_fields, shape=shape_of)
