"""The weight of balancing losses where several ranks share a micro-batch."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count
from megatron.core.transformer.transformer_config import TransformerConfig

_TOKENS = 2


def correct(config: TransformerConfig, device: torch.device) -> None:
    """Make the load-balancing loss of a config weigh what it says. Every rank calls it, once the groups are
    up and before the model is built.

    megatron-core 0.19 multiplies that loss by a rank's own tokens, but with a padding mask it counts them
    after the sum over the group has been written over them: the loss weighs as many times too much as ranks
    share it. So the count is asked for, and the coefficient divided by what it is off by (1: nothing).
    """
    coefficient = config.moe_aux_loss_coeff
    if not coefficient or not isinstance(coefficient, float):
        return
    group: Any = (
        parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        if config.moe_router_load_balancing_type == "global_aux_loss"
        else parallel_state.get_tensor_and_context_parallel_group()
    )
    routed = torch.ones(_TOKENS, 1, dtype=torch.bool, device=device)
    _, own, _ = get_tokens_per_expert_and_token_count(routed, group, topk=1, with_padding_mask=True)
    config.moe_aux_loss_coeff = coefficient * _TOKENS / float(own)
