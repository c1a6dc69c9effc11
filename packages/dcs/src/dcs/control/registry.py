"""The coordinator's state machine: members and their leases, runs and their versions. No sockets, no clock.

Rules it keeps:
- a run's version only grows; a new epoch may offer the newest version again, and only with the same root
hash;
- every publisher that joins gets a new epoch, and the one before it is fenced;
- a subscriber's name belongs to its newest incarnation, and the one before it is fenced;
- publisher and subscribers of a run have one layout: whoever does not fit is refused before anything moves.
"""

import hmac
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from dcs import layout as layouts
from dcs.control.messages import (
    Acked,
    Announce,
    Announced,
    Announcement,
    Endpoint,
    Fenced,
    FromCoordinator,
    FromMember,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Refused,
    Roster,
    RunState,
    Standing,
)
from dcs.errors import DcsError, Evicted, LayoutMismatch, StaleVersion, Unauthorized
from dcs.layout import Layout

MAX_MEMBERS = 4096
MAX_RUNS = 1024
MAX_DEPARTED = 64

Outgoing = list[tuple[bytes, FromCoordinator]]


@dataclass
class Member:
    id: int
    identity: bytes
    role: Literal["publisher", "subscriber"]
    run: "Run"
    name: str
    layout: Layout
    endpoint: Endpoint | None
    deadline: float
    acked: Acked | None = None


@dataclass
class Run:
    name: str
    epoch: int = 0
    version: int = -1
    root: bytes = b""
    announcement: Announcement | None = None
    publisher: Member | None = None
    publisher_state: Literal["absent", "alive", "lost"] = "absent"
    subscribers: dict[str, Member] = field(default_factory=dict)
    departed: OrderedDict[int, str] = field(default_factory=OrderedDict)

    def state(self) -> RunState:
        return RunState(self.publisher_state, self.announcement)

    def roster(self) -> Roster:
        live = {member.id: Standing(member.name, member.acked) for member in self.subscribers.values()}
        return Roster(live, dict(self.departed))


