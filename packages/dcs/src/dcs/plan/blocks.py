"""Strided byte ranges: what a plan moves, how it is cut into chunks, and the copies in and out of memory.

Everything is a C-contiguous numpy int64 array, in bytes.

- **blocks** `[n, 6]`: `SRC, SRC_STRIDE, DST, DST_STRIDE, RUN, COUNT`. A row says: COUNT runs of RUN bytes;
  run k lies at `SRC + k * SRC_STRIDE` in the source and at `DST + k * DST_STRIDE` in the destination.
- **selection** `[n, 4]`: `START, STRIDE, RUN, COUNT`, one side of blocks. The bytes that it selects, run
  after run and row after row, are its *packed* form: what travels.

RUN and COUNT are at least 1; the stride of a single run means nothing and is written as RUN.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right

import numpy as np

from dcs.errors import ProtocolError

SRC, SRC_STRIDE, DST, DST_STRIDE, BLOCK_RUN, BLOCK_COUNT = range(6)
START, STRIDE, RUN, COUNT = range(4)

MAX_ROWS = 1 << 22  # of a selection that is taken from a peer: 128 MiB of rows
REPEATS = (
    64  # times that a selection may name all of a peer's memory, as one byte may have several destinations
)
SPLIT = 64  # bytes; a run is cut at multiples of it, so that no element of a tensor is torn
_SMALL = 4096  # bytes; up to here the cost of a copy is that of asking for it
_OPAQUE = 512  # bytes; up to here numpy copies runs faster as opaque items than as rows of bytes

Blocks = np.ndarray
Selection = np.ndarray


def identity(nbytes: int) -> Blocks:
    """The blocks that copy `nbytes` bytes from the start of one memory to the start of another: one row."""
    if nbytes == 0:
        return np.empty((0, 6), np.int64)
    return np.array([[0, nbytes, 0, nbytes, nbytes, 1]], np.int64)


def source_side(blocks: Blocks) -> Selection:
    """Where the bytes lie in the source."""
    return np.ascontiguousarray(blocks[:, [SRC, SRC_STRIDE, BLOCK_RUN, BLOCK_COUNT]])


def destination_side(blocks: Blocks) -> Selection:
    """Where the same bytes, in the same order, go in the destination."""
    return np.ascontiguousarray(blocks[:, [DST, DST_STRIDE, BLOCK_RUN, BLOCK_COUNT]])


def nbytes(selection: Selection) -> int:
    """How many bytes are selected: the length of the packed form."""
    return int(np.dot(selection[:, RUN], selection[:, COUNT]))


def cut(selection: Selection, chunk_bytes: int) -> list[Selection]:
    """The selection in consecutive parts of at most `chunk_bytes` bytes, each as full as it gets.

    Cuts depend on RUN and COUNT alone, so both sides of a block list are cut alike. A run is split only
    when it is longer than a chunk, and then at multiples of `SPLIT` bytes from its start (if a chunk has as
    many). Parts are views of one array; none is empty. Raises `ValueError` for `chunk_bytes` below 1.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}; a chunk holds at least one byte")
    if not len(selection):
        return []
    start, stride, run, count = selection.T
    ends = np.cumsum(run * count)
    chunks = np.array(_chunk_starts(run, count, ends, chunk_bytes), np.int64)

    # Positions are in the packed form. A row breaks where a chunk starts, and at the end of a run that is
    # split: one before it in its row would be split as well, or ends where a chunk starts.
    first = np.concatenate(([0], ends[:-1]))
    row = np.searchsorted(ends, chunks, side="right")
    inside = (chunks - first[row]) % run[row]
    torn = inside > 0
    breaks = np.unique(np.concatenate((first, chunks, (chunks - inside + run[row])[torn])))
    breaks = breaks[breaks < ends[-1]]

    row = np.searchsorted(ends, breaks, side="right")
    index, inside = np.divmod(breaks - first[row], run[row])
    length = np.diff(breaks, append=ends[-1])
    whole = (inside == 0) & (length >= run[row])
    rows = np.empty((len(breaks), 4), np.int64)
    rows[:, START] = start[row] + index * stride[row] + inside
    rows[:, RUN] = np.where(whole, run[row], length)
    rows[:, COUNT] = np.where(whole, length // run[row], 1)
    rows[:, STRIDE] = np.where(rows[:, COUNT] > 1, stride[row], rows[:, RUN])
    bounds = [*np.searchsorted(breaks, chunks).tolist(), len(rows)]
    return [rows[left:right] for left, right in itertools.pairwise(bounds)]


def _chunk_starts(run: np.ndarray, count: np.ndarray, ends: np.ndarray, chunk_bytes: int) -> list[int]:
    """Where each chunk starts in the packed form. A step for each chunk, and for each longer run."""
    runs, counts, row_ends = run.tolist(), count.tolist(), ends.tolist()
    split = SPLIT if chunk_bytes >= SPLIT else 1
    total = row_ends[-1]
    starts: list[int] = []
    position = row = 0
    while position < total:
        starts.append(position)
        limit = position + chunk_bytes
        while True:
            row = bisect_right(row_ends, limit, lo=row)  # the first row that does not fit as a whole
            if row == len(runs):
                return starts
            length = runs[row]
            row_start = row_ends[row] - length * counts[row]
            begin = max(position, row_start)
            done, inside = divmod(begin - row_start, length)
            fits = inside + limit - begin  # counted from the start of the run that `begin` lies in
            if length <= chunk_bytes:
                position = row_start + (done + fits // length) * length
                break
            if fits < length:
                position = max(begin, row_start + done * length + fits // split * split)
                break
            position = row_start + (done + 1) * length  # the rest of a long run; go on with the next one
            if position == limit:
                break
    return starts


def gather(selection: Selection, memory: np.ndarray, out: np.ndarray) -> int:
    """Copy what is selected out of `memory` into the start of `out`; both contiguous uint8. Returns how many
    bytes.

    Raises `ValueError` when the selection leaves `memory` or does not fit into `out`.
    """
    return _copy(selection, memory, out, packing=True)


def scatter(selection: Selection, memory: np.ndarray, packed: np.ndarray) -> None:
    """Copy `packed` to where the selection lies in `memory`; both contiguous uint8. The reverse of `gather`.

    Raises `ValueError` when the selection leaves `memory` or is not as long as `packed`.
    """
    total = nbytes(selection)
    if packed.nbytes != total:
        raise ValueError(
            f"{packed.nbytes} packed bytes for a selection of {total}: pass what `gather` made of it"
        )
    _copy(selection, memory, packed, packing=False)


def _copy(selection: Selection, memory: np.ndarray, packed: np.ndarray, packing: bool) -> int:
    # Of what numpy offers, the cheapest for each kind of row, as there may be many small ones: memoryviews
    # (0.2 us, but they hold the interpreter's lock), arrays over a buffer, runs as opaque items (one memmove
    # each).
    loose, tight = memory.data, packed.data
    position = 0
    for start, stride, run, count in selection.tolist():
        size = run * count
        if start < 0 or start + (count - 1) * stride + run > memory.nbytes or position + size > packed.nbytes:
            raise ValueError(
                f"{count} runs of {run} bytes, {stride} apart from byte {start}, do not lie within"
                f" {memory.nbytes} bytes, or not within {packed.nbytes} packed ones from byte {position}"
            )
        if count == 1 or stride == run:
            views = (loose, tight) if size <= _SMALL else (memory, packed)
            own, other = views[0][start : start + size], views[1][position : position + size]
        elif run <= _OPAQUE:
            item = f"V{run}"
            own = np.ndarray((count,), item, loose, start, (stride,))
            other = np.ndarray((count,), item, tight, position, (run,))
        else:
            own = np.ndarray((count, run), np.uint8, loose, start, (stride, 1))
            other = np.ndarray((count, run), np.uint8, tight, position, (run, 1))
        if packing:
            other[:] = own
        else:
            own[:] = other
        position += size
    return position


def spans(selection: Selection, limit: int) -> list[tuple[int, int]] | None:
    """The selection as `(start, length)` ranges in order, adjacent ones merged; None when there are more than
    `limit`. For `sendmsg` and `recv_into` without a copy.
    """
    if not len(selection):
        return []
    start, stride, run, count = selection.T
    dense = (count == 1) | (stride == run)
    pieces = np.where(dense, 1, count)
    # Two neighbours merge at most once, so this many are left at least (as floats: no sum can wrap around).
    if float(np.sum(pieces, dtype=np.float64)) - (len(selection) - 1) > limit:
        return None
    row = np.repeat(np.arange(len(selection)), pieces)
    index = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = start[row] + index * stride[row]
    length = np.where(dense, run * count, run)[row]
    apart = np.flatnonzero(begin[1:] != (begin + length)[:-1]) + 1
    if len(apart) + 1 > limit:
        return None
    firsts = np.concatenate(([0], apart))
    return list(zip(begin[firsts].tolist(), np.add.reduceat(length, firsts).tolist(), strict=True))


def check(selection: Selection, nbytes: int) -> None:
    """Refuse a peer's selection unless it lies within a memory of `nbytes` bytes.

    Raises `ProtocolError` for anything but `[n, 4]` int64 rows with RUN and COUNT of at least 1, runs that
    overlap, more than `MAX_ROWS` rows, or more bytes than `REPEATS` times the memory.
    """
    if selection.ndim != 2 or selection.shape[1] != 4 or selection.dtype != np.int64:
        raise ProtocolError(
            f"a selection is {selection.dtype}{list(selection.shape)}; expected int64[rows, 4]: START,"
            " STRIDE, RUN, COUNT"
        )
    if len(selection) > MAX_ROWS:
        raise ProtocolError(f"a selection has {len(selection)} rows; at most {MAX_ROWS} are served")
    start, stride, run, count = selection.T
    # Differences and quotients only, of numbers already known to be in range: nothing here can overflow.
    bad = (start < 0) | (run < 1) | (count < 1) | (stride < 0) | (run > nbytes) | (start > nbytes)
    if not bad.any():
        several = count > 1
        bad = (start > nbytes - run) | (several & (stride < run))
        bad |= several & (count - 1 > (nbytes - run - start) // np.maximum(stride, 1))
    if bad.any():
        row = int(np.argmax(bad))
        raise ProtocolError(
            f"row {row} of a selection, (start, stride, run, count) = {tuple(selection[row].tolist())}, does"
            f" not lie within {nbytes} bytes; was it made for another layout?"
        )
    low = 1 << 32
    size = run * count  # at most `nbytes` a row; the sum of them may need more than 64 bits
    total = int(np.sum(size // low)) * low + int(np.sum(size % low))
    if total > REPEATS * nbytes:
        raise ProtocolError(
            f"a selection names {total} bytes of a memory of {nbytes}; more than {REPEATS} times it is"
            " not served"
        )
