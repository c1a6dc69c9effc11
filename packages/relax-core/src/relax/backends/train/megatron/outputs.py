"""From the last hidden states to what is asked of them: logprobs of response tokens, or a critic's values."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor
from torch.nn import functional

from relax.backends.train.megatron.packing import Sequence
from relax.backends.train.megatron.value_head import ValueHead
from relax.backends.train.padding import UNSCORED


@dataclass(frozen=True)
class Scoring:
    """What turns hidden states into numbers.

    Attributes:
        temperature: logits are divided by it.
        sequence_parallel: hidden states come as this tensor rank's stretch.
        never: int64, columns of this tensor rank's logits that no policy may say: padding of the vocabulary,
            and tokens that only stand for media.
    """

    temperature: float
    sequence_parallel: bool
    never: Tensor


def columns_never_said(
    vocabulary: int, padded: int, unsampled: tuple[int, ...], device: torch.device
) -> Tensor:
    """`Scoring.never` for this tensor rank.

    Args:
        vocabulary: token ids that there are.
        padded: rows of the whole embedding.
        unsampled: token ids that only stand for media.
        device: of the result.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    first = parallel_state.get_tensor_model_parallel_rank() * (padded // size)
    own = range(first, first + padded // size)
    never = [token for token in (*unsampled, *range(vocabulary, padded)) if token in own]
    return torch.tensor([token - first for token in never], dtype=torch.int64, device=device)


def scored(
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: tuple[Scoring, Sequence],
    **ignored: object,
) -> Tensor:
    """GPTModel's `output_processor`: float32 [all response tokens] from hidden [own tokens, 1, hidden].

    Only positions that predict a response token meet the output layer: vocabularies are large. Every rank of
    a stage returns the numbers of the whole micro-batch, so that a loss may look at whole rows.
    """
    scoring, batch = context
    hidden = hidden_states.flatten(0, 1)
    if scoring.sequence_parallel:
        # Every tensor rank goes on with the same, so a gradient is split in the backward, not added up.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    hidden = hidden.index_select(0, batch.predictors)
    if isinstance(output_layer, ValueHead):
        own = output_layer(hidden)
    else:
        weight = output_weight if output_weight is not None else output_layer.weight
        own = _logprobs(hidden, weight, batch.targets, scoring)
    everywhere = own.new_zeros(batch.response_count).index_copy(0, batch.responses, own)
    if parallel_state.get_context_parallel_world_size() > 1:
        # The sum's gradient is the same on every rank; each keeps what belongs to its own tokens.
        group = parallel_state.get_context_parallel_group()
        return reduce_from_tensor_model_parallel_region(everywhere, group=group)
    return everywhere


def _logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, scoring: Scoring) -> Tensor:
    hidden = copy_to_tensor_model_parallel_region(hidden)
    logits = functional.linear(hidden, weight).float()
    if scoring.temperature != 1.0:
        logits = logits / scoring.temperature
    if len(scoring.never):
        logits = logits.index_fill(1, scoring.never, -torch.inf)
    scored = targets != UNSCORED
    losses = vocab_parallel_cross_entropy(logits[:, None], targets.masked_fill(~scored, 0)[:, None])[:, 0]
    # Its gradient at a token that is not scored has to be 0, and a logprob of -inf must not reach it.
    return torch.where(scored, -losses, 0.0)