class Registry:
    """Call `handle` with every message and `expire` at `next_deadline()`; send what they return.

    Args:
        lease_seconds: how long a member lives without a heartbeat.
        token: what members must show; None lets everybody in.
    """

    def __init__(self, lease_seconds: float, token: str | None) -> None:
        self._lease_seconds = lease_seconds
        self._token = token
        self._members: dict[int, Member] = {}
        self._runs: dict[str, Run] = {}
        self._fenced: OrderedDict[int, Fenced] = OrderedDict()
        self._next_id = 1

    @property
    def identities(self) -> list[bytes]:
        """The ZMQ identities of all members."""
        return [member.identity for member in self._members.values()]

    def next_deadline(self) -> float | None:
        """When the next lease lapses, on the caller's clock; None without members."""
        return min((member.deadline for member in self._members.values()), default=None)

    def handle(self, identity: bytes, message: FromMember, now: float) -> Outgoing:
        """Apply one message and return the answers and pushes, in order."""
        if isinstance(message, Join):
            return self._join(identity, message, now)
        member = self._members.get(message.member)
        if member is None or member.identity != identity:
            unknown = Fenced(
                message.member, Evicted.code, f"no member {message.member} here", {}, rejoin=True
            )
            return [(identity, self._fenced.get(message.member, unknown))]
        member.deadline = now + self._lease_seconds
        match message:
            case Heartbeat():
                return self._heartbeat(member, message)
            case Announce():
                return self._announce(member, message)
            case Leave():
                return self._remove(member, message.reason or "left", state="absent")

    def expire(self, now: float) -> Outgoing:
        """Fence every member whose lease has lapsed."""
        out: Outgoing = []
        for member in [member for member in self._members.values() if member.deadline <= now]:
            text = f"{member.role} {member.name!r} was evicted: no heartbeat for {self._lease_seconds} s"
            out += self._fence(member, Evicted.code, text, {}, rejoin=True)
            out += self._remove(member, text, state="lost")
        return out

    def _join(self, identity: bytes, join: Join, now: float) -> Outgoing:
        out: Outgoing = []
        refused = self._refusal(join)
        if refused is not None:
            detail = {}
            if isinstance(refused, LayoutMismatch):
                detail = {"tensor": refused.tensor, "got": refused.got, "expected": refused.expected}
            return [(identity, Refused(join.request, refused.code, str(refused), detail))]
        run = self._runs.setdefault(join.run, Run(join.run))
        member = Member(
            self._next_id,
            identity,
            join.role,
            run,
            join.name,
            join.layout,
            join.endpoint,
            now + self._lease_seconds,
        )
        self._next_id += 1
        previous = run.publisher if join.role == "publisher" else run.subscribers.get(join.name)
        if previous is not None:
            text = (
                f"{previous.role} {previous.name!r} of run {run.name!r} was replaced by a newer incarnation"
            )
            if previous.identity != identity:
                out += self._fence(previous, Evicted.code, text, {}, rejoin=False)
            out += self._remove(previous, text, state="absent")
        self._members[member.id] = member
        if join.role == "publisher":
            run.epoch += 1
            run.publisher, run.publisher_state, run.announcement = member, "alive", None
            out += self._fence_unfit(run, join.layout)
            out.append((identity, self._joined(join, member)))
            out += self._push_state(run)
        else:
            run.subscribers[join.name] = member
            out.append((identity, self._joined(join, member)))
            out += self._push_roster(run)
        return out

    def _refusal(self, join: Join) -> DcsError | None:
        if self._token is not None and not hmac.compare_digest(
            (join.token or "").encode(), self._token.encode()
        ):
            got = "no token" if join.token is None else "a wrong token"
            return Unauthorized(f"{join.role} {join.name!r} showed {got}; give it the coordinator's token")
        if join.role == "publisher" and join.endpoint is None:
            return DcsError(f"publisher {join.name!r} joined without the endpoint it serves at")
        if len(self._members) >= MAX_MEMBERS:
            return DcsError(
                f"this coordinator has {MAX_MEMBERS} members and takes no more; start another one"
            )
        run = self._runs.get(join.run)
        if run is None:
            if len(self._runs) >= MAX_RUNS:
                return DcsError(f"this coordinator has {MAX_RUNS} runs and takes no more; start another one")
            return None
        if join.role == "subscriber" and run.publisher is not None:
            return layouts.mismatch(
                join.layout, run.publisher.layout, f"subscriber {join.name!r} of run {run.name!r}"
            )
        return None

    def _joined(self, join: Join, member: Member) -> Joined:
        run = member.run
        return Joined(
            join.request,
            member.id,
            run.epoch,
            self._lease_seconds,
            run.version,
            run.root,
            run.state(),
            run.roster(),
        )

    def _fence_unfit(self, run: Run, expected: Layout) -> Outgoing:
        out: Outgoing = []
        for member in list(run.subscribers.values()):
            error = layouts.mismatch(
                member.layout, expected, f"subscriber {member.name!r} of run {run.name!r}"
            )
            if error is not None:
                detail = {"tensor": error.tensor, "got": error.got, "expected": error.expected}
                out += self._fence(member, error.code, str(error), detail, rejoin=False)
                out += self._remove(member, str(error), state="absent")
        return out

    def _heartbeat(self, member: Member, message: Heartbeat) -> Outgoing:
        run, out = member.run, Outgoing()
        if member.role == "publisher":
            return [(member.identity, run.roster())]
        acked = message.acked
        known = -1 if member.acked is None else member.acked.version
        if acked is not None and known < acked.version <= run.version:
            member.acked = acked
            out += self._push_roster(run)
        out.append((member.identity, run.state()))
        return out

    def _announce(self, member: Member, message: Announce) -> Outgoing:
        run = member.run
        again = message.version == run.version and message.root == run.root
        if member.role != "publisher" or member.endpoint is None:
            text = f"{member.role} {member.name!r} announced a version; only the publisher of a run may"
            return [(member.identity, Refused(message.request, DcsError.code, text, {}))]
        if message.epoch != run.epoch:
            text = f"version {message.version} is of epoch {message.epoch}, the run is at epoch {run.epoch}"
            return [(member.identity, Refused(message.request, StaleVersion.code, text, {}))]
        if message.version <= run.version and not again:
            text = (
                f"version {message.version} of run {run.name!r} is not newer than version {run.version}"
                f" (epoch {run.epoch}); publish {run.version + 1} or later"
            )
            return [(member.identity, Refused(message.request, StaleVersion.code, text, {}))]
        run.version, run.root = message.version, message.root
        run.announcement = Announcement(run.name, run.epoch, message.version, message.root, member.endpoint)
        return [
            *self._push_state(run),
            (member.identity, Announced(message.request, message.version, run.roster())),
        ]

    def _remove(self, member: Member, reason: str, state: Literal["absent", "lost"]) -> Outgoing:
        run = member.run
        self._members.pop(member.id, None)
        if run.publisher is member:
            run.publisher, run.publisher_state, run.announcement = None, state, None
            return self._push_state(run)
        if run.subscribers.get(member.name) is member:
            del run.subscribers[member.name]
        run.departed[member.id] = reason
        if len(run.departed) > MAX_DEPARTED:
            run.departed.popitem(last=False)
        return self._push_roster(run)

    def _fence(self, member: Member, code: str, text: str, detail: dict[str, str], rejoin: bool) -> Outgoing:
        fenced = Fenced(member.id, code, text, detail, rejoin)
        self._fenced[member.id] = fenced
        if len(self._fenced) > MAX_MEMBERS:
            self._fenced.popitem(last=False)
        return [(member.identity, fenced)]

    def _push_state(self, run: Run) -> Outgoing:
        return [(member.identity, run.state()) for member in run.subscribers.values()]

    def _push_roster(self, run: Run) -> Outgoing:
        return [] if run.publisher is None else [(run.publisher.identity, run.roster())]
