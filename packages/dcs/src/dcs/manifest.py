"""The immutable description of one version: where every tensor lies, and a hash for every chunk.

The root hash covers the layout and all chunk hashes, and not the epoch or the version: the same weights have
the same root, so a restarted publisher may offer its last version again and nobody need trust that the bits
agree.
"""

from typing import Annotated

import msgspec
import xxhash

from dcs.errors import CorruptChunk
from dcs.layout import Layout, Name, Shape

CHUNK_BYTES = 4 << 20
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4 << 10, 256 << 20

Hash64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no integer above 2**64 - 1


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor's place: global shape, dtype, and the byte range [offset, offset + nbytes) of the flat
    buffer.
    """

    name: Name
    shape: Shape
    dtype: str
    offset: int
    nbytes: int


class Manifest(msgspec.Struct, frozen=True):
    """One version of a run's weights.

    Attributes:
        run, epoch, version: the identity the coordinator issued; it only grows.
        tensors: in name order, each aligned to 64 bytes.
        nbytes: length of the flat buffer; the last chunk may be short.
        chunk_bytes: length of every other chunk.
        chunks: xxh3-64 of each chunk.
        root: xxh3-128 over the layout and the chunk hashes.
    """

    run: str
    epoch: int
    version: int
    tensors: tuple[TensorEntry, ...]
    nbytes: int
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    chunks: tuple[Hash64, ...]
    root: bytes

    def span(self, index: int) -> tuple[int, int]:
        """The byte range of chunk `index`."""
        return index * self.chunk_bytes, min((index + 1) * self.chunk_bytes, self.nbytes)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """How many chunks a buffer has; none when it is empty."""
    return -(-nbytes // chunk_bytes)


def entries(layout: Layout) -> tuple[TensorEntry, ...]:
    """The layout's tensors with their places."""
    starts, _ = layout.offsets()
    return tuple(
        TensorEntry(spec.name, spec.shape, spec.dtype, start, spec.nbytes)
        for spec, start in zip(layout.tensors, starts, strict=True)
    )


def root_hash(fingerprint: str, chunk_bytes: int, chunks: tuple[int, ...]) -> bytes:
    """xxh3-128 over a layout's fingerprint, the chunk size, and the chunk hashes in order."""
    digest = xxhash.xxh3_128(fingerprint.encode())
    digest.update(chunk_bytes.to_bytes(8, "little"))
    digest.update(b"".join(value.to_bytes(8, "little") for value in chunks))
    return digest.digest()


def hash_chunk(view: memoryview) -> int:
    """xxh3-64 of a chunk's bytes."""
    return xxhash.xxh3_64_intdigest(view)


def encoded_limit(layout: Layout, run: str) -> int:
    """More bytes than any manifest of this layout can take."""
    _, nbytes = layout.offsets()
    places = len(msgspec.msgpack.encode(entries(layout)))
    return 1024 + len(run.encode()) + places + 9 * chunk_count(nbytes, MIN_CHUNK_BYTES)


def decode(data: bytes | bytearray | memoryview, layout: Layout, root: bytes) -> Manifest:
    """A manifest that describes `layout` and has root `root`, or `CorruptChunk`.

    The caller's own layout decides every size, so nothing a peer sends makes the caller allocate.
    """
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptChunk(f"a manifest of {len(data)} bytes cannot be read: {error}") from error
    _, nbytes = layout.offsets()
    if manifest.tensors != entries(layout) or manifest.nbytes != nbytes:
        raise CorruptChunk(f"the manifest of version {manifest.version} does not describe this layout")
    if len(manifest.chunks) != chunk_count(nbytes, manifest.chunk_bytes):
        raise CorruptChunk(
            f"the manifest of version {manifest.version} has {len(manifest.chunks)} chunk hashes,"
            f" expected {chunk_count(nbytes, manifest.chunk_bytes)}"
        )
    actual = root_hash(layout.fingerprint, manifest.chunk_bytes, manifest.chunks)
    if actual != root or manifest.root != root:
        raise CorruptChunk(
            f"the manifest of version {manifest.version} has root {actual.hex()}, announced was {root.hex()}"
        )
    return manifest
