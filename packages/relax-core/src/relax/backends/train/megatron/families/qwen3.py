"""Qwen3: no biases, a norm on every head of q and k."""

from collections.abc import Mapping
from typing import Any

from relax.backends.train.megatron.families.base import Family, require, shape_of


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    require(config, "hidden_act", "silu")
    require(config, "use_sliding_window", False, None)
    return {"qk_layernorm": True, "add_qkv_bias": False}


QWEN3 = Family(model_types=("qwen3",), fields=_fields, shape=shape_of)
