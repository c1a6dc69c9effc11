"""The plan of one receiver: which bytes of which source go where in its buffer, every byte exactly once.

Boxes of the receiver's tensors are intersected with those of its sources. What only one source has comes from
there; what several have (replicas of data parallelism, norms under tensor parallelism) is shared among them
so that all send about as much, in long contiguous parts. Nobody gathers a full tensor.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dcs.errors import LayoutMismatch
from dcs.layout import ITEMSIZE, Layout, Shape
from dcs.layout.pieces import box as written
from dcs.plan import blocks as block
from dcs.plan.boxes import Box, Held, difference, extent, held, intersection, rows, volume
from dcs.plan.sharing import Cell, aligned, dealt, shares_of

GRAIN = 64 << 10  # bytes; less is not worth asking one more source for
_CACHED = 32  # plans


@dataclass(frozen=True, eq=False)
class Plan:
    """What to ask of each source.

    Attributes:
        blocks: for each source, int64 `[rows, 6]` (see `dcs.plan.blocks`), in the order of the destination;
            read-only.
        nbytes: that move in all.
    """

    blocks: tuple[np.ndarray, ...]
    nbytes: int


def plan(
    destination: Layout,
    sources: Sequence[Layout],
    *,
    turn: int = 0,
    who: str = "",
    grain: int = GRAIN,
) -> Plan:
    """How a rank with layout `destination` gets all of its bytes from ranks with the layouts `sources`.

    Sources with the very layout of the destination are asked for contiguous ranges of their buffer, and
    nobody else is asked then. The last 32 plans are kept.

    Args:
        turn: a number of this receiver; ties between sources fall on another one for each.
        who: the receiver, for messages.
        grain: bytes; what several sources hold is not shared in smaller parts than about this.

    Raises:
        LayoutMismatch: naming the first tensor of which a part is missing in all sources, or that has another
            dtype or global shape there.
    """
    key = (
        destination.fingerprint,
        tuple(layout.fingerprint for layout in sources),
        turn % max(len(sources), 1),
        grain,
    )
    with _lock:
        known = _plans.get(key)
        if known is not None:
            _plans.move_to_end(key)
            return known
    made = _make(destination, sources, key[2], f"{who}: " if who else "", grain)
    with _lock:
        _plans[key] = made
        while len(_plans) > _CACHED:
            _plans.popitem(last=False)
    return made


_plans: OrderedDict[tuple, Plan] = OrderedDict()
_lock = threading.Lock()


def _make(destination: Layout, sources: Sequence[Layout], turn: int, who: str, grain: int) -> Plan:
    order = [(turn + index) % len(sources) for index in range(len(sources))]
    twins = [index for index in order if sources[index].fingerprint == destination.fingerprint]
    if twins:
        found = _from_twins(destination.offsets()[1], twins, len(sources), grain)
    else:
        found = _from_owners(destination, sources, order, who, grain)
    for part in found:
        part.setflags(write=False)
    return Plan(tuple(found), sum(block.nbytes(block.source_side(part)) for part in found))


def _from_twins(nbytes: int, twins: list[int], sources: int, grain: int) -> list[np.ndarray]:
    """An equal share of the flat buffer from each source that has just the same one."""
    found = [block.identity(0) for _ in range(sources)]
    parts = min(len(twins), max(nbytes // grain, 1))
    for index, source in enumerate(twins[:parts]):
        start, stop = (aligned(nbytes * part // parts) for part in (index, index + 1))
        stop = nbytes if index + 1 == parts else stop
        if start < stop:
            length = stop - start
            found[source] = np.array([[start, length, start, length, length, 1]], np.int64)
    return found


class _Region(NamedTuple):
    """A box of a global tensor, and what the holder takes that tensor for."""

    start: Shape
    stop: Shape
    shape: Shape
    dtype: str


def _from_owners(
    destination: Layout, sources: Sequence[Layout], order: list[int], who: str, grain: int
) -> list[np.ndarray]:
    wanted = held(destination)
    names = {piece.source for piece in wanted}
    # Replicas have one layout: what is held where is worked out once for each distinct one.
    members: dict[str, list[int]] = {}
    for index in order:
        members.setdefault(sources[index].fingerprint, []).append(index)
    distinct = list(members.values())
    # Of each global tensor, by what is held of it: by whom (the first time, if a rank has it twice), and
    # where.
    holders: dict[str, dict[_Region, dict[int, Held]]] = {name: {} for name in names}
    for index, group in enumerate(distinct):
        for piece in held(sources[group[0]], names):
            region = _Region(piece.start, piece.stop, piece.shape, piece.dtype)
            holders[piece.source].setdefault(region, {}).setdefault(index, piece)

    shared: dict[tuple[int, ...], list[Cell]] = {}
    for piece in wanted:
        for cell in _cells(piece, holders[piece.source], who):
            shared.setdefault(tuple(sorted(cell.owners)), []).append(cell)

    of_source = {source: index for index, group in enumerate(distinct) for source in group}
    rank = {source: place for place, source in enumerate(order)}
    load = dict.fromkeys(order, 0)
    moves: dict[int, list[int]] = {source: [] for source in order}
    candidates = {owners: [source for index in owners for source in distinct[index]] for owners in shared}
    # Who has no choice comes first, so that those who have one can make up for it.
    for owners in sorted(shared, key=lambda owners: len(candidates[owners])):
        able = sorted(candidates[owners], key=lambda source: (load[source], rank[source]))
        shares = shares_of(
            [load[source] for source in able], sum(cell.nbytes for cell in shared[owners]), grain
        )
        for place, cell, box in dealt(shared[owners], shares, grain):
            source = able[place]
            load[source] += _move(moves[source], cell, cell.owners[of_source[source]], box)
    return [_merged(np.array(moves[source], np.int64).reshape(-1, 6)) for source in range(len(sources))]


def _cells(piece: Held, holders: dict[_Region, dict[int, Held]], who: str) -> list[Cell]:
    """The piece cut into boxes of which every holder has all or nothing. Raises `LayoutMismatch`."""
    whole = (piece.start, piece.stop)
    done: list[tuple[Box, dict[int, Held]]] = []
    free: list[Box] = [whole]
    for held_region, owners in holders.items():
        if held_region.dtype != piece.dtype or held_region.shape != piece.shape:
            raise _differs(piece, next(iter(owners.values())), who)
        region = intersection(whole, (held_region.start, held_region.stop))
        if region is None:
            continue
        fresh: list[tuple[Box, dict[int, Held]]] = []
        left: list[Box] = []
        for box in free:
            common = intersection(box, region)
            if common is None:
                left.append(box)
            else:
                fresh.append((common, owners))
                left += difference(box, common)
        free = left
        if sum(volume(*box) for box, _ in fresh) < volume(*region):  # somebody else has some of it, too
            done = _refined(done, region, owners)
        done += fresh
    if free:
        raise _uncovered(piece, min(free), bool(holders), who)
    done.sort(key=lambda cell: cell[0])
    itemsize = ITEMSIZE[piece.dtype]
    return [Cell(box, volume(*box) * itemsize, piece, owners) for box, owners in done]


def _refined(
    cells: list[tuple[Box, dict[int, Held]]], region: Box, more: dict[int, Held]
) -> list[tuple[Box, dict[int, Held]]]:
    """The cells, cut at the borders of the region, with more owners within."""
    found: list[tuple[Box, dict[int, Held]]] = []
    for box, owners in cells:
        common = intersection(box, region)
        if common is None or more.keys() <= owners.keys():
            found.append((box, owners))
        else:
            found.append((common, {**more, **owners}))
            found += [(rest, owners) for rest in difference(box, common)]
    return found


def _move(moves: list[int], cell: Cell, holder: Held, box: Box) -> int:
    """Append the rows that move the box; returns its bytes."""
    source, to = holder.address(box[0]), cell.to.address(box[0])
    sides = extent(*box)
    itemsize = ITEMSIZE[cell.to.dtype]
    for begin, left, end, right, run, count in rows(sides, holder.strides, cell.to.strides, itemsize):
        moves += (source + begin, left, to + end, right, run, count)
    return volume(*box) * itemsize


def _merged(found: np.ndarray) -> np.ndarray:
    """The rows in the order of the destination, those that are contiguous on both sides joined."""
    if not len(found):
        return found
    found = found[np.argsort(found[:, block.DST], kind="stable")]
    size = found[:, block.BLOCK_RUN] * found[:, block.BLOCK_COUNT]
    dense = found[:, block.BLOCK_COUNT] == 1
    joins = dense[1:] & dense[:-1]
    for side in (block.SRC, block.DST):
        joins &= found[1:, side] == found[:-1, side] + size[:-1]
    firsts = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    merged = found[firsts]
    single = merged[:, block.BLOCK_COUNT] == 1
    length = np.add.reduceat(size, firsts)[single]
    for column in (block.SRC_STRIDE, block.DST_STRIDE, block.BLOCK_RUN):
        merged[single, column] = length
    return np.ascontiguousarray(merged)


def _differs(piece: Held, holder: Held, who: str) -> LayoutMismatch:
    got = f"{holder.dtype}{list(holder.shape)}"
    expected = f"{piece.dtype}{list(piece.shape)}"
    return LayoutMismatch(
        f"{who}tensor {piece.tensor!r} is made of {piece.source!r} as {expected}, but a source has it as "
        f"{got} (in its tensor {holder.tensor!r}); layouts of one run name each global tensor with one shape "
        "and the dtype in which it travels (dcs.layout.of(..., dtype=...))",
        piece.tensor,
        got,
        expected,
    )


def _uncovered(piece: Held, missing: Box, known: bool, who: str) -> LayoutMismatch:
    wanted = f"{piece.source}[{written(missing[0], extent(*missing))}]"
    if known:
        got, why = "absent in part", f"{wanted} of it is held by no source; is a rank of the trainer missing?"
    else:
        got, why = "absent", f"no source has a global tensor of that name (needed: {wanted})"
    return LayoutMismatch(
        f"{who}tensor {piece.tensor!r} is made of {piece.source!r} {piece.dtype}{list(piece.shape)}, but"
        f" {why}",
        piece.tensor,
        got,
        wanted,
    )
