"""What an engine does next: decided from what has arrived (live), or read from a log (replay).

Both look at the same `Inbox` and answer with one action, so a replay takes exactly the recorded decisions
whatever the timing of the calls.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentic import GenerationRequest
from torch import Tensor

from relax.backends.inference.errors import ReplayMismatch


@dataclass(frozen=True)
class StagedVersion:
    """A version begun: its tensors by name, not yet copied."""

    version: int
    tensors: Mapping[str, Tensor]


@dataclass
class Inbox:
    """What callers have asked for and the compute thread has not taken up. Guarded by the engine's lock."""

    waiting: dict[str, GenerationRequest] = field(default_factory=dict)
    """By id, in order of arrival."""
    aborts: dict[str, None] = field(default_factory=dict)
    """Ids, in order of arrival."""
    staged: StagedVersion | None = None
    commit: StagedVersion | None = None
    """The version whose commit has been asked for."""


@dataclass(frozen=True)
class Admit:
    ids: Sequence[str]


@dataclass(frozen=True)
class Decode:
    pass


@dataclass(frozen=True)
class Commit:
    version: int


@dataclass(frozen=True)
class Abort:
    id: str


Action = Admit | Decode | Commit | Abort


class Schedule(Protocol):
    """Chooses the next action between two decode steps; None waits for a call to arrive."""

    def next(self, inbox: Inbox, running: Collection[str], free: int) -> Action | None: ...

    def check_commit(self, version: int) -> None:
        """Raise if the schedule has no place for a commit."""
        ...


class LiveSchedule:
    """Aborts, then a commit, then whatever fits of what waits, first come first served, then a decode."""

    def next(self, inbox: Inbox, running: Collection[str], free: int) -> Action | None:
        while inbox.aborts:
            request_id = next(iter(inbox.aborts))
            del inbox.aborts[request_id]
            if request_id in inbox.waiting or request_id in running:
                return Abort(request_id)
        if inbox.commit is not None:
            return Commit(inbox.commit.version)
        if inbox.waiting and free:
            ids = list(inbox.waiting)
            return Admit(ids[:free])
        return Decode() if running else None

    def check_commit(self, version: int) -> None:
        pass


class ReplaySchedule:
    """The events of a log, each waiting for the calls it needs; after the last one, live.

    Requests that the log does not hold (they were still waiting when it ended) wait for its end here, too.
    """

    def __init__(self, events: Iterable[Sequence[Any]]) -> None:
        self._events: list[list[Any]] = [list(event) for event in reversed(list(events))]
        self._versions = sorted({what for kind, what in self._events if kind == "commit"})
        self._live = LiveSchedule()

    def next(self, inbox: Inbox, running: Collection[str], free: int) -> Action | None:
        if not self._events:
            return self._live.next(inbox, running, free)
        # Aborts of this run happened at another moment than the recorded ones, which alone count.
        inbox.aborts.clear()
        kind, what = self._events[-1]
        match kind:
            case "decode":
                if not running:
                    raise ReplayMismatch(
                        f"the log says {what} more decode steps, but nothing runs: the requests or weights "
                        "are not those of the recorded run"
                    )
                self._events[-1][1] -= 1
                if self._events[-1][1] == 0:
                    self._events.pop()
                return Decode()
            case "admit" if all(name in inbox.waiting for name in what):
                if len(what) > free:
                    raise ReplayMismatch(
                        f"the log admits {len(what)} requests and {free} slots are free: max_running is "
                        f"smaller than in the "
                        "recorded run, or its requests ended earlier"
                    )
                self._events.pop()
                return Admit(what)
            case "commit" if inbox.commit is not None and inbox.commit.version == what:
                self._events.pop()
                return Commit(what)
            case "abort" if what in inbox.waiting or what in running:
                self._events.pop()
                return Abort(what)
            case "admit" | "commit" | "abort":
                return None
        raise ReplayMismatch(f"the log holds an event of unknown kind {kind!r}")

    def check_commit(self, version: int) -> None:
        # Versions after the last recorded one wait for the end of the log.
        if self._events and version not in self._versions and version < max(self._versions, default=version):
            raise ReplayMismatch(
                f"version {version} is not in the log that this engine replays; it commits {self._versions}"
            )
