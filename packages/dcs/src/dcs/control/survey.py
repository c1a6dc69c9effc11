"""Makes the frozen views of `views.py` from the live state of runs."""

from dcs.control.gangs import Gang, Slot
from dcs.control.history import Delivery, Entry
from dcs.control.members import Member
from dcs.control.runs import Run
from dcs.control.views import (
    DeliveryView,
    DepartedView,
    RankView,
    RunView,
    SourceView,
    SubscriberView,
    VersionView,
)
from dcs.layout import Layout


class Survey:
    """One look at everything, at `now` on the registry's clock, which is `unix_now` in Unix seconds."""

    def __init__(self, now: float, unix_now: float) -> None:
        self._now = now
        self._offset = unix_now - now
        self._sizes: dict[str, int] = {}  # of layouts, by fingerprint: many members have the same one

    def run(self, run: Run) -> RunView:
        gang = run.gang
        return RunView(
            run.name,
            run.epoch if gang is None else gang.epoch,
            "" if gang is None else gang.session,
            0 if gang is None else gang.world_size,
            run.publisher,
            run.version,
            () if gang is None else self._ranks(gang),
            tuple(self._subscriber(run, member) for member in run.subscribers.values()),
            tuple(self._version(entry) for entry in run.history),
            tuple(
                DepartedView(number, gone.role, gone.name, gone.reason, gone.at + self._offset)
                for number, gone in run.departed.items()
            ),
        )

    def _ranks(self, gang: Gang) -> tuple[RankView, ...]:
        ranks = range(gang.world_size) if gang.world_size <= 4096 else sorted(gang.slots)
        return tuple(self._rank(rank, gang.slots.get(rank)) for rank in ranks)

    def _rank(self, rank: int, slot: Slot | None) -> RankView:
        if slot is None:
            return RankView(rank, f"rank-{rank}", 0, "absent", None, "", 0, -1, None)
        member = slot.member
        return RankView(
            rank,
            slot.name,
            0 if member is None else member.id,
            slot.state,
            None if member is None else member.endpoint,
            slot.fingerprint,
            self._nbytes(slot.fingerprint, slot.layout),
            slot.announced,
            None if member is None else self._now - member.heard_at,
        )

    def _subscriber(self, run: Run, member: Member) -> SubscriberView:
        sources = () if run.announcement is None else run.fabric().sources(member.id)
        endpoint = member.endpoint
        return SubscriberView(
            member.name,
            member.id,
            member.join.site,
            "" if endpoint is None else endpoint.machine,
            member.join.group,
            member.fingerprint,
            endpoint,
            tuple(SourceView(source.member, source.rank, source.name, source.holds) for source in sources),
            member.staged_version,
            member.acked_version,
            run.history.newer(member.acked_version),
            self._now - member.heard_at,
            "" if member.staged is None else member.staged.wire,
            member.from_ranks,
            member.from_peers,
            member.slow,
            self._nbytes(member.fingerprint, member.join.layout),
        )

    def _nbytes(self, fingerprint: str, layout: Layout) -> int:
        if fingerprint not in self._sizes:
            self._sizes[fingerprint] = layout.offsets()[1]
        return self._sizes[fingerprint]

    def _version(self, entry: Entry) -> VersionView:
        parts = [entry.parts.get(rank) for rank in range(min(entry.world_size, 4096))]
        known = [part for part in parts if part is not None]
        since = entry.complete_at if entry.complete_at is not None else entry.announced_at
        return VersionView(
            entry.epoch,
            entry.version,
            tuple("" if part is None else part.root.hex() for part in parts),
            sum(part.nbytes for part in known),
            max((part.freeze_seconds for part in known), default=0.0),
            entry.announced_at + self._offset,
            None if entry.complete_at is None else entry.complete_at + self._offset,
            tuple(_delivery(number, found, since) for number, found in entry.deliveries.items()),
        )


def _delivery(member: int, found: Delivery, since: float) -> DeliveryView:
    acked = found.acked
    return DeliveryView(
        found.name,
        member,
        None if found.staged_at is None else found.staged_at - since,
        None if found.acked_at is None else found.acked_at - since,
        None if acked is None else acked.transfer_seconds,
        None if acked is None else acked.pause_seconds,
    )
