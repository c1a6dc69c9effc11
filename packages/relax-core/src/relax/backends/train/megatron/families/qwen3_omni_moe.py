"""The thinker of Qwen3-Omni: a Qwen3-MoE that sees images and video and hears sound."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dcs.layout import MegatronShape

from relax.backends.train.megatron.families.base import Family, require, shape_of
from relax.backends.train.megatron.families.qwen3_moe import QWEN3_MOE

if TYPE_CHECKING:
    from relax.backends.train.megatron.media import MediaSpec


def _as_qwen3_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's config as that of the text family it is."""
    # transformers' decoder takes time, height and width in turn whatever the config says; others read it.
    require(config.get("rope_parameters") or {}, "mrope_interleaved", True)
    return {**config, "model_type": "qwen3_moe"}


def _shape(config: Mapping[str, Any]) -> MegatronShape:
    return shape_of(_as_qwen3_moe(config))


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return QWEN3_MOE.fields(_as_qwen3_moe(config))


def _media(config: Any) -> "MediaSpec":
    from relax.backends.train.megatron.media.omni import thinker

    return thinker(config)


QWEN3_OMNI_MOE = Family(
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text"),
    fields=_fields,
    shape=_shape,
    media=_media,
    encoders={"vision": "visual.", "audio": "audio_tower."},
)
