"""A selection of a copy, chunk by chunk: where its bytes lie, their hash, their difference to a base."""

import functools
import socket
from collections import Counter
from collections.abc import Sequence

import numpy as np
import xxhash

from dcs import delta
from dcs.errors import ProtocolError
from dcs.layout import ITEMSIZE, Layout
from dcs.manifest import hash_chunk
from dcs.memory.shelf import Copy, Shelf, Superseded
from dcs.plan import blocks
from dcs.wire import frames, streams

_DENSE_IN_A_ROW = 4  # chunks that were no smaller as differences; then the rest of the version is sent whole
_WORTH_IT = 4  # a difference has to be this many times smaller


class Selection:
    """Rows of strided byte ranges of a source, cut into chunks.

    Attributes:
        key: equal for equal selections in chunks of equal size.
        chunks: rows int64 [k, 4] of each chunk.
        sizes: bytes of each chunk.
        whole: it is all of the source's buffer, in order.
    """

    def __init__(self, rows: np.ndarray, chunk_bytes: int, whole: bool) -> None:
        self.chunk_bytes = chunk_bytes
        self.whole = whole
        self.chunks = blocks.cut(rows, chunk_bytes)
        self.sizes = [blocks.nbytes(chunk) for chunk in self.chunks]
        self._spans: dict[int, list[tuple[int, int]] | None] = {}
        self.key = xxhash.xxh3_128_digest(chunk_bytes.to_bytes(8, "little") + rows.tobytes())

    @classmethod
    def of(cls, rows: np.ndarray, chunk_bytes: int) -> "Selection":
        """A selection of these rows."""
        return cls(rows, chunk_bytes, whole=False)

    @classmethod
    def all_of(cls, nbytes: int, chunk_bytes: int) -> "Selection":
        """All of a buffer."""
        return cls(blocks.source_side(blocks.identity(nbytes)), chunk_bytes, whole=True)

    def __len__(self) -> int:
        return len(self.chunks)

    def spans(self, index: int) -> list[tuple[int, int]] | None:
        """The ranges of a chunk, `(start, length)`, when there are few enough to send them as they lie."""
        if index not in self._spans:
            self._spans[index] = blocks.spans(self.chunks[index], streams.MAX_PARTS - 1)
        return self._spans[index]

    @functools.cached_property
    def scratch(self) -> tuple[np.ndarray, np.ndarray]:
        """Two buffers of a chunk's size each."""
        size = max(self.sizes, default=0)
        return np.empty(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)


class Selected:
    """One selection of one copy, for one request.

    Args:
        copy: what is read.
        selection: what of it.
        base: an older copy that the reader has too; chunks may be given as differences from it.
        unit: bytes of an element for such a difference.
    """

    def __init__(self, copy: Copy, selection: Selection, base: Copy | None, unit: int) -> None:
        self._copy = copy
        self._selection = selection
        self._base = base
        self._unit = unit
        self._dense = 0
        self._aligned = selection.whole and selection.chunk_bytes == copy.chunk_bytes

    def arrived(self, index: int | None) -> bool:
        """Whether chunk `index` (None: every one) can be read."""
        if self._copy.complete:
            return True
        return index is not None and self._aligned and not self._copy.missing[index]

    def read(
        self, index: int, shelf: Shelf
    ) -> tuple[int, tuple[int, int], Sequence[memoryview | bytes], int]:
        """Encoding, (hash, hash of the base), payload in parts, and its length in bytes, of one chunk.

        Parts may be views of the copy or of scratch memory that the next call overwrites.
        """
        if self._base is not None and self._dense < _DENSE_IN_A_ROW:
            payload = self._difference(self._base, index, shelf)
            if payload is not None:
                hashes = self._hash(self._copy, index), self._hash(self._base, index)
                return frames.DELTA, hashes, [payload], len(payload)
        parts = self._parts(self._copy, index, 0)
        return frames.DENSE, (self._hash(self._copy, index, parts), 0), parts, self._selection.sizes[index]

    def _difference(self, base: Copy, index: int, shelf: Shelf) -> bytes | None:
        key = (self._selection.key, base.version, index)
        if key not in self._copy.deltas:
            try:
                with shelf.sending(base):
                    limit = self._selection.sizes[index] // _WORTH_IT
                    self._hash(base, index)
                    old, new = self._bytes(base, index, 1), self._bytes(self._copy, index, 0)
                    payload = delta.encode(old, new, self._unit, limit)
                    if payload is not None:  # it is checked before it is applied
                        value = self._hash(self._copy, index)
                        payload = seal(memoryview(payload), value).to_bytes(8, "little") + payload
                    self._copy.deltas[key] = payload
            except Superseded:
                self._base = None
                return None
        payload = self._copy.deltas[key]
        self._dense = 0 if payload is not None else self._dense + 1
        return payload

    def _parts(self, copy: Copy, index: int, which: int) -> list[memoryview]:
        spans = self._selection.spans(index)
        if spans is None:
            return [memoryview(self._bytes(copy, index, which))]
        return [copy.arena.memory[start : start + length] for start, length in spans]

    def _bytes(self, copy: Copy, index: int, which: int) -> np.ndarray:
        """A chunk in one piece: uint8 [size]."""
        rows, size = self._selection.chunks[index], self._selection.sizes[index]
        spans = self._selection.spans(index)
        if spans is not None and len(spans) == 1:
            start, length = spans[0]
            return copy.arena.flat[start : start + length]
        out = self._selection.scratch[which][:size]
        blocks.gather(rows, copy.arena.flat, out)
        return out

    def _hash(self, copy: Copy, index: int, parts: Sequence[memoryview] | None = None) -> int:
        if self._aligned and self._selection.chunk_bytes == copy.chunk_bytes:
            return copy.hash(index)
        known = copy.selected.setdefault(self._selection.key, [None] * len(self._selection))
        value = known[index]
        if value is None:
            value = known[index] = hash_parts(parts or self._parts(copy, index, 0))
        return value


def unit_of(layout: Layout) -> int:
    """Bytes of most elements of a layout, by which differences between versions are made: 1, 2 or 4."""
    totals = Counter[int]()
    for spec in layout.tensors:
        totals[min(4, ITEMSIZE[spec.dtype])] += spec.nbytes
    return max(totals, key=lambda size: totals[size], default=1)


def seal(difference: memoryview, value: int) -> int:
    """xxh3-64 over a difference and the hash of the chunk that comes of it, which is not hashed again."""
    return xxhash.xxh3_64_intdigest(difference, seed=value)


def hash_parts(parts: Sequence[memoryview]) -> int:
    """xxh3-64 of bytes that lie in several places."""
    if len(parts) == 1:
        return hash_chunk(parts[0])
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def read_rows(sock: socket.socket, count: int, nbytes: int) -> np.ndarray:
    """The rows of a selection, off a socket and checked against a buffer of `nbytes`.

    Raises `ProtocolError` and `OSError`.
    """
    if count > blocks.MAX_ROWS:
        raise ProtocolError(f"a selection of {count} rows, at most {blocks.MAX_ROWS} are taken")
    raw = streams.receive(sock, count * 32)
    rows = np.frombuffer(raw, dtype="<i8").reshape(count, 4)
    blocks.check(rows, nbytes)
    return rows
