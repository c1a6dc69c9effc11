"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts, all or every n-th layer."""

from collections.abc import Mapping
from typing import Any

from relax.backends.train.megatron.families.base import Family, require, shape_of


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    require(config, "hidden_act", "silu")
    require(config, "use_sliding_window", False, None)
    shape = shape_of(config)
    # transformers: softmax over all experts, then the top k, then (norm_topk_prob) their sum made 1. Megatron
    # says the same with a softmax over the chosen logits: exp(a) / sum of chosen exp knows no other.
    normalized = bool(config.get("norm_topk_prob", False))
    return {
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.moe_ffn,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalized,
        "moe_layer_freq": [int(shape.is_moe(layer)) for layer in range(shape.layers)],
    }


QWEN3_MOE = Family(model_types=("qwen3_moe",), fields=_fields, shape=shape_of)
