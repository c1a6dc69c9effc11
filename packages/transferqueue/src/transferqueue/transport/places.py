"""From blocks and runs to the columns of a batch."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from ..errors import FieldNotReady
from ..values.columns import Column, Run
from ..wire.messages import Places

_Piece = tuple[int, int, Column, int]  # position in the batch, samples, column, first row of it


def pieces_of(
    places: Places, blocks: Sequence[Mapping[str, Column]], fields: Sequence[str] | None
) -> dict[str, list[Run]]:
    """For each field the runs of columns that make it, in the order of the samples.

    Args:
        places: where the samples lie.
        blocks: the columns of each of ``places.blocks``.
        fields: which; None: those that every sample has.

    Raises:
        FieldNotReady: a sample has no value of a field that is asked for.
    """
    found: dict[str, list[_Piece]] = {} if fields is None else {name: [] for name in fields}
    for position, count, block, row in places.runs:
        columns = blocks[block]
        for name in columns if fields is None else fields:
            column = columns.get(name)
            if column is not None:
                found.setdefault(name, []).append((position, count, column, row))
    if not places.rows:
        return {}
    pieces: dict[str, list[Run]] = {}
    for name, parts in found.items():
        runs = _in_a_row(parts, places.rows) or _overlaid(parts, places.rows)
        if runs is not None:
            pieces[name] = runs
        elif fields is not None:
            raise FieldNotReady(
                f"field {name!r} is not written for all of the samples; name it in the task's fields to wait "
                "for it",
                field=name,
                ids=[],
            )
    return pieces


def _in_a_row(parts: list[_Piece], rows: int) -> list[Run] | None:
    """The runs as they come, if they cover every sample once."""
    at = 0
    runs: list[Run] = []
    for position, count, column, row in parts:
        if position != at:
            return None
        runs.append((column, row, row + count))
        at += count
    return runs if at == rows else None


def _overlaid(parts: list[_Piece], rows: int) -> list[Run] | None:
    """The runs that are left where later ones cover earlier ones; None if a sample has none."""
    top = np.full(rows, -1, np.int64)
    for number, (position, count, _, _) in enumerate(parts):
        top[position : position + count] = number
    if (top < 0).any():
        return None
    starts = [0, *(np.flatnonzero(np.diff(top)) + 1).tolist(), rows]
    runs: list[Run] = []
    for start, stop in pairwise(starts):
        position, _, column, row = parts[int(top[start])]
        runs.append((column, row + start - position, row + stop - position))
    return runs
