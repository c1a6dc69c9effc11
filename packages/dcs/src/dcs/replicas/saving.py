"""A step on its way to the keepers: what the caller sees of it, and what is known of it inside."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from dcs.arguments import require_timeout
from dcs.errors import Closed, DcsError, Evicted, Timeout
from dcs.replicas.arenas import Arena
from dcs.replicas.errors import KeeperLost
from dcs.replicas.link import Link
from dcs.replicas.messages import Shard


@dataclass(frozen=True)
class Saved:
    """What became of a step that can be restored.

    Attributes:
        step: the step.
        nbytes: bytes of this rank's shard.
        freeze_seconds: for which training stood still while its tensors were copied.
        blocked_seconds: for which it waited for memory before that.
        seconds: from the call of `save` until this rank's copies were made or given up.
        held: addresses of the keepers that hold this rank's shard.
        failed: why others do not, by address; those that could not be reached at all only where copies are
            missing.
        degraded: whether there are fewer copies than were asked for.
    """

    step: int
    nbytes: int
    freeze_seconds: float
    blocked_seconds: float
    seconds: float
    held: tuple[str, ...]
    failed: dict[str, str]
    degraded: bool


@dataclass(frozen=True)
class Stats:
    """Sums over the saves of one `Replicas`: how many, bytes, seconds, how many with fewer copies than asked
    for.

    `completed` is the newest step of this session that is known to be complete over all ranks, or None.
    """

    saves: int = 0
    nbytes: int = 0
    freeze_seconds: float = 0.0
    blocked_seconds: float = 0.0
    degraded: int = 0
    completed: int | None = None


@dataclass(eq=False)
class Journey:
    """A frozen step, guarded by the lock of its `Replicas`, except for `shard`."""

    step: int
    bare: Shard  # without digests
    arena: Arena
    copies: int
    routes: list[Link]  # where the copies go
    spare: list[Link]  # and where they go instead
    freeze_seconds: float
    blocked_seconds: float
    began: float
    moving: int = 0  # copies that are being made
    busy: list[Link] = field(default_factory=list)  # and where
    open: int = 0  # copies that are neither made nor given up
    handed: Link | None = None  # it maps the arena
    held: list[Link] = field(default_factory=list)
    failed: dict[str, DcsError] = field(default_factory=dict)
    unreachable: dict[str, str] = field(default_factory=dict)  # keepers that were lost before, and why
    given_up: str = ""  # why no more copies are made
    complete: bool = False
    settled_at: float = 0.0
    released: bool = False  # the arena is somebody else's
    _shard: Shard | None = None
    _sealing: threading.Lock = field(default_factory=threading.Lock)

    def shard(self) -> Shard:
        """What it is made of, with the hash of every chunk; computed by whoever asks first."""
        with self._sealing:
            if self._shard is None:
                memory, bare = self.arena.memory, self.bare
                spans = (bare.span(chunk) for chunk in range(bare.chunks))
                digests = b"".join(xxhash.xxh3_128_digest(memory[start:end]) for start, end in spans)
                self._shard = Shard(
                    bare.name,
                    bare.session,
                    bare.world_size,
                    bare.rank,
                    bare.step,
                    bare.nbytes,
                    digests,
                    bare.structure,
                ).sealed()
            return self._shard

    @property
    def settled(self) -> bool:
        """Whether every copy is made or given up."""
        return self.open == 0

    def saved(self) -> Saved:
        """What became of it."""
        return Saved(
            self.step,
            self.bare.nbytes,
            self.freeze_seconds,
            self.blocked_seconds,
            self.settled_at - self.began,
            tuple(link.address for link in self.held),
            self._reasons(),
            len(self.held) < self.copies,
        )

    def _reasons(self) -> dict[str, str]:
        """Why keepers do not hold it; those that were lost before count where copies are missing."""
        reasons = dict(self.unreachable) if len(self.held) < self.copies else {}
        return reasons | {address: str(error) for address, error in self.failed.items()}

    def fault(self) -> DcsError | None:
        """Why it will never be complete, if so."""
        evicted = next((error for error in self.failed.values() if isinstance(error, Evicted)), None)
        if evicted is not None and not self.complete:
            return evicted
        if self.complete or not self.settled or (self.held and not self.given_up):
            return None
        reasons = "; ".join(f"{address}: {reason}" for address, reason in self._reasons().items())
        text = f"step {self.step} of rank {self.bare.rank} of {self.bare.name!r} is not kept"
        if self.given_up:
            return KeeperLost(f"{text}: {self.given_up}{f' ({reasons})' if reasons else ''}")
        kinds = {type(error) for error in self.failed.values()}
        kind = kinds.pop() if len(kinds) == 1 else KeeperLost
        return kind(f"{text} by any keeper: {reasons or 'none is reachable'}")


class Saving:
    """A step that `save` has frozen. Attributes: `step`."""

    def __init__(
        self,
        journey: Journey,
        changed: threading.Condition,
        closed: Callable[[], bool],
        lacking: Callable[[int], str],
        expedite: Callable[[], None],
    ) -> None:
        self.step = journey.step
        self._journey = journey
        self._changed = changed
        self._closed = closed
        self._lacking = lacking
        self._expedite = expedite

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        with self._changed:
            journey = self._journey
            self._expedite()
            return self._closed() or (journey.settled and (journey.complete or journey.fault() is not None))

    def wait(self, timeout: float = 60.0) -> Saved:
        """Wait until this step, or a newer one, can be restored, and this rank's copies are made or given up.

        Raises what the keepers answered when none holds this rank's shard (`KeeperFull`, `Evicted`,
        `KeeperLost`), `Timeout` naming the ranks that are missing, and `Closed`.
        """
        deadline = time.monotonic() + require_timeout(timeout)
        with self._changed:
            journey = self._journey
            while True:
                fault = journey.fault()
                if fault is not None:
                    raise fault
                if journey.settled and journey.complete:
                    return journey.saved()
                if self._closed():
                    raise Closed(f"the replicas were closed before step {self.step} was kept")
                left = deadline - time.monotonic()
                if left <= 0:
                    if not journey.settled:
                        raise Timeout(
                            f"step {self.step} is still on its way to"
                            f" {', '.join(link.address for link in journey.routes)} after {timeout} s"
                        )
                    raise Timeout(
                        f"step {self.step} is not complete after {timeout} s: no keeper in reach holds the "
                        f"shards of ranks {self._lacking(self.step)}"
                    )
                self._expedite()
                self._changed.wait(left)
