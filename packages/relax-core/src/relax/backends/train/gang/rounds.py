"""A micro-batch cut into equal rounds: one part for every data-parallel replica, as many pieces in each.

Whole rows go to one replica, balanced by tokens. Neighbours stay together where that costs no balance, as
the samples of a group share their prompt. A replica without a row gets a dummy: the shortest real row, masked
out.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relax.backends.train.base import Packed
from relax.backends.train.padding import check

_NEIGHBOURS = 1.1
"""How much longer the longest part may be when neighbours stay together."""

_TOKEN_COLUMNS = tuple(
    f.name
    for f in dataclasses.fields(Packed)
    if f.name not in ("tokens", "offsets", "prompt_lengths", "fields", "media", "dummy")
)
"""What else a micro-batch holds for each token."""


@dataclass(frozen=True)
class Piece:
    """One micro-batch of one replica, and which rows of the whole it holds; none for a dummy."""

    batch: Packed
    rows: tuple[int, ...]


def cut(
    batch: Packed, replicas: int, *, tokens: int | None = None, least: int = 1, multiple: int = 1
) -> list[list[Piece]]:
    """The pieces of every replica, equally many in each; rows without a response are in none.

    Args:
        batch: the whole micro-batch.
        replicas: data-parallel replicas.
        tokens: most tokens of a piece, prompts included; a longer row is a piece of its own. None: a replica
            gets one piece, or `least`.
        least: pieces of each replica at least, where it has the rows.
        multiple: the number of pieces of a replica is a multiple of this.

    Raises:
        BatchError: the batch contradicts itself.
    """
    any_model = 1 << 62
    check(batch, vocabulary=any_model, context=any_model)
    lengths = batch.offsets.diff().tolist()
    # A row without a response has nothing to score or to train, and a piece of such rows is none.
    answered = (batch.response_offsets.diff() > 0).nonzero().flatten().tolist()
    parts = _balanced(answered, lengths, replicas)
    counts = [_pieces_of(part, lengths, tokens, least) for part in parts]
    count = -(-max(counts) // multiple) * multiple
    shortest = _shortest(batch)
    made = []
    for part in parts:
        chosen = [rows for rows in _balanced(part, lengths, min(count, len(part))) if rows] if part else []
        pieces = [Piece(select(batch, rows), tuple(rows)) for rows in chosen]
        made.append(pieces + [Piece(_dummy(batch, shortest), ())] * (count - len(pieces)))
    return made


def in_row_order(
    batch: Packed, pieces: Sequence[Sequence[Piece]], found: Sequence[Sequence[Tensor]]
) -> Tensor:
    """float32 [total response] of the whole from what every replica found for its pieces; that of dummies is
    dropped.
    """
    offsets = batch.response_offsets
    whole = torch.zeros(int(offsets[-1]), dtype=torch.float32)
    for of_replica, values in zip(pieces, found, strict=True):
        for piece, value in zip(of_replica, values, strict=True):
            if not piece.rows:
                continue
            start = 0
            for row in piece.rows:
                first, end = int(offsets[row]), int(offsets[row + 1])
                whole[first:end] = value[start : start + end - first]
                start += end - first
    return whole


def select(batch: Packed, rows: Sequence[int]) -> Packed:
    """Some rows of a micro-batch as one of its own, in the order given."""
    chosen = torch.tensor(rows, dtype=torch.int64)
    tokens = _places(batch.offsets, chosen)
    responses = _places(batch.response_offsets, chosen)
    lengths = batch.offsets.diff()[chosen]
    aligned = {
        name: column[tokens] for name in _TOKEN_COLUMNS if isinstance(column := getattr(batch, name), Tensor)
    }
    return dataclasses.replace(
        batch,
        tokens=batch.tokens[tokens],
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        prompt_lengths=batch.prompt_lengths[chosen],
        fields={name: column[responses] for name, column in batch.fields.items()},
        media=[batch.media[row] for row in rows] if batch.media else (),
        **aligned,
    )


def _places(offsets: Tensor, rows: Tensor) -> Tensor:
    """Where the entries of some rows lie in a ragged column."""
    bounds = offsets.tolist()
    found = [torch.arange(bounds[row], bounds[row + 1]) for row in rows.tolist()]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


def _dummy(batch: Packed, row: int) -> Packed:
    one = select(batch, [row])
    fields = {n: torch.zeros_like(c) if n == "loss_mask" else c for n, c in one.fields.items()}
    return dataclasses.replace(one, fields=fields, dummy=True)


def _shortest(batch: Packed) -> int:
    """The row that is cheapest to run again: of those with a response, the one of the fewest tokens."""
    lengths = batch.offsets.diff()
    answered = lengths > batch.prompt_lengths
    return int(lengths.masked_fill(~answered, torch.iinfo(lengths.dtype).max).argmin())


def _pieces_of(rows: Sequence[int], lengths: Sequence[int], tokens: int | None, least: int) -> int:
    """Into how many pieces a part has to be cut, so that none has more than `tokens`."""
    count = max(1, min(least, len(rows)))
    if tokens is None:
        return count
    count = max(count, -(-sum(lengths[row] for row in rows) // tokens))
    while count < len(rows):
        pieces = _balanced(rows, lengths, count)
        if all(len(piece) < 2 or sum(lengths[row] for row in piece) <= tokens for piece in pieces):
            return count
        count += 1
    return max(1, len(rows))


def _balanced(rows: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """So many parts of about as many tokens, each in row order; empty ones where there are too few rows."""
    if parts == 1:
        return [list(rows)]
    if len(rows) <= parts:
        return [[row] for row in rows] + [[] for _ in range(parts - len(rows))]
    together, scattered = _neighbours(rows, lengths, parts), _longest_first(rows, lengths, parts)

    def longest(cut: list[list[int]]) -> int:
        return max(sum(lengths[row] for row in part) for part in cut)

    return together if longest(together) <= _NEIGHBOURS * longest(scattered) else scattered


def _neighbours(rows: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Runs of neighbours, the longest as short as can be: by bisection for its length."""
    low, high = max(lengths[row] for row in rows), sum(lengths[row] for row in rows)
    while low < high:
        middle = (low + high) // 2
        if len(_runs(rows, lengths, middle, parts)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _runs(rows, lengths, low, parts)


def _runs(rows: Sequence[int], lengths: Sequence[int], limit: int, parts: int) -> list[list[int]]:
    """Runs of at most `limit` tokens; a new one also where later parts would be left without a row."""
    runs: list[list[int]] = [[]]
    room = limit
    for place, row in enumerate(rows):
        left = len(rows) - place
        if runs[-1] and (lengths[row] > room or left <= parts - len(runs)):
            runs.append([])
            room = limit
        runs[-1].append(row)
        room -= lengths[row]
    return runs


def _longest_first(rows: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """The longest row to the emptiest part, and so on (Graham, 1969)."""
    made: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        emptiest = sums.index(min(sums))
        made[emptiest].append(row)
        sums[emptiest] += lengths[row]
    return [sorted(part) for part in made]
