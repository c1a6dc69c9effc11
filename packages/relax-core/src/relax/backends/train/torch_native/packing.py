"""A micro-batch without padding: its rows end to end as one sequence, attention kept inside each row.

Whatever works on one token (norms, projections, MLP) meets no padding. Attention takes a mask of blocks on
the diagonal, what any implementation that takes a mask can do; it costs the square of the tokens, so rows
should differ much in length for it to pay.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relax.backends.models import text_config
from relax.backends.train.base import Packed


@dataclass(frozen=True)
class Blocks:
    """A micro-batch as one sequence.

    Attributes:
        input_ids: int64 [1, total].
        position_ids: int64 [1, total], of each token in its row.
        mask: bool [1, 1, total, total]: what each token sees, which is its own row up to itself.
        predictors: int64 [total response], index into [total] of what predicts each response token.
        targets: int64 [total response], the response tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    predictors: Tensor
    targets: Tensor

    def hidden_states(self, decoder: nn.Module, **arguments: Any) -> Tensor:
        """Last hidden state [1, total, hidden] of a model that `can_pack`."""
        return decoder(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            attention_mask=self.mask,
            use_cache=False,
            **arguments,
        ).last_hidden_state


def can_pack(model: Any) -> bool:
    """Whether each layer's attention sees all before it, so that one mask says what it sees in a block."""
    config = text_config(model.config)
    layers = getattr(config, "layer_types", None) or ()
    return set(layers) <= {"full_attention"} and not getattr(config, "sliding_window", None)


def lay_end_to_end(batch: Packed) -> Blocks:
    """Lay out a micro-batch that `padding.check` passed."""
    device = batch.tokens.device
    lengths = batch.offsets.diff()
    rows = torch.repeat_interleave(torch.arange(batch.rows, device=device), lengths)
    places = torch.arange(len(batch.tokens), device=device)
    positions = places - batch.offsets[:-1][rows]
    response = positions >= batch.prompt_lengths[rows]
    predicted = response.nonzero().flatten()
    mask = (rows[:, None] == rows) & (places[:, None] >= places)
    return Blocks(
        input_ids=batch.tokens[None],
        position_ids=positions[None],
        mask=mask[None, None],
        predictors=predicted - 1,
        targets=batch.tokens[predicted],
    )
