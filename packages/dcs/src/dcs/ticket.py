"""What `publish` returns: who has taken the version, and how long everything took."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from dcs.arguments import require_timeout
from dcs.control.messages import Roster
from dcs.errors import Closed, DcsError, Timeout
from dcs.interruptible import Condition


class Taken(msgspec.Struct, frozen=True):
    """What a subscriber took, in seconds.

    Attributes:
        transfer_seconds: from its first request to its last verified chunk.
        ack_seconds: from the end of the freeze until its ack was known here.
        pause_seconds: for which it says that it did not serve, as given to `Staged.ack`.
    """

    transfer_seconds: float
    ack_seconds: float
    pause_seconds: float


class Stats(msgspec.Struct, frozen=True):
    """How one publish went.

    Attributes:
        version: its number.
        nbytes: payload of this rank's part of the version, gaps between tensors included.
        wait_seconds: waiting for a staging buffer to be free.
        freeze_seconds: copying and hashing.
        announce_seconds: until the coordinator had told that all ranks have announced it.
        acked: subscribers that committed this version, by name.
        moved_on: subscribers that committed a newer version instead, by name.
        gone: subscribers that were evicted or left first, with the reason, by name.
        pending: names of those still awaited.
    """

    version: int
    nbytes: int
    wait_seconds: float
    freeze_seconds: float
    announce_seconds: float
    acked: dict[str, Taken]
    moved_on: dict[str, int]
    gone: dict[str, str]
    pending: tuple[str, ...]


def ranks_behind(announced: Sequence[int], version: int) -> str:
    """Who has not published a version, for error messages: the subject of a sentence, with its verb.

    Args:
        announced: by rank, the newest version that it has published; as many as are known.
        version: the one that is awaited.
    """
    behind = [str(rank) for rank, newest in enumerate(announced) if newest < version]
    if not behind:
        return "another rank of the publisher has"
    named = ", ".join(behind[:16]) + (", ..." if len(behind) > 16 else "")
    return (
        f"rank {named} of the publisher has" if len(behind) == 1 else f"ranks {named} of the publisher have"
    )


class Ticket:
    """Follows one version.

    Done when all ranks have published it, and every subscriber that was live then has acknowledged it, has
    moved on to a newer version, or is gone; at once when there was none. Live is, too, who was before the
    coordinator was restarted, while it may yet join the new one.
    """

    def __init__(self, version: int, nbytes: int, wait_seconds: float, freeze_seconds: float) -> None:
        self.version = version
        self._base = (version, nbytes, wait_seconds, freeze_seconds)
        self._changed = Condition()
        self._began = time.monotonic()
        self._announce_seconds = 0.0
        self._announced = False
        self._pending: dict[int, str] = {}
        self._acked: dict[str, Taken] = {}
        self._moved_on: dict[str, int] = {}
        self._gone: dict[str, str] = {}
        self._error: DcsError | None = None
        self._expecting_until = 0.0
        self._roster: Roster | None = None
        self._ranks: tuple[int, ...] = ()  # the newest version that each was last known to have published

    @property
    def done(self) -> bool:
        """Whether nobody is awaited any more."""
        with self._changed:
            return self._announced and not self._pending

    def stats(self) -> Stats:
        """How it stands now."""
        with self._changed:
            return Stats(
                *self._base,
                self._announce_seconds,
                dict(self._acked),
                dict(self._moved_on),
                dict(self._gone),
                tuple(sorted(self._pending.values())),
            )

    def wait(self, timeout: float) -> Stats:
        """Wait until it is done.

        Raises `Timeout` naming who is awaited; `CoordinatorLost`, `Evicted` or `Closed` when nobody can be
        heard any more.
        """
        deadline = time.monotonic() + require_timeout(timeout)
        with self._changed:
            while not self._is_over() and (left := deadline - time.monotonic()) > 0:
                expecting = self._expecting_until - time.monotonic()
                self._changed.wait_for(self._is_over, min(left, expecting) if expecting > 0 else left)
                self._review()
            if self._error is None and not self._announced:
                raise Timeout(
                    f"version {self.version} was not offered within {timeout} s:"
                    f" {ranks_behind(self._ranks, self.version)} not published it"
                )
            if self._error is None and self._pending:
                raise Timeout(
                    f"version {self.version} was not acknowledged within {timeout} s by"
                    f" {', '.join(sorted(self._pending.values()))}; their health() may say why"
                )
            if self._error is not None and (self._pending or not self._announced):
                raise self._error
        return self.stats()

    def begin(self, roster: Roster, expected: Mapping[int, str] = MappingProxyType({})) -> None:
        """The coordinator has announced the version; these are the subscribers to wait for, and those by
        member number that were known to a former coordinator, for as long as `expect_again` has said.
        """
        with self._changed:
            if not self._announced:  # else the coordinator repeats itself
                self._announced = True
                self._announce_seconds = time.monotonic() - self._began
                live = {member: standing.name for member, standing in roster.live.items()}
                names = set(live.values())
                self._pending = live | {m: name for m, name in expected.items() if name not in names}
        self.update(roster)

    def update(self, roster: Roster) -> None:
        """The roster has changed. Whoever is missing is gone, but for a while after `expect_again`."""
        with self._changed:
            self._roster, self._ranks = roster, roster.announced
            self._review()
            self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._error is not None or (self._announced and not self._pending)

    def _review(self) -> None:
        """With the lock held: who of the pending has it, or is gone, as of the last roster."""
        roster, now = self._roster, time.monotonic()
        if roster is None:
            return
        numbers = {standing.name: member for member, standing in roster.live.items()}
        for member, name in list(self._pending.items()):
            standing = roster.live.get(numbers.get(name, member))
            if standing is None:
                reason = roster.departed.get(member)
                if reason is None and now < self._expecting_until:
                    continue
                self._gone[name] = reason or "it is no member any more"
            elif standing.acked is None or standing.acked.version < self.version:
                continue
            elif standing.acked.version == self.version:
                acked = standing.acked
                self._acked[name] = Taken(acked.transfer_seconds, now - self._began, acked.pause_seconds)
            else:
                self._moved_on[name] = standing.acked.version
            del self._pending[member]

    def expect_again(self, seconds: float) -> None:
        """The coordinator may be a new one: subscribers have this long to join it again."""
        with self._changed:
            self._expecting_until = time.monotonic() + seconds
            self._changed.notify_all()

    def fail(self, error: DcsError) -> None:
        """Nobody will be heard of any more."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def restore(self) -> None:
        """The coordinator is heard again."""
        with self._changed:
            if not isinstance(self._error, Closed):
                self._error = None
