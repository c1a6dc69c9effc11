"""Groups of the bus become micro-batches of the trainer: in which order, and how they are laid out."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transferqueue as tq

from relax.backends.train.base import Packed, ragged
from relax.distributed.bus import media_of

RESPONSE_FIELDS = ("loss_mask", "rollout_logprobs", "advantages", "reference_logprobs")


@dataclass(frozen=True)
class Group:
    """One whole group, leased to the actor. `batch` rows are its members."""

    ordinal: int
    step: int
    batch: "tq.AsyncBatch"

    @classmethod
    def of(cls, batch: "tq.AsyncBatch") -> "Group":
        return cls(int(batch["ordinal"][0]), int(batch.priorities[0]), batch)


async def ordered(
    groups: AsyncIterator[Group], order: Sequence[int] | None, count: int
) -> AsyncIterator[Group]:
    """The `count` groups of a step, in the order given (ordinals), or as they arrive for None.

    A group that is early waits here, leased.
    """
    early: dict[int, Group] = {}
    wanted = list(order) if order is not None else None
    for place in range(count):
        while True:
            if wanted is not None and wanted[place] in early:
                yield early.pop(wanted[place])
                break
            group = await anext(groups)
            if wanted is None:
                yield group
                break
            early[group.ordinal] = group


async def canonical(groups: AsyncIterator[Group], count: int) -> AsyncIterator[Group]:
    """The `count` groups of a step by ordinal, once all are there."""
    for group in sorted([await anext(groups) for _ in range(count)], key=lambda g: g.ordinal):
        yield group


async def chunked(groups: AsyncIterator[Group], size: int) -> AsyncIterator[list[Group]]:
    """Runs of `size` groups, the last one shorter."""
    chunk: list[Group] = []
    async for group in groups:
        chunk.append(group)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def pack(batches: Sequence["tq.AsyncBatch"]) -> Packed:
    """Leased samples as one micro-batch, rows in the order given, members by their number.

    Every response-aligned field that is there comes along.
    """
    rows = [(batch, int(row)) for batch in batches for row in _by_member(batch)]
    tokens, offsets = ragged([batch["tokens"][row] for batch, row in rows], torch.int64)
    fields = {
        name: ragged(
            [batch[name][row] for batch, row in rows], torch.uint8 if name == "loss_mask" else torch.float32
        )[0]
        for name in RESPONSE_FIELDS
        if name in batches[0]
    }
    return Packed(
        tokens=tokens,
        offsets=offsets,
        prompt_lengths=torch.tensor([int(batch["prompt_length"][row]) for batch, row in rows]),
        fields=fields,
        media=[media_of(batch, row) for batch, row in rows],
    )


def _by_member(batch: Any) -> list[int]:
    members = [int(member) for member in batch["member"]]
    return sorted(range(len(members)), key=members.__getitem__)
