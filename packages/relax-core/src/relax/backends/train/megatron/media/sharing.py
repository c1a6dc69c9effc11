"""Encoding in parallel: the ranks of a stage that share a micro-batch share its images too.

Tensor- and context-parallel ranks have the same micro-batch and the same encoders. Each encodes some of the
items, and a gather brings the rows of all of them to every rank. Its backward adds up what the ranks say
about each row and gives it to the rank that made it: the gradient of an encoder's weights then is a part on
every rank, to be added up by whoever finishes gradients (see `mark_parts`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from relax.backends.train.megatron.media.inputs import Item


def encode(encoder: nn.Module, items: Sequence[Item], shape: tuple[int, int], *, shared: bool) -> Tensor:
    """[rows of all items, *shape] on every rank of the first stage; all of them call it alike.

    Args:
        encoder: an `Encoder`.
        items: of the micro-batch, at least one.
        shape: of one row.
        shared: each rank encodes a part; False: each encodes all.
    """
    group: Any = parallel_state.get_tensor_and_context_parallel_group()
    size = group.size()
    if not shared or size == 1:
        return encoder(items)
    owners = dealt([item.cost for item in items], size)
    mine = [item for item, owner in zip(items, owners, strict=True) if owner == group.rank()]
    held = [0] * size
    order: list[Tensor] = []
    for item, owner in zip(items, owners, strict=True):
        order.append(torch.arange(held[owner], held[owner] + item.rows))
        held[owner] += item.rows
    most = max(held)
    weight = next(encoder.parameters())
    # Where a rank has nothing to encode it has to take part in the backward of the gather all the same.
    trains = torch.is_grad_enabled() and any(part.requires_grad for part in encoder.parameters())
    padding = weight.new_zeros((most - held[group.rank()], *shape)).requires_grad_(trains)
    rows = torch.cat([encoder(mine), padding]) if mine else padding
    gathered = gather_from_sequence_parallel_region(rows, group=group)
    taken = torch.cat([part + owner * most for part, owner in zip(order, owners, strict=True)])
    return gathered.index_select(0, taken.to(gathered.device))


def dealt(costs: Sequence[int], ranks: int) -> list[int]:
    """Which rank takes each item: the costliest first, each to the rank with least to do."""
    loads = [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def mark_parts(encoder: nn.Module, *, shared: bool, sequence_parallel: bool) -> None:
    """Say how the gradients of its weights are finished over tensor ranks; Megatron reads these attributes.

    Over context and data ranks they are added up like all others. With sequence parallelism a tensor rank
    has the gradient of its own stretch of tokens, so that parts are added up. Without it all tensor ranks
    have the gradient of all tokens: those that share the work hand it around once from each, so that the
    sum is taken over their number; those that do not have the same already.
    """
    for parameter in encoder.parameters():
        if sequence_parallel:
            setattr(parameter, "sequence_parallel", True)  # noqa: B010
        elif shared:
            setattr(parameter, "average_gradients_across_tp_domain", True)  # noqa: B010
