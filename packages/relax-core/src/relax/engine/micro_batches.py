"""Groups of the bus become micro-batches of the trainer: in which order, and how they are laid out.

A group's columns are read-only views of the bus's memory. `pack` copies them, but for pictures.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transferqueue as tq

from relax.backends.train.base import Packed, ragged
from relax.distributed.bus import media_of

RESPONSE_FIELDS = ("loss_mask", "rollout_logprobs", "advantages", "reference_logprobs")


@dataclass(frozen=True)
class Group:
    """One whole group of a leased batch. `rows` are its members' places in the batch, by member number."""

    ordinal: int
    step: int
    batch: "tq.AsyncBatch"
    rows: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        return [int(self.batch.ids[row]) for row in self.rows]

    @property
    def tokens(self) -> int:
        """Tokens of all members, prompts included."""
        return sum(len(tokens) for tokens in self.column("tokens"))

    def column(self, name: str) -> list[Any]:
        """A field of its members."""
        column = self.batch[name]
        return [column[row] for row in self.rows]


def groups_of(batch: "tq.AsyncBatch") -> list[Group]:
    """The groups of a batch, in the order they came."""
    rows: dict[str | None, list[int]] = {}
    for row, key in enumerate(batch.groups):
        rows.setdefault(key, []).append(row)
    member, ordinal = batch["member"], batch["ordinal"]
    return [
        Group(
            int(ordinal[found[0]]),
            int(batch.priorities[found[0]]),
            batch,
            tuple(sorted(found, key=lambda row: int(member[row]))),
        )
        for found in rows.values()
    ]


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


async def chunked(groups: AsyncIterator[Group], sizes: Iterator[int]) -> AsyncIterator[list[Group]]:
    """Runs of so many groups, the last one shorter where there are no more."""
    chunk: list[Group] = []
    size = next(sizes)
    async for group in groups:
        chunk.append(group)
        if len(chunk) == size:
            yield chunk
            chunk = []
            size = next(sizes, 0)
    if chunk:
        yield chunk


async def within(groups: AsyncIterator[Group], tokens: int) -> AsyncIterator[list[Group]]:
    """Runs of as many groups, in order, as have at most `tokens` together; a larger one comes alone. What
    transferqueue's `TokenBudget` makes of the same groups in the same order.
    """
    chunk: list[Group] = []
    room = tokens
    async for group in groups:
        if chunk and group.tokens > room:
            yield chunk
            chunk, room = [], tokens
        chunk.append(group)
        room -= group.tokens
    if chunk:
        yield chunk


def pack(groups: Sequence[Group]) -> Packed:
    """Groups as one micro-batch, in the order given. Every response-aligned field that is
    there comes along."""
    tokens, offsets = ragged([row for group in groups for row in group.column("tokens")], torch.int64)
    fields = {
        name: ragged(
            [row for group in groups for row in group.column(name)],
            torch.uint8 if name == "loss_mask" else torch.float32,
        )[0]
        for name in RESPONSE_FIELDS
        if name in groups[0].batch
    }
    return Packed(
        tokens=tokens,
        offsets=offsets,
        prompt_lengths=torch.tensor([int(n) for group in groups for n in group.column("prompt_length")]),
        fields=fields,
        media=[media_of(group.batch, row) for group in groups for row in group.rows],
    )
