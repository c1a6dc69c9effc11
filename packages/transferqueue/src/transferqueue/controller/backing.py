"""Arenas in files: for a journal, so that payload outlives every process, and for what memory has no room."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from ..errors import Corrupt
from ..transport.arenas import SharedMemory
from .journal import sync_folder

ARENA_BYTES = 1 << 28
_FILE_BYTES = 1 << 26  # of an arena in a file, whose blocks are all allocated
_LEAST = 1 << 24


class Backing(Protocol):
    """Makes arenas.

    Attributes:
        arena_bytes: of an ordinary one; larger ones are multiples.
    """

    arena_bytes: int

    def make(self, arena: int, nbytes: int) -> int:
        """A descriptor of `nbytes` of memory that processes can share. OSError if there is no room."""
        ...

    def is_filled(self, arena: int) -> bool:
        """Whether the bytes of an arena are allocated from the beginning."""
        ...

    def fill(self, descriptor: int, arena: int, start: int, stop: int) -> None:
        """Allocates bytes that were given back. OSError if there is no room."""
        ...


class InMemory:
    """Anonymous shared memory, whose pages are taken when they are first written."""

    arena_bytes = ARENA_BYTES

    def __init__(self) -> None:
        self._memory = SharedMemory()

    def make(self, arena: int, nbytes: int) -> int:
        return self._memory.make(arena, nbytes)

    def is_filled(self, arena: int) -> bool:
        return False

    def fill(self, descriptor: int, arena: int, start: int, stop: int) -> None:
        """Nothing to do."""


class Spilling:
    """Shared memory up to a limit, and beyond it files that have no name.

    Args:
        nbytes: of shared memory.
        folder: on the disk to use; made if it is not there.
    """

    def __init__(self, nbytes: int, folder: Path) -> None:
        self.arena_bytes = min(ARENA_BYTES, max(_LEAST, nbytes // 4))
        self._left = nbytes
        self._folder = folder
        self._memory = SharedMemory()
        self._files: set[int] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def make(self, arena: int, nbytes: int) -> int:
        if nbytes <= self._left:
            descriptor = self._memory.make(arena, nbytes)
            self._left -= nbytes
            return descriptor
        descriptor = os.open(self._folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            os.close(descriptor)
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self._folder)) from None
        self._files.add(arena)
        return descriptor

    def is_filled(self, arena: int) -> bool:
        return arena in self._files

    def fill(self, descriptor: int, arena: int, start: int, stop: int) -> None:
        if arena in self._files:
            _allocate(descriptor, start, stop, self._folder)


class InFiles:
    """Files in the folder of a journal. What is in them stays when every process is gone."""

    arena_bytes = _FILE_BYTES

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self, arena: int, nbytes: int) -> int:
        path = self._path(arena)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _allocate(descriptor, 0, nbytes, self._folder)
            os.fsync(descriptor)  # the journal will name it, so the disk has to have it first
            sync_folder(self._folder)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return descriptor

    def reopen(self, arena: int, nbytes: int) -> int:
        """A descriptor of an arena that is there. Corrupt if it is not, or not all of it."""
        path = self._path(arena)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Corrupt(f"{path} is missing; restore a snapshot, or remove the folder") from None
        size = os.fstat(descriptor).st_size
        if size != nbytes:
            os.close(descriptor)
            raise Corrupt(f"{path} has {size} bytes of {nbytes}; restore a snapshot, or remove the folder")
        return descriptor

    def keep_only(self, arenas: Iterable[int]) -> None:
        """Removes files of arenas that no journal ever named."""
        known = set(arenas)
        for path in self._folder.iterdir():
            name = re.fullmatch(r"arena-(\d+)", path.name)
            if name and int(name[1]) not in known:
                path.unlink()

    def is_filled(self, arena: int) -> bool:
        return True

    def fill(self, descriptor: int, arena: int, start: int, stop: int) -> None:
        _allocate(descriptor, start, stop, self._folder)

    def _path(self, arena: int) -> Path:
        return self._folder / f"arena-{arena}"


def _allocate(descriptor: int, start: int, stop: int, folder: Path) -> None:
    try:
        os.posix_fallocate(descriptor, start, stop - start)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(folder)) from None
