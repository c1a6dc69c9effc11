"""The immutable description of one version: where every tensor lies, and a hash for every chunk.

The root hash covers the layout and all chunk hashes, and not the epoch or the version: the same weights have
the same root, so a restarted publisher may offer its last version again and nobody need trust that the bits
agree.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash

from dcs.errors import CorruptChunk
from dcs.layout import Layout, Name, Shape

CHUNK_BYTES = 4 << 20
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4 << 10, 256 << 20

Hash64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no integer above 2**64 - 1


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor's place: global shape, dtype, and bytes [offset, offset + nbytes) of the flat buffer."""

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
        """As it travels."""
        return msgspec.msgpack.encode(self)


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """How many chunks a buffer has; none when it is empty."""
    return -(-nbytes // chunk_bytes)


@dataclass(frozen=True)
class Placement:
    """What all manifests of a layout have in common; made once, as a large model takes milliseconds.

    Attributes:
        fingerprint: the layout's.
        tensors: with their places.
        nbytes: length of the flat buffer.
        encoded_limit: more bytes than any manifest of this layout can take, run name not counted.
    """

    fingerprint: str
    tensors: tuple[TensorEntry, ...]
    nbytes: int
    encoded_limit: int

    @classmethod
    def of(cls, layout: Layout) -> "Placement":
        """The placement of a layout."""
        starts, nbytes = layout.offsets()
        tensors = tuple(
            TensorEntry(spec.name, spec.shape, spec.dtype, start, spec.nbytes)
            for spec, start in zip(layout.tensors, starts, strict=True)
        )
        hashes = 9 * chunk_count(nbytes, MIN_CHUNK_BYTES)
        return cls(layout.fingerprint, tensors, nbytes, 1024 + len(msgspec.msgpack.encode(tensors)) + hashes)


def root_hash(fingerprint: str, chunk_bytes: int, chunks: tuple[int, ...]) -> bytes:
    """xxh3-128 over a layout's fingerprint, the chunk size, and the chunk hashes in order."""
    digest = xxhash.xxh3_128(fingerprint.encode())
    digest.update(chunk_bytes.to_bytes(8, "little"))
    digest.update(b"".join(value.to_bytes(8, "little") for value in chunks))
    return digest.digest()


def hash_chunk(view: memoryview) -> int:
    """xxh3-64 of a chunk's bytes."""
    return xxhash.xxh3_64_intdigest(view)


def decode(data: bytes | bytearray | memoryview, placement: Placement, root: bytes) -> Manifest:
    """A manifest that describes `placement` and has root `root`, or `CorruptChunk`.

    The caller's own layout decides every size, so nothing a peer sends makes the caller allocate.
    """
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptChunk(f"a manifest of {len(data)} bytes cannot be read: {error}") from error
    who = f"the manifest of version {manifest.version}"
    if manifest.tensors != placement.tensors or manifest.nbytes != placement.nbytes:
        raise CorruptChunk(f"{who} does not describe this layout")
    expected = chunk_count(placement.nbytes, manifest.chunk_bytes)
    if len(manifest.chunks) != expected:
        raise CorruptChunk(f"{who} has {len(manifest.chunks)} chunk hashes, expected {expected}")
    actual = root_hash(placement.fingerprint, manifest.chunk_bytes, manifest.chunks)
    if actual != root or manifest.root != root:
        raise CorruptChunk(f"{who} has root {actual.hex()}, announced was {root.hex()}")
    return manifest
