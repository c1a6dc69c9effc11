"""That the files of a checkpoint are those that its ranks wrote: neither lost, cut short nor changed.

FOLDER/sha256-RANK.json    {file: digest} of what this rank wrote; rank 0 also answers for what is of all
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from relax.backends.train.errors import StateCorruptError


def write(folder: Path, rank: int, names: Sequence[str]) -> None:
    """Write the digests of files that are there; all of them are on the disk when this returns."""
    found = {name: _digest(folder / name) for name in sorted(names)}
    index = folder / _name(rank)
    index.write_text(json.dumps(found, indent=1) + "\n")
    for path in (*(folder / name for name in found), index, folder):
        flush(path)


def require(folder: Path, ranks: int, *, rank: int, world_size: int) -> None:
    """See that files are as they were written; each of those who read answers for some of those who wrote.

    Args:
        folder: of the checkpoint.
        ranks: that wrote it.
        rank, world_size: of who reads.

    Raises:
        StateCorruptError: a file is not there, or not what was written.
    """
    for writer in range(rank, ranks, world_size):
        index = folder / _name(writer)
        try:
            told = {str(name): str(digest) for name, digest in json.loads(index.read_bytes()).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise StateCorruptError(f"{index} cannot be read: {error}; take another checkpoint") from error
        for name, digest in told.items():
            try:
                found = _digest(folder / name)
            except OSError as error:
                raise StateCorruptError(
                    f"checkpoint {folder} lacks {name}: {error}; take another checkpoint"
                ) from error
            if found != digest:
                raise StateCorruptError(
                    f"{folder / name} has sha256 {found}, but {digest} was written; take another checkpoint"
                )


def flush(path: Path) -> None:
    """Have a file or folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(rank: int) -> str:
    return f"sha256-{rank:05d}.json"


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
