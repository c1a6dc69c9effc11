"""The coordinator's state machine: members and their leases, runs and their versions. No sockets, no clock.

Rules it keeps:
- a run's version only grows; a new epoch may offer the newest version again, and only with the same root
  hashes, rank by rank;
- an epoch belongs to a fixed set of publisher ranks; another gang, or another process on a rank's place,
  makes a new one, and who was replaced is fenced;
- a subscriber's name belongs to its newest incarnation, and the one before it is fenced;
- the ranks' layouts fill every subscriber's: whoever does not fit is refused before anything moves;
- what members know of a former coordinator counts: neither epochs nor versions go back.
"""

import hmac
from collections import OrderedDict
from typing import Literal

from dcs.control.fitting import Fitting
from dcs.control.gangs import Gang, Part, Slot
from dcs.control.members import NEVER, Member, standing_of
from dcs.control.messages import (
    Announce,
    Announced,
    Fenced,
    FromCoordinator,
    FromMember,
    Heartbeat,
    Join,
    Joined,
    Layouts,
    Leave,
    Refused,
    Roster,
    RunState,
    WantLayouts,
)
from dcs.control.runs import Run
from dcs.control.survey import Survey
from dcs.control.views import Counters, Topology
from dcs.errors import DcsError, Evicted, LayoutMismatch, ProtocolError, StaleVersion, Unauthorized
from dcs.layout import Layout

MAX_MEMBERS = 4096
MAX_RUNS = 1024
_HIGHEST = (1 << 62) - 1

Outgoing = list[tuple[bytes, FromCoordinator]]


