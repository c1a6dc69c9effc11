"""Records on disk: appended in turns, checked when read, rewritten when most of them are past.

A folder holds ``state-N``, the whole state when ``journal-N`` was begun, and what changed since in
``journal-N`` (and ``journal-N+1``, where the rewriting that begins with it was cut short). A record is a
header of 32 bytes (magic, kind, its number, bytes, XXH3 of all) and its bytes. What follows the last record
is zeros: room is taken in advance, so that an append does not find the disk full.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..errors import Corrupt, QueueError

log = logging.getLogger("transferqueue")

_MAGIC = b"TqJ1"
_HEADER = struct.Struct("<4sIQQQ")
_STATE, _TURN, _WHOLE = 1, 2, 3
_AHEAD = 4 << 20  # bytes taken in advance
_RESERVE = 1 << 20  # bytes left of them for what makes room elsewhere
_REWRITE_FROM = 16 << 20  # bytes of a journal below which rewriting is not worth it
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderInUse(QueueError):
    """Another store keeps its journal there."""


@dataclass(frozen=True)
class Recovered:
    """What a folder held: the last state that was written whole, and what changed since."""

    state: bytes
    turns: list[bytes]


class Journal:
    """The journal in one folder, which this process holds until it ends.

    Args:
        folder: made if it is not there.
        fsync: `write` returns when the disk has it.

    Attributes:
        fsync: as given.
        full: why no more room could be taken, or None.

    Raises:
        FolderInUse: another process holds it.
    """

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        self.folder = folder
        self.full: OSError | None = None
        self.fsync = fsync
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FolderInUse(
                f"the journal folder {folder} is used by another store; give each store a folder of its own"
            ) from None
        self._file = -1
        self._number = -1
        self._record = 0
        self._at = 0
        self._room = 0
        self._state_bytes = 0

    # -- reading ---------------------------------------------------------------------------------------------

    def recover(self) -> Recovered | None:
        """What earlier stores left; None in a new folder. A record at the end that was not written whole is
        cut off. Call it once, before anything is written.

        Raises:
            Corrupt: something was changed that had been written whole.
        """
        for half_written in self.folder.glob("*.tmp"):
            half_written.unlink()
        states = self._numbered("state")
        if not states:
            for orphan in self._numbered("journal"):
                path = self._path("journal", orphan)
                if path.read_bytes().strip(b"\0"):
                    raise Corrupt(
                        f"{path} has no state-{orphan} beside it, which it continues; restore a snapshot, or "
                        "remove the folder to begin anew"
                    )
                path.unlink()  # left by a store that ended when it had hardly begun
            return None
        number = max(states)
        path = self._path("state", number)
        [(_, state)] = list(_records(path, _STATE, None)) or [(0, None)]
        if state is None:
            raise Corrupt(
                f"{path} does not match its checksum; restore a snapshot, or remove the folder to begin anew"
            )
        self._number, self._state_bytes = number, len(state)
        turns: list[bytes] = []
        journals = sorted(one for one in self._numbered("journal") if one >= number)
        for journal in journals:
            path = self._path("journal", journal)
            end = 0
            for stop, turn in _records(path, _TURN, self._record):
                turns.append(turn)
                self._record += 1
                end = stop
            self._cut(path, end, last=journal == journals[-1])
            self._at = end
        if not journals:
            raise Corrupt(f"{self._path('journal', number)} is missing beside {path.name}")
        self._begin(journals[-1], self._at)
        self._clean(number)
        return Recovered(state, turns)

    def _numbered(self, kind: str) -> list[int]:
        names = (re.fullmatch(rf"{kind}-(\d+)", path.name) for path in self.folder.iterdir())
        return [int(name[1]) for name in names if name]

    def _path(self, kind: str, number: int) -> Path:
        return self.folder / f"{kind}-{number}"

    @staticmethod
    def _cut(path: Path, end: int, *, last: bool) -> None:
        """Removes what follows the last whole record."""
        with path.open("rb") as file:
            file.seek(end)
            rest = file.read()
        lost = len(rest.rstrip(b"\0"))
        if lost:
            if not last:
                raise Corrupt(f"{path} ends at byte {end} in the middle of a record, but another follows it")
            log.warning("%s: the last %d bytes were not written whole and are cut off", path, lost)
            os.truncate(path, end)

    def _begin(self, number: int, at: int) -> None:
        if self._file >= 0:
            os.close(self._file)
        path = self._path("journal", number)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._at, self._room = at, os.fstat(self._file).st_size
        self._number = number
        self._take_room()

    def _clean(self, number: int) -> None:
        for kind in ("state", "journal"):
            for old in self._numbered(kind):
                if old < number:
                    self._path(kind, old).unlink()

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, turn: bytes) -> None:
        """Appends what changed in a turn.

        Raises:
            OSError: there is no room, and `full` says so; nothing was written, and it may be tried again.
                Any other means that the disk cannot be trusted.
        """
        record = _record(_TURN, self._record, turn)
        if self._at + len(record) > self._room:
            self._take_room(len(record))
        if self._at + len(record) > self._room:
            assert self.full is not None
            raise self.full
        try:
            _write_all(self._file, record, self._at)
        except OSError as error:  # where taking room in advance promises nothing: a quota, copy on write
            if error.errno in _NO_ROOM:
                self.full = error
            raise
        if self.fsync:
            os.fdatasync(self._file)
        self._at += len(record)
        self._record += 1
        if self._room - self._at < _RESERVE:
            self._take_room()

    def look_for_room(self) -> None:
        """Tries again where `full` is set."""
        if self.full is not None:
            self._take_room()

    @property
    def left(self) -> int:
        """Bytes that can still be written while it is full."""
        return self._room - self._at

    def _take_room(self, nbytes: int = 0) -> None:
        room = self._at + nbytes + _AHEAD
        if room <= self._room:
            self.full = None
            return
        try:
            os.posix_fallocate(self._file, self._room, room - self._room)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            if self.full is None:
                log.warning("no room for the journal in %s: %s", self.folder, error)
            self.full = error
            return
        self._room, self.full = room, None

    @property
    def is_due(self) -> bool:
        """Whether most of the journal is past, so that it should be rewritten."""
        return self._at > max(_REWRITE_FROM, 4 * self._state_bytes)

    def rewrite(self, state: bytes) -> bool:
        """Begins a new journal with the whole state; returns whether there was room for it. The old one
        counts until the new one is whole.
        """
        number = self._number + 1
        half = self.folder / f"state-{number}.tmp"
        try:
            _write_file(half, _record(_STATE, number, state))
            journal = os.open(self._path("journal", number), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.close(journal)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            log.warning("no room to rewrite the journal in %s: %s", self.folder, error)
            with suppress(FileNotFoundError):
                half.unlink()
            self._state_bytes *= 2  # try again, but not with every turn
            return False
        half.rename(self._path("state", number))
        sync_folder(self.folder)
        self._record, self._state_bytes = 0, len(state)
        self._begin(number, 0)
        self._clean(number)
        return True

    def close(self) -> None:
        """Gives the folder up. Idempotent."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1


