"""The folder that a snapshot lies in: files of payload, and a manifest that says which of them count.

The manifest is replaced as a whole, last of all, so that at any moment the folder holds the snapshot before
or the new one. What a writer that died has left there is named by no manifest, and goes with the next.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import Corrupt, Full, InvalidArgument, QueueError
from . import events
from .journal import read_whole, write_whole

log = logging.getLogger("transferqueue")

FORMAT = 1
_MANIFEST = "manifest"
_OURS = re.compile(rf"{_MANIFEST}|{_MANIFEST}\.tmp|payload-[0-9a-f]{{8}}-\d+")
# What file systems say that have no locks for folders.
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SavedBlock(msgspec.Struct, frozen=True, array_like=True):
    """Where a block lies in a snapshot, and the XXH3 of it."""

    block: int
    file: int
    at: int
    sum: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """What a snapshot is.

    Attributes:
        format: of this message.
        files: names of the files of payload.
        state: an encoded `StoreState` without memory, grants or clients.
    """

    format: int
    files: list[str]
    blocks: list[SavedBlock]
    state: bytes


_claimed: set[tuple[int, int]] = set()  # device and inode of the folders that this process writes to
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Manifest).decode


class Target:
    """A folder while a snapshot is written to it; nobody else writes one there.

    Args:
        folder: made if it is not there.
        files: how many files of payload there will be.

    Attributes:
        files: their names.

    Raises:
        InvalidArgument: it cannot be written, holds something else, or is a target already.
    """

    def __init__(self, folder: Path, files: int) -> None:
        if not folder.is_absolute():
            raise InvalidArgument(f"no snapshot can be written to {folder}: the path is not absolute")
        self.folder = folder
        self._claimed: tuple[int, int] | None = None
        token = secrets.token_hex(4)
        self.files = [f"payload-{token}-{number}" for number in range(files)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # ValueError: a name with a null byte
            raise InvalidArgument(f"no snapshot can be written to {folder}: {error}") from error
        try:
            self._claim()
            earlier = self._check()
            self._earlier = earlier if self._named is None else self._named & earlier
            _remove(folder, earlier - self._earlier)
        except BlockingIOError:
            self._close()
            raise InvalidArgument(
                f"another snapshot is being written to {folder}; wait for it, or name another folder"
            ) from None
        except OSError as error:
            self._close()
            raise InvalidArgument(f"no snapshot can be written to {folder}: {error}") from error
        except QueueError:
            self._close()
            raise

    def _claim(self) -> None:
        """Raises BlockingIOError where another has the folder. Stores that write to one folder of a network
        file system without such locks are only told from each other where one process has both.
        """
        status = os.fstat(self._lock)
        folder = (status.st_dev, status.st_ino)
        if folder in _claimed:
            raise BlockingIOError
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        _claimed.add(folder)
        self._claimed = folder

    def _check(self) -> set[str]:
        """The files there besides the manifest, which are all of snapshots."""
        names: set[str] = set()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if not _OURS.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                    raise InvalidArgument(
                        f"{self.folder} holds something that is no snapshot ({entry.name}); name an empty "
                        "folder"
                    )
                names.add(entry.name)
        return names - {_MANIFEST}

    @property
    def _named(self) -> set[str] | None:
        """What the manifest that is there names; None if it cannot be read."""
        path = self.folder / _MANIFEST
        if not path.exists():
            return set()
        try:
            return set(_decode(read_whole(path)).files)
        except (Corrupt, msgspec.DecodeError):
            return None

    def finish(self, blocks: Sequence[SavedBlock], state: bytes) -> QueueError | None:
        """Lets the files count instead of those there were; returns why that cannot be."""
        content = _encode(Manifest(FORMAT, self.files, list(blocks), state))
        try:
            write_whole(self.folder / _MANIFEST, content)
        except OSError as error:
            self.give_up()
            why = f"the snapshot in {self.folder} could not be finished: {error}"
            return Full(why) if error.errno in _NO_ROOM else InvalidArgument(why)
        _remove(self.folder, self._earlier)
        self._close()
        return None

    def give_up(self) -> None:
        """Leaves the snapshot that was there, if one was."""
        _remove(self.folder, self.files)
        self._close()

    def _close(self) -> None:
        descriptor, self._lock = self._lock, -1
        if self._claimed is not None:
            _claimed.discard(self._claimed)
            self._claimed = None
        if descriptor >= 0:
            os.close(descriptor)


def _remove(folder: Path, names: Iterable[str]) -> None:
    """What cannot be removed now does no harm: no manifest names it, and the next snapshot tries again."""
    for name in names:
        try:
            with suppress(FileNotFoundError):
                (folder / name).unlink()
        except OSError as error:
            log.warning("%s is left over and cannot be removed: %s", folder / name, error)


def read(folder: Path) -> tuple[Manifest, events.StoreState]:
    """The snapshot in a folder, without its payload.

    Raises:
        InvalidArgument: there is none, or it cannot be read.
        Corrupt: it was changed, or is of another version.
    """
    path = folder / _MANIFEST
    try:
        if not path.is_file():
            raise InvalidArgument(f"{folder} is no snapshot: it has no {_MANIFEST}")
        content = read_whole(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{folder} cannot be read: {error}") from error
    try:
        manifest = _decode(content)
        state = events.decode_state(manifest.state)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{path} is of another version of transferqueue ({error})") from error
    if (manifest.format, state.format) != (FORMAT, events.FORMAT):
        raise Corrupt(f"{path} has format {manifest.format}, where {FORMAT} is known")
    _check_whole(path, manifest, state)
    return manifest, state


def _check_whole(path: Path, manifest: Manifest, state: events.StoreState) -> None:
    """Raises Corrupt for a manifest that refers to what it does not have."""
    rows = {block.number: block.rows for block in state.blocks}
    lost = [name for name in manifest.files if not _OURS.fullmatch(name)]
    lost += [f"file {block.file}" for block in manifest.blocks if not 0 <= block.file < len(manifest.files)]
    if sorted(rows) != sorted(block.block for block in manifest.blocks):
        lost.append("blocks that are not in its state")
    lost += [
        f"row {row} of block {block}"
        for shelf in state.shelves
        for sample in shelf.partition.samples
        for block, row in sample.places
        if not 0 <= row < rows.get(block, 0)
    ]
    if lost:
        raise Corrupt(f"{path} names {lost[0]}, which is no part of it; take another snapshot")