class Registry:
    """Call `handle` with every message and `expire` at `next_deadline()`; send what they return, in order.

    What else members are to be told, because somebody else did something, is returned by `flush`: once for
    all that has happened since the last time.

    Args:
        lease_seconds: how long a member lives without a heartbeat.
        token: what members must show; None lets everybody in.
        relay: whether subscribers pull from each other.
        transfer_seconds: how long a subscriber may take for a version; None for ever.
        first_member: number of the first member. Numbers should not repeat after a restart.
    """

    def __init__(
        self,
        lease_seconds: float,
        token: str | None,
        relay: bool = True,
        transfer_seconds: float | None = None,
        first_member: int = 1,
    ) -> None:
        self._lease_seconds = lease_seconds
        self._token = token
        self._relay = relay
        self._transfer_seconds = transfer_seconds
        self._members: dict[int, Member] = {}
        self._runs: dict[str, Run] = {}
        self._touched: set[Run] = set()
        self._fenced: OrderedDict[int, Fenced] = OrderedDict()
        self._fitting = Fitting()
        self._counts = dict.fromkeys(Counters.__struct_fields__, 0)
        self._next_id = first_member
        self._earliest = NEVER  # no deadline is before it

    @property
    def identities(self) -> list[bytes]:
        """The ZMQ identities of all members."""
        return [member.identity for member in self._members.values()]

    def next_deadline(self) -> float | None:
        """When to call `expire` next, on the caller's clock; None without members."""
        return self._earliest if self._members else None

    def handle(self, identity: bytes, message: FromMember, now: float) -> Outgoing:
        """Apply one message and return what is to be said about it."""
        if isinstance(message, Join):
            return self._join(identity, message, now)
        member = self._members.get(message.member)
        if member is None or member.identity != identity:
            unknown = Fenced(
                message.member, Evicted.code, f"no member {message.member} here", {}, rejoin=True
            )
            return [(identity, self._fenced.get(message.member, unknown))]
        member.heard_at, member.deadline = now, now + self._lease_seconds
        self._touched.add(member.run)
        match message:
            case Heartbeat():
                return self._heartbeat(member, message, now)
            case Announce():
                return self._announce(member, message, now)
            case WantLayouts():
                return [(identity, Layouts(message.request, self._layouts(member.run, message)))]
            case Leave():
                told = self._roster(member.run)  # what it has just acknowledged counts, though it is leaving
                self._remove(member, message.reason or "left", "absent", now)
                return told

    def refuse_unreadable(self, error: DcsError) -> Refused:
        """What to answer to a message that could not be read."""
        self._counts["refusals"] += 1
        return Refused(0, error.code, str(error), {})

    def grant(self, now: float) -> None:
        """Give every member a new lease, because nobody could be heard for a while."""
        for member in self._members.values():
            member.deadline = max(member.deadline, now + self._lease_seconds)
            member.due = max(member.due, now + self._lease_seconds)

    def expire(self, now: float) -> Outgoing:
        """Fence every member whose lease has lapsed, or that takes too long to transfer."""
        if now < self._earliest:
            return []
        out: Outgoing = []
        late = [member for member in self._members.values() if member.due <= now]
        blameless = {member for member in late if self._waits_for_others(member)}
        for member in list(self._members.values()):
            if member.deadline <= now:
                text = (
                    f"{member.join.role} {member.name!r} was evicted: no heartbeat for"
                    f" {self._lease_seconds} s"
                )
            elif member.due <= now:
                if member.run.announcement is None:  # nobody has it any more
                    member.due = NEVER
                    continue
                if member in blameless:
                    member.due = now + (self._transfer_seconds or NEVER)
                    continue
                text = (
                    f"subscriber {member.name!r} was evicted: it had not staged what was announced"
                    f" {self._transfer_seconds} s ago, and has version {member.staged_version} of"
                    f" {member.run.version}"
                )
            else:
                continue
            self._counts["evictions"] += 1
            out += self._fence(member, Evicted(text), rejoin=True)
            self._remove(member, text, "lost", now)
        deadlines = (min(member.deadline, member.due) for member in self._members.values())
        self._earliest = min(deadlines, default=NEVER)
        return out

    def _waits_for_others(self, member: Member) -> bool:
        """Whether a relay that this one pulls from has got no further than it: then it is not to blame."""
        relays = (self._members.get(number) for number in member.told)
        return any(relay is not None and relay.staged_version <= member.staged_version for relay in relays)

    def flush(self) -> Outgoing:
        """What has to be pushed to members since the last call."""
        out: Outgoing = []
        for run in self._touched:
            stale = sorted(run.stale, key=lambda member: member.id)
            out += [(member.identity, run.state(member)) for member in stale]
            out += self._roster(run)
        self._touched.clear()
        return out

    def _roster(self, run: Run) -> Outgoing:
        """The roster of a run to its ranks, if it has changed since they were told."""
        stale, run.roster_is_stale = run.roster_is_stale, False
        if not stale or run.gang is None:
            return []
        news = run.news()
        return [(member.identity, news) for member in run.gang.members]

    def snapshot(self, now: float, unix_now: float, started: float) -> Topology:
        """Everything there is to see, at `now` on the caller's clock, which began at `started`."""
        survey = Survey(now, unix_now)
        runs = tuple(survey.run(run) for _, run in sorted(self._runs.items()))
        return Topology(unix_now, now - started, self._lease_seconds, Counters(**self._counts), runs)

    # Joining.

    def _join(self, identity: bytes, join: Join, now: float) -> Outgoing:
        refused = self._forbidden(join)
        if refused is not None:
            return self._refuse(identity, join.request, refused)
        run = self._runs.get(join.run)
        if run is None:
            run = self._runs[join.run] = Run(join.run, self._relay, self._transfer_seconds)
        self._touched.add(run)
        before = self._seated(run, join)
        if before is not None and before.identity == identity and join.request <= before.join.request:
            # A duplicate: the answer may be lost, so it is given again; what is older is out of date.
            return [(identity, self._joined(before))] if join.request == before.join.request else []
        if join.known is not None:
            run.learn(join.known)
        join, fingerprint = run.intern(join)
        member = Member(
            self._next_id, identity, join, fingerprint, run, standing_of(join), now, now,
            now + self._lease_seconds,
        )  # fmt: skip
        if join.role == "publisher":
            out, refused = self._seat_rank(member, now)
        else:
            out, refused = self._seat_subscriber(member, before, now)
        if refused is not None:
            out += self._refuse(identity, join.request, refused)
        else:
            self._next_id += 1
            self._members[member.id] = member
            self._counts["joins"] += 1
            self._earliest = min(self._earliest, member.deadline, member.due)
        if run.gang is not None and run.gang.epoch < run.epoch:
            out += self._reopen(run, now)
        if refused is None and member.id in self._members:
            out.append((identity, self._joined(member)))
        return out

    def _forbidden(self, join: Join) -> DcsError | None:
        who = f"{join.role} {join.name!r}"
        if self._token is not None and not hmac.compare_digest(
            (join.token or "").encode(), self._token.encode()
        ):
            got = "no token" if join.token is None else "a wrong token"
            return Unauthorized(f"{who} showed {got}; give it the coordinator's token")
        if join.role == "publisher" and join.endpoint is None:
            return DcsError(f"{who} joined without the endpoint it serves at")
        if join.role == "publisher" and join.rank >= join.world_size:
            return DcsError(
                f"{who} joined as rank {join.rank} of {join.world_size} ranks; ranks count from 0"
            )
        if join.known is not None and max(join.known.epoch, join.known.version) > _HIGHEST:
            return ProtocolError(f"{who} knows of epoch {join.known.epoch}, which no coordinator issues")
        if len(self._members) >= MAX_MEMBERS:
            return DcsError(
                f"this coordinator has {MAX_MEMBERS} members and takes no more; start another one"
            )
        run = self._runs.get(join.run)
        if run is not None and join.group:
            fellows = [
                other
                for other in run.subscribers.values()
                if other.join.group == join.group and other.name != join.name
            ]
            sizes = {other.join.group_size for other in fellows} | {join.group_size}
            if len(sizes) > 1 or len(fellows) >= join.group_size:
                others = sorted(other.join.group_size for other in fellows)
                return DcsError(
                    f"{who} gives group {join.group!r} the size {join.group_size}, and {len(fellows)} others"
                    f" are in it, with sizes {others}; give all ranks of one engine the same size, and every"
                    " engine a group of its own"
                )
        if join.run not in self._runs and len(self._runs) >= MAX_RUNS:
            return DcsError(f"this coordinator has {MAX_RUNS} runs and takes no more; start another one")
        return None

    def _seated(self, run: Run, join: Join) -> Member | None:
        """The live member that has the place which the joining one wants."""
        if join.role == "subscriber":
            return run.subscribers.get(join.name)
        gang = run.gang
        if gang is None or not gang.is_of(join) or join.rank not in gang.slots:
            return None
        return gang.slots[join.rank].member

    def _seat_subscriber(
        self, member: Member, before: Member | None, now: float
    ) -> tuple[Outgoing, DcsError | None]:
        run, out = member.run, Outgoing()
        mismatch = self._misfit(member)
        if mismatch is not None:
            return out, mismatch
        if before is not None:
            if before.identity != member.identity:
                if not member.standing > before.standing and member.join.known is not None:
                    return out, _replaced(member)
                out += self._fence(before, _replaced(before), rejoin=False)
            self._remove(before, str(_replaced(before)), "absent", now)
        run.add_subscriber(member, now)
        return out, None

    def _seat_rank(self, member: Member, now: float) -> tuple[Outgoing, DcsError | None]:
        run, join, out = member.run, member.join, Outgoing()
        gang = run.gang
        slot: Slot | None = None
        if gang is not None and gang.is_of(join):
            slot = gang.slots.get(join.rank)
            holder = gang.standing if slot is None else slot.standing
            in_the_way = slot is not None and slot.identity != member.identity
        else:
            holder = None if gang is None else gang.standing
            in_the_way = gang is not None
        if in_the_way and holder is not None and join.known is not None and not member.standing > holder:
            return out, _replaced(member)
        if gang is None or in_the_way or gang.epoch < run.epoch:
            for old in [] if gang is None else gang.members:
                survives = gang is not None and gang.is_of(join) and old.join.rank != join.rank
                out += self._oust(old, survives, now)
            run.open(member)
        elif slot is not None and slot.member is not None:  # the same connection joins once more
            self._remove(slot.member, str(_replaced(member)), "absent", now)
        assert run.gang is not None
        run.gang.seat(member)
        run.refresh()
        out += self._fence_unfit(run, now)
        if run.complete(now):
            self._completed(now)
        return out, None

    def _reopen(self, run: Run, now: float) -> Outgoing:
        """The open epoch is not above all that members have seen: its ranks join again, in a new one."""
        out: Outgoing = []
        gang = run.gang
        assert gang is not None
        for member in gang.members:
            out += self._oust(member, True, now)
        run.gang = Gang(run.epoch + 1, gang.session, gang.world_size, gang.standing)
        run.epoch += 1
        run.refresh()
        return out

    def _oust(self, member: Member, survives: bool, now: float) -> Outgoing:
        if survives:
            error = Evicted(
                f"{member.join.role} {member.name!r} of run {member.run.name!r} has to join a new epoch"
            )
        else:
            error = _replaced(member)
        self._remove(member, str(error), "absent", now)
        return self._fence(member, error, rejoin=survives)

    def _joined(self, member: Member) -> Joined:
        run, gang = member.run, member.run.gang
        root, roster, state = b"", Roster({}, {}), RunState(run.publisher, None)
        if not member.is_publisher:
            state = run.state(member)
        elif gang is not None:
            root, roster = run.root(gang, member.join.rank), run.roster()
        return Joined(
            member.join.request,
            member.id,
            run.epoch if gang is None else gang.epoch,
            self._lease_seconds,
            run.version,
            root,
            state,
            roster,
        )

    def _misfit(self, member: Member) -> LayoutMismatch | None:
        gang = member.run.gang
        if gang is None or not gang.is_known or not gang.members:
            return None
        who = f"subscriber {member.name!r} of run {member.run.name!r}"
        return self._fitting.mismatch(member.join.layout, member.fingerprint, gang.layouts, who)

    def _fence_unfit(self, run: Run, now: float) -> Outgoing:
        out: Outgoing = []
        for member in list(run.subscribers.values()):
            error = self._misfit(member)
            if error is not None:
                out += self._fence(member, error, rejoin=False)
                self._remove(member, str(error), "absent", now)
        return out

    # What members say.

    def _heartbeat(self, member: Member, message: Heartbeat, now: float) -> Outgoing:
        run = member.run
        if member.is_publisher:
            run.gatherings.report(message.slow)
            return [(member.identity, run.news())]
        for other in message.slow:
            self._slowed(member, other)
        if message.staged is not None:
            run.staged(member, message.staged, now)
        if message.lost >= 0:
            run.lost(member, message.lost)
        acked = message.acked
        if acked is not None and member.acked_version < acked.version <= run.version:
            member.acked = acked
            run.acked(member, now)
        return [(member.identity, run.state(member))]

    def _slowed(self, by: Member, number: int) -> None:
        member = self._members.get(number)
        if member is None or member is by or member.run is not by.run or member.is_publisher:
            return
        if not member.slow:
            member.run.slowed(member)

    def _announce(self, member: Member, message: Announce, now: float) -> Outgoing:
        run, gang, rank = member.run, member.run.gang, member.join.rank
        if not member.is_publisher or gang is None:
            error = DcsError(
                f"{member.join.role} {member.name!r} announced a version; only a publisher's ranks may"
            )
            return self._refuse(member.identity, message.request, error)
        if message.epoch != gang.epoch:
            error = StaleVersion(
                f"version {message.version} is of epoch {message.epoch}, the run is at epoch {gang.epoch}"
            )
            return self._refuse(member.identity, message.request, error)
        refused = run.refusal(gang, rank, message.version, message.root)
        if refused is not None:
            return self._refuse(member.identity, message.request, StaleVersion(refused))
        self._counts["announcements"] += 1
        part = Part(message.root, message.nbytes, message.freeze_seconds)
        run.announce(gang, rank, message.version, part, now)
        out: Outgoing = []
        if run.complete(now):
            self._completed(now)
            out.append((member.identity, run.news()))  # before the answer, so that who waits for it knows
        return [*out, (member.identity, Announced(message.request, message.version))]

    def _completed(self, now: float) -> None:
        self._counts["completions"] += 1
        if self._transfer_seconds is not None:
            self._earliest = min(self._earliest, now + self._transfer_seconds)

    def _layouts(self, run: Run, message: WantLayouts) -> dict[str, Layout]:
        return {name: run.layouts[name] for name in message.fingerprints if name in run.layouts}

    # Leaving.

    def _remove(self, member: Member, reason: str, state: Literal["absent", "lost"], now: float) -> None:
        run = member.run
        self._members.pop(member.id, None)
        self._touched.add(run)
        if not member.is_publisher:
            run.remove_subscriber(member)
        elif run.gang is not None and run.gang.unseat(member, state):
            run.refresh()
        run.depart(member, reason, now)

    def _fence(self, member: Member, error: DcsError, rejoin: bool) -> Outgoing:
        fenced = Fenced(member.id, error.code, str(error), _detail(error), rejoin)
        self._counts["fences"] += 1
        self._fenced[member.id] = fenced
        if len(self._fenced) > MAX_MEMBERS:
            self._fenced.popitem(last=False)
        return [(member.identity, fenced)]

    def _refuse(self, identity: bytes, request: int, error: DcsError) -> Outgoing:
        self._counts["refusals"] += 1
        return [(identity, Refused(request, error.code, str(error), _detail(error)))]


def _detail(error: DcsError) -> dict[str, str]:
    if isinstance(error, LayoutMismatch):
        return {"tensor": error.tensor, "got": error.got, "expected": error.expected}
    return {}


def _replaced(member: Member) -> Evicted:
    way = "give every engine a name of its own"
    if member.is_publisher:
        way = "a run has one trainer, whose ranks give one session, new for each start, and one world_size"
    return Evicted(
        f"{member.join.role} {member.name!r} of run {member.run.name!r} was replaced by a newer incarnation:"
        f" {way}"
    )