def _record(kind: int, number: int, content: bytes) -> bytes:
    return _header(kind, number, content) + content


def _header(kind: int, number: int, content: bytes | memoryview) -> bytes:
    head = _HEADER.pack(_MAGIC, kind, number, len(content), 0)
    digest = xxhash.xxh3_64(head)
    digest.update(content)
    return head[:24] + digest.intdigest().to_bytes(8, "little")


def _records(path: Path, kind: int, first: int | None) -> Iterator[tuple[int, bytes]]:
    """The records of a file, each with where it ends, up to the first that is not whole.

    Raises:
        Corrupt: there are whole ones behind that one.
    """
    size = path.stat().st_size
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        at, number = 0, first
        while (content := _record_at(mapped, at, kind, number)) is not None:
            at += _HEADER.size + len(content)
            yield at, content
            number = None if number is None else number + 1
        behind = mapped.find(_MAGIC, at)
        while behind >= 0:
            if _record_at(mapped, behind, kind, None) is not None:
                raise Corrupt(
                    f"{path} is damaged at byte {at}: the record there does not match its checksum, but "
                    f"there is a whole one at byte {behind}. Restore a snapshot, or cut the file off at "
                    f"byte {at} and lose what follows (truncate -s {at} {path})",
                    path=str(path),
                    offset=at,
                )
            behind = mapped.find(_MAGIC, behind + 1)


def _record_at(mapped: mmap.mmap, at: int, kind: int, number: int | None) -> bytes | None:
    if at + _HEADER.size > len(mapped):
        return None
    head = mapped[at : at + _HEADER.size]
    magic, is_kind, is_number, nbytes, _ = _HEADER.unpack(head)
    start = at + _HEADER.size
    if magic != _MAGIC or is_kind != kind or nbytes > len(mapped) - start:
        return None
    content = mapped[start : start + nbytes]
    if _header(kind, is_number, content) != head or number not in (None, is_number):
        return None
    return content


def _write_all(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, at)
        at += written
        view = view[written:]


def _write_file(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file by one record, so that either the old or the new one is there. OSError if there is no
    room.
    """
    half = path.with_name(f"{path.name}.tmp")
    try:
        _write_file(half, _record(_WHOLE, 0, content))
        half.rename(path)
    except OSError:
        with suppress(FileNotFoundError):
            half.unlink()
        raise
    sync_folder(path.parent)


def read_whole(path: Path) -> bytes:
    """What `write_whole` wrote. Corrupt if it was changed since."""
    found = list(_records(path, _WHOLE, 0))
    if len(found) != 1:
        raise Corrupt(f"{path} does not match its checksum")
    return found[0][1]


def sync_folder(folder: Path) -> None:
    """Has the disk know which files are in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
