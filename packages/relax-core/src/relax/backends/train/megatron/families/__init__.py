"""Model families that the backend maps itself: adding one is a file here and an entry below."""

from relax.backends.train.megatron.families.base import Family
from relax.backends.train.megatron.families.llama import LLAMA
from relax.backends.train.megatron.families.qwen2 import QWEN2
from relax.backends.train.megatron.families.qwen3 import QWEN3
from relax.backends.train.megatron.families.qwen3_moe import QWEN3_MOE
from relax.backends.train.megatron.families.qwen3_omni_moe import QWEN3_OMNI_MOE
from relax.backends.train.megatron.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE

FAMILIES: dict[str, Family] = {
    model_type: family
    for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE, QWEN3_OMNI_MOE)
    for model_type in family.model_types
}

__all__ = ["FAMILIES", "Family"]
