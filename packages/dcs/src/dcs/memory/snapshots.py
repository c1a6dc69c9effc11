"""The publisher's two staging buffers, and who is reading them.

A version stays readable until the publish after the next one needs its buffer. That publish waits for the
transfers that are under way, up to a deadline; then the version is superseded: no further chunk of it is
sent, and its readers move to the newest. A buffer is written only when no byte of it is being sent.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dcs.errors import DcsError
from dcs.layout import Layout
from dcs.manifest import Manifest
from dcs.memory.arena import Arena

_SEND_SECONDS = 1.0  # for a chunk that is being sent to finish, before its reader is cut
_CUT_SECONDS = 10.0  # for a cut reader to notice; a shut-down socket returns at once


class Superseded(Exception):
    """The version asked for is not held any more. Never leaves the package."""


class Reader(Protocol):
    def cut(self) -> None:
        """End the reader's connection at once."""
        ...


@dataclass(eq=False)
class Snapshot:
    """One frozen version in one of the two buffers."""

    arena: Arena
    manifest: Manifest
    encoded: bytes
    readers: set[Reader] = field(default_factory=set)
    sending: int = 0
    closing: bool = False  # takes no new readers
    retired: bool = False  # sends no further chunk


class SnapshotPair:
    """At most two snapshots, the older of which gives way to the next publish."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._changed = threading.Condition()
        self._free: list[Arena] = []
        self._allocated = 0
        self._held: list[Snapshot] = []

    def reserve(self, grace: float) -> Arena:
        """A buffer that nobody reads, to be given back by `install` or `release`.

        Waits up to `grace` seconds for transfers of the oldest version to finish, then supersedes it.
        """
        with self._changed:
            if self._free:
                return self._free.pop()
            if self._allocated < 2:
                self._allocated += 1
                return Arena(self._layout)
            oldest = self._held[0]
            oldest.closing = True
            self._changed.wait_for(lambda: not oldest.readers, grace)
            oldest.retired = True
            if not self._changed.wait_for(lambda: not oldest.sending, _SEND_SECONDS):
                for reader in list(oldest.readers):
                    reader.cut()
                if not self._changed.wait_for(lambda: not oldest.sending, _CUT_SECONDS):
                    raise DcsError(
                        f"version {oldest.manifest.version} is still being sent {_CUT_SECONDS} s after its"
                        " readers were cut; its buffer cannot be reused"
                    )
            self._held.remove(oldest)
            return oldest.arena

    def install(self, arena: Arena, manifest: Manifest) -> None:
        """Make a filled buffer readable."""
        with self._changed:
            self._held.append(Snapshot(arena, manifest, manifest.encode()))

    def withdraw(self, version: int) -> None:
        """Take back a version that was installed and then not announced."""
        with self._changed:
            for snapshot in [held for held in self._held if held.manifest.version == version]:
                snapshot.closing = snapshot.retired = True
                self._held.remove(snapshot)
                if snapshot.sending:  # somebody guessed its number; leave the memory to them
                    self._allocated -= 1
                else:
                    self._free.append(snapshot.arena)

    def restamp(self, epoch: int) -> None:
        """Serve what is held under a new epoch; transfers under the old one go on, the bytes are the same."""
        with self._changed:
            for snapshot in self._held:
                snapshot.manifest = msgspec.structs.replace(snapshot.manifest, epoch=epoch)
                snapshot.encoded = snapshot.manifest.encode()

    def release(self, arena: Arena) -> None:
        """Give back a buffer that was reserved and not installed."""
        with self._changed:
            self._free.append(arena)

    def open(self, reader: Reader, epoch: int, version: int) -> Snapshot:
        """Start a transfer; raises `Superseded` when the version is not held."""
        with self._changed:
            for snapshot in self._held:
                manifest = snapshot.manifest
                if (manifest.epoch, manifest.version) == (epoch, version) and not snapshot.closing:
                    snapshot.readers.add(reader)
                    return snapshot
        raise Superseded

    def close(self, reader: Reader, snapshot: Snapshot) -> None:
        """End a transfer."""
        with self._changed:
            snapshot.readers.discard(reader)
            self._changed.notify_all()

    @contextmanager
    def chunk(self, snapshot: Snapshot, index: int) -> Iterator[memoryview]:
        """The bytes of a chunk, which stay as they are inside the `with`; raises `Superseded`."""
        with self._changed:
            if snapshot.retired:
                raise Superseded
            snapshot.sending += 1
        try:
            start, end = snapshot.manifest.span(index)
            yield snapshot.arena.memory[start:end]
        finally:
            with self._changed:
                snapshot.sending -= 1
                self._changed.notify_all()
