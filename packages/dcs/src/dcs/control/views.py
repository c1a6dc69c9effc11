"""What a coordinator shows of itself: frozen structs for `/topology`, `/versions`, `/metrics` and `dcs top`.

`Coordinator.snapshot()` makes a `Topology`; it shares nothing with the live state, and encodes to JSON with
`msgspec.json.encode`. Times of day are Unix seconds, durations are seconds, `None` means "not yet".
"""

from typing import Literal

import msgspec

from dcs.control.messages import Endpoint


class Counters(msgspec.Struct, frozen=True):
    """How often something has happened since this coordinator started.

    Attributes:
        joins: members that were let in, those that joined again included.
        evictions: members fenced because they were not heard, or took too long to transfer.
        fences: members fenced for any reason, evictions included.
        refusals: requests that were answered with an error, unreadable ones included.
        announcements: parts of versions (one a rank) that were accepted.
        completions: versions that all their ranks had announced.
    """

    joins: int = 0
    evictions: int = 0
    fences: int = 0
    refusals: int = 0
    announcements: int = 0
    completions: int = 0


class SourceView(msgspec.Struct, frozen=True):
    """One of those that a subscriber pulls from; `rank` is -1 for another subscriber."""

    member: int
    rank: int
    name: str
    holds: bool


class RankView(msgspec.Struct, frozen=True):
    """A rank of the publisher.

    Attributes:
        state: `absent` before it has joined and when it has left, `lost` when its lease has lapsed.
        layout: fingerprint ("" when absent).
        nbytes: of its tensors.
        announced: the newest version of this epoch that it has frozen; -1 before the first.
        heard_seconds: since its last message; None unless alive.
    """

    rank: int
    name: str
    member: int
    state: Literal["absent", "alive", "lost"]
    endpoint: Endpoint | None
    layout: str
    nbytes: int
    announced: int
    heard_seconds: float | None


class SubscriberView(msgspec.Struct, frozen=True):
    """A live subscriber.

    Attributes:
        machine: as in its endpoint ("" when it serves nobody).
        layout: fingerprint.
        sources: in order of preference; empty while the run has no complete version to pull.
        staged: the newest version that it has whole, -1 before the first.
        acked: the newest version that it has committed, -1 before the first.
        lag: complete versions, at most the 64 remembered, that are newer than the acked one.
        heard_seconds: since its last message.
        wire: how the staged version came: `shm`, `tcp`, `collective`, `+delta`; "" before the first.
        from_ranks, from_peers: bytes received since it joined, in all versions.
        slow: somebody who pulls from it has reported that it hardly progresses, so it is a leaf now.
        nbytes: of its tensors.
    """

    name: str
    member: int
    site: str
    machine: str
    group: str
    layout: str
    endpoint: Endpoint | None
    sources: tuple[SourceView, ...]
    staged: int
    acked: int
    lag: int
    heard_seconds: float
    wire: str
    from_ranks: int
    from_peers: int
    slow: bool
    nbytes: int


class DeliveryView(msgspec.Struct, frozen=True):
    """How a version came to one subscriber.

    Attributes:
        staged_seconds: from the completion of the version until it was whole there.
        acked_seconds: from the completion of the version until it was committed there.
        transfer_seconds, pause_seconds: as the subscriber measured them.
    """

    name: str
    member: int
    staged_seconds: float | None
    acked_seconds: float | None
    transfer_seconds: float | None
    pause_seconds: float | None


class VersionView(msgspec.Struct, frozen=True):
    """A version that is complete, or that some ranks have announced.

    Attributes:
        roots: by rank, in hexadecimal ("" where that rank has not announced it).
        nbytes: of all ranks together.
        freeze_seconds: of the slowest rank.
        announced_at: when the first rank announced it, Unix seconds.
        complete_at: when the last one did, Unix seconds; None while ranks are missing.
    """

    epoch: int
    version: int
    roots: tuple[str, ...]
    nbytes: int
    freeze_seconds: float
    announced_at: float
    complete_at: float | None
    deliveries: tuple[DeliveryView, ...]


class DepartedView(msgspec.Struct, frozen=True):
    """A member that is none any more, and why."""

    member: int
    role: Literal["publisher", "subscriber"]
    name: str
    reason: str
    at: float


class RunView(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        publisher: `alive` when all ranks are there, `lost` when a rank's lease has lapsed, else `absent`.
        version: the newest complete version, -1 before the first.
        ranks: of the open epoch, all `world_size` of them; empty before the first publisher.
        versions: the last 64, oldest first.
        departed: the last 64, oldest first.
    """

    name: str
    epoch: int
    session: str
    world_size: int
    publisher: Literal["absent", "alive", "lost"]
    version: int
    ranks: tuple[RankView, ...]
    subscribers: tuple[SubscriberView, ...]
    versions: tuple[VersionView, ...]
    departed: tuple[DepartedView, ...]


class Topology(msgspec.Struct, frozen=True):
    """Everything, at one moment.

    Attributes:
        at: Unix seconds.
        uptime_seconds: of this coordinator.
    """

    at: float
    uptime_seconds: float
    lease_seconds: float
    counters: Counters
    runs: tuple[RunView, ...]
