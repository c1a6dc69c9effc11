"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from collections.abc import Mapping
from typing import Any

from relax.backends.train.megatron.families.base import Family, require, shape_of


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    require(config, "hidden_act", "silu")
    require(config, "use_sliding_window", False, None)
    return {"qk_layernorm": False, "add_qkv_bias": True}


QWEN2 = Family(model_types=("qwen2",), fields=_fields, shape=shape_of)
