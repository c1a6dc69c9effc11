"""The immutable description of one version of one rank: a hash for every chunk, and a root over all of them.

The root covers the layout and all chunk hashes, and not the epoch or the version: the same weights have the
same root, so a restarted publisher may offer its last version again and nobody need trust that the bits
agree. Hashing costs half as much as the copy, and whoever maps a version has no use for it: a version that is
only mapped has a mark of its own in the place of its root (`fresh_mark`), which is equal to no other one.
"""

import os
from collections.abc import Sequence
from typing import Annotated

import msgspec
import xxhash

from dcs.errors import CorruptChunk

CHUNK_BYTES = 4 << 20
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4 << 10, 256 << 20
_UNHASHED = b"unhashed"

Hash64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no integer above 2**64 - 1


class Manifest(msgspec.Struct, frozen=True):
    """One rank's part of a version.

    Attributes:
        version: its number.
        layout: fingerprint of the layout, which says what lies where.
        nbytes: length of the flat buffer; the last chunk may be short.
        chunk_bytes: length of every other chunk.
        chunks: xxh3-64 of each chunk.
        root: xxh3-128 over the layout and the chunk hashes.
    """

    version: int
    layout: str
    nbytes: int
    chunk_bytes: Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)]
    chunks: tuple[Hash64, ...]
    root: bytes

    @classmethod
    def of(
        cls, version: int, layout: str, nbytes: int, chunk_bytes: int, chunks: Sequence[int]
    ) -> "Manifest":
        """The manifest of these chunks."""
        hashes = tuple(chunks)
        return cls(version, layout, nbytes, chunk_bytes, hashes, root_hash(layout, chunk_bytes, hashes))

    def encode(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """How many chunks a buffer has; none when it is empty."""
    return -(-nbytes // chunk_bytes)


def encoded_limit(nbytes: int) -> int:
    """More bytes than any manifest of a buffer of this length takes."""
    return 1024 + 9 * chunk_count(nbytes, MIN_CHUNK_BYTES)


def root_hash(fingerprint: str, chunk_bytes: int, chunks: Sequence[int]) -> bytes:
    """xxh3-128 over a layout's fingerprint, the chunk size, and the chunk hashes in order."""
    digest = xxhash.xxh3_128(fingerprint.encode())
    digest.update(chunk_bytes.to_bytes(8, "little"))
    digest.update(b"".join(value.to_bytes(8, "little") for value in chunks))
    return digest.digest()


def fresh_mark() -> bytes:
    """In the place of a root, for weights that nobody has hashed: 16 bytes that were never given before."""
    return _UNHASHED + os.urandom(8)


def is_content(root: bytes) -> bool:
    """Whether a root says what the weights are, and not just that they are others than any before."""
    return not root.startswith(_UNHASHED)


def version_root(roots: Sequence[bytes]) -> bytes:
    """xxh3-128 over the roots of all ranks: what a version is, whoever holds it and however it is cut."""
    return xxhash.xxh3_128_digest(b"".join(roots))


def hash_chunk(view: memoryview) -> int:
    """xxh3-64 of a chunk's bytes."""
    digest = xxhash.xxh3_64()
    digest.update(view)  # lets other threads run meanwhile, which the one-shot function does not
    return digest.intdigest()


def decode(data: bytes | bytearray | memoryview, layout: str, nbytes: int, root: bytes) -> Manifest:
    """A manifest of this layout with root `root` (any, where that is a mark), or `CorruptChunk`.

    The caller's own layout decides every size, so nothing a peer sends makes the caller allocate.
    """
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptChunk(f"a manifest of {len(data)} bytes cannot be read: {error}") from error
    who = f"the manifest of version {manifest.version}"
    if (manifest.layout, manifest.nbytes) != (layout, nbytes):
        raise CorruptChunk(f"{who} does not describe this layout")
    expected = chunk_count(nbytes, manifest.chunk_bytes)
    if len(manifest.chunks) != expected:
        raise CorruptChunk(f"{who} has {len(manifest.chunks)} chunk hashes, expected {expected}")
    actual = root_hash(layout, manifest.chunk_bytes, manifest.chunks)
    if manifest.root != actual or (is_content(root) and actual != root):
        raise CorruptChunk(f"{who} has root {actual.hex()}, announced was {root.hex()}")
    return manifest
