"""Whatever members do, in whatever order: what subscribers are told only grows, and is of one set of bits."""

from dcs.control.messages import (
    Acked,
    Announce,
    Endpoint,
    Fenced,
    Heartbeat,
    Join,
    Joined,
    Known,
    Leave,
    Receipt,
    RunState,
)
from dcs.control.registry import Registry
from dcs.layout import Layout, TensorSpec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

LEASE = 5.0
LAYOUT = Layout((TensorSpec("w", (2,), "float32"),))
PLACE = Endpoint("192.0.2.1", 9, "m", "/s")


class Link:
    """A member as a link keeps it: it joins again when it is told to, and knows what it was told."""

    def __init__(self, identity: bytes, role: str, name: str, options: dict) -> None:
        self.identity, self.role, self.name, self.options = identity, role, name, options
        self.member, self.epoch, self.request = 0, 0, 0
        self.known: tuple[int, int] | None = None
        self.fenced: Fenced | None = None

    def join(self) -> Join:
        self.request += 1
        known = None if self.known is None else Known(*self.known)
        role = "publisher" if self.role == "publisher" else "subscriber"
        return Join(self.request, role, "r", self.name, LAYOUT, None, PLACE, known=known, **self.options)

    def hear(self, message) -> None:
        if isinstance(message, Joined):
            self.member, self.epoch, self.fenced = message.member, message.epoch, None
            self.learn(message.epoch, message.version)
        elif isinstance(message, Fenced) and message.member == self.member:
            self.member, self.fenced = 0, message
        elif isinstance(message, RunState) and message.announcement is not None:
            self.learn(message.announcement.epoch, message.announcement.version)

    def learn(self, epoch: int, version: int) -> None:
        before = self.known or (0, -1)
        self.known = (max(before[0], epoch), max(before[1], version))


class Runs(RuleBasedStateMachine):
    links = Bundle("links")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.numbers = 1
        self.restart()
        self.by_identity: dict[bytes, Link] = {}
        self.told: dict[bytes, tuple[int, int]] = {}

    @rule(begin=st.integers(0, 20))
    def restart_and_return(self, begin):
        """The coordinator is killed and started again; its members come back in any order."""
        self.restart()
        self.everybody(begin)

    def restart(self) -> None:
        self.numbers += 1000
        self.newest = (0, -1)
        self.roots: dict[tuple[int, int], tuple[bytes, ...]] = {}  # it takes what comes
        self.registry = Registry(LEASE, None, transfer_seconds=20.0, first_member=self.numbers)

    def send(self, link: Link, message) -> None:
        self.deliver(self.registry.handle(link.identity, message, self.now))
        self.deliver(self.registry.flush())

    def deliver(self, outgoing) -> None:
        for identity, message in outgoing:
            link = self.by_identity[identity]
            link.hear(message)
            state = message.state if isinstance(message, Joined) else message
            if not isinstance(state, RunState) or link.role != "subscriber":
                continue
            found = state.announcement
            assert (found is not None) or not state.sources
            if found is not None:
                told = (found.epoch, found.version)
                before = self.told.get(identity, (0, -1))
                assert told >= before
                assert found.version >= before[1]
                self.told[identity] = told
                key = (found.version, len(found.roots))
                assert self.roots.setdefault(key, found.roots) == found.roots
                assert link.member not in [source.member for source in state.sources]

    @initialize(target=links)
    def begin(self):
        """There is something from the start."""
        link = self.add("publisher", "a", "")
        self.add("subscriber", "a", "")
        self.publish(1, 0)
        return link

    @rule(
        target=links,
        role=st.sampled_from(["publisher", "subscriber"]),
        place=st.sampled_from("ab"),
        session=st.sampled_from(["", "", "job"]),
    )
    def start(self, role, place, session):
        return self.add(role, place, session)

    def add(self, role: str, place: str, session: str) -> Link:
        identity = str(len(self.by_identity)).encode()
        options: dict = {"group": session}
        if role == "publisher":
            options = {"session": session or identity.decode(), "world_size": 1 + bool(session)}
            options["rank"] = "ab".index(place) if session else 0
        link = self.by_identity[identity] = Link(identity, role, place, options)
        self.send(link, link.join())
        return link

    @rule(begin=st.integers(0, 20))
    def everybody(self, begin):
        """What links do by themselves: beat, and join again when they are told to."""
        everybody = list(self.by_identity.values())
        for index in range(len(everybody)):
            link = everybody[(begin + index) % len(everybody)]
            if link.member:
                self.send(link, Heartbeat(link.member))
            if link.fenced is not None and link.fenced.rejoin:
                self.send(link, link.join())

    @rule(step=st.integers(0, 1), value=st.integers(0, 1))
    def publish(self, step, value):
        """All ranks that are alive announce the newest version that one of them knows, or a later one."""
        ranks = [link for link in self.by_identity.values() if link.role == "publisher" and link.member]
        newest = max((link.known[1] for link in ranks if link.known), default=-1)
        for link in ranks:
            self.send(link, Announce(99, link.member, link.epoch, max(0, newest + step), bytes([value]) * 16))

    @rule(target=links, value=st.integers(0, 1))
    def repeat(self, value):
        """A trainer is started again, and repeats the newest version, perhaps with other weights."""
        link = self.add("publisher", "a", "")
        self.publish(0, value)
        return link

    @rule(link=links, ahead=st.integers(-1, 2), value=st.integers(0, 1), behind=st.integers(0, 1))
    def announce(self, link, ahead, value, behind):
        version = max(0, (link.known or (0, 0))[1] + ahead)
        root = bytes([value]) * 16
        self.send(link, Announce(99, link.member, link.epoch - behind, version, root))

    @rule(link=links, version=st.none() | st.integers(0, 6), slow=st.integers(0, 5))
    def beat(self, link, version, slow):
        acked = None if version is None else Acked(link.epoch, version, 0.0)
        staged = None if version is None else Receipt(link.epoch, version)
        self.send(link, Heartbeat(link.member, acked, staged, (self.numbers + slow,)))

    @rule(link=links)
    def replay(self, link):
        """What was said before is said again by the network."""
        request, link.request = link.request, link.request - 1
        self.send(link, link.join())
        link.request = request

    @rule(link=links)
    def leave(self, link):
        self.send(link, Leave(link.member, "done"))

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds):
        self.now += seconds
        self.deliver(self.registry.expire(self.now))
        self.deliver(self.registry.flush())

    @invariant()
    def it_can_be_looked_at(self):
        shown = self.registry.snapshot(self.now, 0.0, 0.0)
        for run in shown.runs:
            assert (run.epoch, run.version) >= self.newest
            self.newest = (run.epoch, run.version)
            names = [subscriber.name for subscriber in run.subscribers]
            assert len(set(names)) == len(names)
            alive = [rank for rank in run.ranks if rank.state == "alive"]
            assert all(rank.member for rank in alive)

    @invariant()
    def nobody_outlives_its_lease(self):
        deadline = self.registry.next_deadline()
        assert deadline is None or deadline <= self.now + LEASE


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
