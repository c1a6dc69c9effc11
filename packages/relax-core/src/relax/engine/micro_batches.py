"""Groups of the bus become micro-batches of the trainer: in which order, and how they are laid out.

A group's columns are read-only views of the bus's memory. `pack` copies them, but for pictures.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import transferqueue as tq

from relax import schema
from relax.backends.routes import UNROUTED, without_route
from relax.backends.train.base import Packed, ragged
from relax.distributed.media import media_of

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


def pack(groups: Sequence[Group], *, routes_of: Literal["all", "sampled"] = "all") -> Packed:
    """Groups as one micro-batch, in the order given. Every response-aligned field that is there comes along,
    and the routes.

    Args:
        groups: at least one.
        routes_of: the tokens whose routes come along: all, or only those that the policy sampled.
    """
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
        routes=_routes(groups, offsets, routes_of) if schema.ROUTES in groups[0].batch else None,
        media=[media_of(group.batch, row) for group in groups for row in group.rows],
    )


def _routes(groups: Sequence[Group], offsets: torch.Tensor, of: Literal["all", "sampled"]) -> torch.Tensor:
    """[total, layers, top_k] as `Packed.routes`: written once into memory of its own, in one type for all."""
    rows = [row for group in groups for row in group.column(schema.ROUTES)]
    bytewise = rows[0].dtype == np.uint8
    dtype = np.dtype(np.int16) if bytewise else rows[0].dtype
    found = np.full((int(offsets[-1]), *rows[0].shape[1:]), UNROUTED, dtype)
    for start, row in zip(offsets.tolist(), rows, strict=False):
        found[start : start + len(row)] = row
        if bytewise and row.size and row.max() == 255:
            found[start : start + len(row)][without_route(row)] = UNROUTED
    if of == "sampled":
        places = offsets.tolist()
        lengths = [int(n) for group in groups for n in group.column("prompt_length")]
        masks = [mask for group in groups for mask in group.column("loss_mask")]
        for start, prompt, mask in zip(places, lengths, masks, strict=False):
            found[start : start + prompt] = UNROUTED
            found[start + prompt : start + prompt + len(mask)][mask == 0] = UNROUTED
    return torch.from_numpy(found)
