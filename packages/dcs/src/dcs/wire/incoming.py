"""What comes from one source of a plan: its chunks, where their bytes go here, and which have landed."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import xxhash

from dcs.plan import blocks
from dcs.plan.blocks import COUNT, RUN, START, STRIDE
from dcs.wire.chunks import Selection

_DIRECT = 64 << 10  # bytes; ranges of at least this size on average are received in place


class Stream:
    """One selection of a source and its places in a copy here; the same for every version.

    Attributes:
        rows: what the source is asked for, int64 [n, 4]; None for all of its buffer.
        selection: the same, cut into chunks.
        key: of what comes and where it goes; several ranks may be asked for equal selections.
        into: where each chunk goes, int64 [k, 4].
        touched: for each chunk, which chunks of the copy it falls into and with how many bytes.
    """

    def __init__(self, block_rows: np.ndarray, chunk_bytes: int, whole: bool) -> None:
        source = blocks.source_side(block_rows)
        self.rows = None if whole else source
        self.selection = Selection(source, chunk_bytes, whole)
        self.key = xxhash.xxh3_128_digest(block_rows.tobytes())
        self.into = blocks.cut(blocks.destination_side(block_rows), chunk_bytes)
        self._spans: dict[int, list[tuple[int, int]] | None] = {}
        self.touched = [
            ((index, size),) if whole else _touched(rows, chunk_bytes)
            for index, (rows, size) in enumerate(zip(self.into, self.selection.sizes, strict=True))
        ]

    def __len__(self) -> int:
        return len(self.into)

    def spans(self, index: int) -> list[tuple[int, int]] | None:
        """Where a chunk can be received in place: `(start, length)` ranges; None when they are too small."""
        if index not in self._spans:
            most = max(1, self.selection.sizes[index] // _DIRECT)
            self._spans[index] = blocks.spans(self.into[index], most)
        return self._spans[index]


def whole_stream(nbytes: int, chunk_bytes: int) -> Stream:
    """All of the buffer of a source whose layout is the same."""
    return Stream(blocks.identity(nbytes), chunk_bytes, whole=True)


def _touched(rows: np.ndarray, chunk_bytes: int) -> tuple[tuple[int, int], ...]:
    """`(chunk of the copy, bytes)` for every chunk that these rows fall into."""
    count = rows[:, COUNT]
    row = np.repeat(np.arange(len(rows)), count)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    start = rows[row, START] + nth * rows[row, STRIDE]
    length = rows[row, RUN]
    first, last = start // chunk_bytes, (start + length - 1) // chunk_bytes
    inside = first == last
    found, where = np.unique(first[inside], return_inverse=True)
    totals = Counter(
        dict(zip(found.tolist(), np.bincount(where, length[inside]).astype(int).tolist(), strict=True))
    )
    for begin, size in zip(start[~inside].tolist(), length[~inside].tolist(), strict=True):
        end = begin + size
        while begin < end:
            index = begin // chunk_bytes
            part = min(end, (index + 1) * chunk_bytes) - begin
            totals[index] += part
            begin += part
    return tuple(sorted(totals.items()))


def coverage(streams: list[Stream], chunks: int) -> np.ndarray:
    """How many bytes of each chunk of a copy the streams bring: int64 [chunks]."""
    total = np.zeros(chunks, dtype=np.int64)
    for stream in streams:
        for touched in stream.touched:
            for index, size in touched:
                total[index] += size
    return total


WANTED, TAKEN, LANDED = 0, 1, 2


@dataclass(eq=False)
class Progress:
    """How far one stream of one version is; guarded by the shelf's lock.

    Attributes:
        state: WANTED, TAKEN or LANDED, one byte a chunk.
        damaged: how often each chunk did not match its hash.
    """

    stream: Stream
    state: bytearray
    damaged: Counter[int] = field(default_factory=Counter)

    def take(self, most: int) -> tuple[int, int] | None:
        """`(first, count)` of chunks to ask for next, at most `most`; None when all are taken."""
        first = self.state.find(WANTED)
        if first < 0:
            return None
        count = 1
        while count < most and first + count < len(self.state) and self.state[first + count] == WANTED:
            count += 1
        self.state[first : first + count] = bytes([TAKEN]) * count
        return first, count

    def give_back(self, first: int, count: int) -> None:
        """These have not come after all."""
        for index in range(first, first + count):
            if self.state[index] == TAKEN:
                self.state[index] = WANTED

    @property
    def left(self) -> int:
        """Chunks that have not landed."""
        return len(self.state) - self.state.count(LANDED)


def begin(stream: Stream, missing: np.ndarray) -> Progress:
    """What of a stream is still of use to a copy that misses these bytes."""
    state = bytearray(
        WANTED if any(missing[index] for index, _ in touched) else LANDED for touched in stream.touched
    )
    return Progress(stream, state)
