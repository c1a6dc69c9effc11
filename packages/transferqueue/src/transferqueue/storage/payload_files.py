"""Blocks copied from arenas into a file, and back."""

import os
from collections.abc import Sequence

import numpy as np
import xxhash

from ..errors import Corrupt
from ..transport.arenas import ArenaMap
from ..wire.messages import Range


def save(arenas: ArenaMap, path: str, at: int, ranges: Sequence[Range]) -> list[int]:
    """Writes ranges one behind the other into a file, from `at` on, so that the disk has them; returns the
    XXH3 of each. OSError if there is no room.
    """
    sums: list[int] = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for where in ranges:
            block = arenas.read(where.arena, where.start, where.stop)
            sums.append(xxhash.xxh3_64_intdigest(block))
            _write(descriptor, memoryview(block), at)
            at += len(block)
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return sums


def load(arenas: ArenaMap, path: str, at: int, ranges: Sequence[Range], sums: Sequence[int]) -> None:
    """Reads what `save` wrote into ranges of the same sizes.

    Raises:
        Corrupt: the file is shorter, or has other bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Corrupt(f"{path} is missing from the snapshot; take another") from None
    try:
        for where, expected in zip(ranges, sums, strict=True):
            block = arenas.write(where.arena, where.start, where.stop)
            if _read(descriptor, block, at) < len(block):
                raise Corrupt(f"{path} ends before byte {at + len(block)}; take another snapshot")
            if xxhash.xxh3_64_intdigest(block) != expected:
                raise Corrupt(f"{path} does not match its checksum at byte {at}; take another snapshot")
            at += len(block)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        at += written
        data = data[written:]


def _read(descriptor: int, into: np.ndarray, at: int) -> int:
    """Fills `into` as far as the file goes; returns how far."""
    done = 0
    while done < len(into):
        got = os.preadv(descriptor, [memoryview(into)[done:]], at + done)
        if not got:
            break
        done += got
    return done
