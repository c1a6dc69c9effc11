"""How token losses become one number, as a weighted sum and a divisor that both add up over micro-batches.

Whatever the split into micro-batches, ranks or packs, sum(sums) / sum(counts) is the same mean over the whole
batch.
"""

import torch
from torch import Tensor

from relax.algorithms.settings import Aggregation


def token_weights(
    active: Tensor, offsets: Tensor, aggregation: Aggregation, max_length: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weight of each token in the loss sum, and what that sum is divided by in the end.

    A row without a sampled token counts nowhere, so that a dummy row (a copy with mask 0) changes nothing.

    Args:
        active: bool [tokens], the tokens the policy sampled.
        offsets: int64 [rows+1].
        aggregation: `token`: weight 1, count = active tokens. `sequence`: weight 1 / (active tokens of the
            row), count = rows. `fixed`: weight 1, count = rows * max_length.
        max_length: for `fixed`.
        dtype: of the weights.

    Returns:
        weights [tokens], 0 where not active, and the count, a scalar.
    """
    if aggregation == "token":
        return active.to(dtype), active.sum()
    of_row = torch.nn.functional.pad(active.cumsum(0), (1, 0))[offsets].diff()
    rows = (of_row > 0).sum()
    if aggregation == "fixed":
        assert max_length is not None  # GRPOSettings refuses it
        return active.to(dtype), rows * max_length
    of_token = torch.repeat_interleave(of_row.clamp(min=1), offsets.diff(), output_size=len(active))
    return active.to(dtype) / of_token, rows
