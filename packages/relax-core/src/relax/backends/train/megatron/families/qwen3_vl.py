"""Qwen3-VL: a Qwen3 or Qwen3-MoE that sees images and videos."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dcs.layout import MegatronShape

from relax.backends.train.megatron.families.base import Family, require, shape_of
from relax.backends.train.megatron.families.qwen3 import QWEN3
from relax.backends.train.megatron.families.qwen3_moe import QWEN3_MOE

if TYPE_CHECKING:
    from relax.backends.train.megatron.media import MediaSpec


def _as_qwen3(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The decoder's config as that of the text family it is."""
    require(config.get("rope_parameters") or {}, "mrope_interleaved", True)
    # A Qwen3-VL always makes the weights of a token's experts sum to 1.
    return {**config, "model_type": kind, "norm_topk_prob": True}


def _shape(config: Mapping[str, Any]) -> MegatronShape:
    return shape_of(_as_qwen3(config, "qwen3"))


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return QWEN3.fields(_as_qwen3(config, "qwen3"))


def _moe_shape(config: Mapping[str, Any]) -> MegatronShape:
    return shape_of(_as_qwen3(config, "qwen3_moe"))


def _moe_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return QWEN3_MOE.fields(_as_qwen3(config, "qwen3_moe"))


def _media(config: Any) -> "MediaSpec":
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    from relax.backends.train.megatron.media.vision import qwen3_vl

    return qwen3_vl(config, Qwen3VLVisionModel)


def _moe_media(config: Any) -> "MediaSpec":
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

    from relax.backends.train.megatron.media.vision import qwen3_vl

    return qwen3_vl(config, Qwen3VLMoeVisionModel)


QWEN3_VL = Family(
    model_types=("qwen3_vl", "qwen3_vl_text"),
    fields=_fields,
    shape=_shape,
    decoder="model.language_model.",
    media=_media,
    encoders={"vision": "model.visual."},
)
QWEN3_VL_MOE = Family(
    model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    fields=_moe_fields,
    shape=_moe_shape,
    decoder="model.language_model.",
    media=_moe_media,
    encoders={"vision": "model.visual."},
    fused_experts=True,
)
