"""Versions by broadcast: the groups that the coordinator forms, on the publisher's side and on a receiver's.

What a broadcast brings is not believed: a receiver gets the manifest from the rank and keeps the chunks whose
hashes agree. Whatever fails, the rest of the version comes over another wire.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dcs.control.messages import Gathering
from dcs.errors import Closed
from dcs.manifest import Manifest, hash_chunk
from dcs.memory.shelf import Copy, Shelf, Superseded
from dcs.wire.collective import CollectiveBroken, Group

BUCKET_BYTES = 64 << 20


class Groups:
    """The one group that a member is in, made when a gathering names another one. For one thread at a time.

    Args:
        seconds: that making a group, and each broadcast, may take.
        device: of this member, for nccl.
    """

    def __init__(self, seconds: float, device: str | None) -> None:
        self._seconds = seconds
        self._device = device
        self._group: Group | None = None

    def broadcast(self, gathering: Gathering, flat: torch.Tensor) -> None:
        """Make `flat` (uint8 [n], host) of all members rank 0's. Raises `CollectiveBroken` and `Closed`."""
        group = self._group
        if group is None or group.key != gathering.key:
            self.close()
            group = self._group = Group(
                gathering.backend,
                gathering.store.host,
                gathering.store.port,
                gathering.key,
                gathering.rank,
                gathering.size,
                self._seconds,
                self._device,
                wait=False,  # `broadcast` does, and `abort` reaches it
            )
        try:
            group.broadcast(flat, bucket_bytes=BUCKET_BYTES)
        except CollectiveBroken:
            self.close()
            raise

    def abort(self) -> None:
        """End what is under way, from any thread."""
        group = self._group
        if group is not None:
            group.abort("this member is closing")

    def close(self) -> None:
        """Give the group up."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def confirm(copy: Copy, manifest: Manifest) -> np.ndarray:
    """Which chunks of a copy that was broadcast are right: bool [chunks], all or none of them when the
    publisher's chunks are of another size.
    """
    memory, right = copy.arena.memory, []
    for index, expected in enumerate(manifest.chunks):
        start = index * manifest.chunk_bytes
        right.append(hash_chunk(memory[start : start + manifest.chunk_bytes]) == expected)
    if manifest.chunk_bytes == copy.chunk_bytes:
        return np.array(right, dtype=bool)
    return np.full(len(copy.missing), all(right), dtype=bool)


@dataclass(eq=False)
class _Sending:
    """Reads a copy for as long as it is broadcast."""

    groups: Groups
    maps: bool = False

    def cut(self) -> None:
        self.groups.abort()


class Broadcaster:
    """The publisher's thread that takes part in gatherings as their rank 0.

    Args:
        shelf: of the publisher.
        seconds, device: as for `Groups`.
    """

    def __init__(self, shelf: Shelf, seconds: float, device: str | None) -> None:
        self._shelf = shelf
        self._groups = Groups(seconds, device)
        self._changed = threading.Condition()
        self._asked: deque[tuple[Gathering, int, bytes]] = deque(maxlen=2)
        self._last = ("", -1)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dcs-broadcast", daemon=True)
        self._thread.start()

    def ask(self, gathering: Gathering, version: int, mark: bytes) -> None:
        """Broadcast a version to a gathering; asking again does nothing."""
        with self._changed:
            if (gathering.key, version) != self._last:
                self._last = (gathering.key, version)
                self._asked.append((gathering, version, mark))
                self._changed.notify_all()

    def close(self) -> None:
        """Stop and join the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._groups.abort()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._asked or self._closed)
                    if self._closed:
                        return
                    gathering, version, mark = self._asked.popleft()
                reader = _Sending(self._groups)
                try:
                    copy = self._shelf.open(reader, version, mark, 0.0)
                except Superseded:
                    continue
                try:
                    self._groups.broadcast(gathering, torch.from_numpy(copy.arena.flat))
                except (CollectiveBroken, Closed):
                    continue  # the receivers go on over another wire, and the next gathering is another one
                finally:
                    self._shelf.close_reader(reader, copy, done=True)
        finally:
            self._groups.close()


def receive(
    groups: Groups, gathering: Gathering, copy: Copy, manifest: Callable[[], Manifest], shelf: Shelf
) -> bool:
    """Take part as a receiver, and keep what the manifest confirms; whether that is all of it.

    Raises `CollectiveBroken`, when nothing is known of what has arrived. What `manifest` raises.
    """
    groups.broadcast(gathering, torch.from_numpy(copy.arena.flat))
    right = confirm(copy, known := manifest())
    with shelf.changed:
        copy.missing[right] = 0
        if known.chunk_bytes == copy.chunk_bytes:
            for index in np.flatnonzero(right).tolist():
                copy.hashes[index] = known.chunks[index]
        shelf.notify()
    return bool(right.all())
