"""The coordinator's state machine, without sockets or time."""

from dcs.control.messages import (
    Acked,
    Announce,
    Announced,
    Endpoint,
    Fenced,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Refused,
    Roster,
    RunState,
)
from dcs.control.registry import Registry
from dcs.layout import Layout, TensorSpec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

LAYOUT = Layout((TensorSpec("w", (2,), "float32"),))
OTHER = Layout((TensorSpec("w", (3,), "float32"),))
LEASE = 5.0


def join(role, name="p", layout=LAYOUT, token=None):
    return Join(1, role, "r", name, layout, token, Endpoint("127.0.0.1", 1) if role == "publisher" else None)


def joined(out, identity) -> Joined:
    (reply,) = [message for to, message in out if to == identity and isinstance(message, Joined)]
    return reply


def root(value: int) -> bytes:
    return bytes([value]) * 16


def test_a_token_is_demanded():
    registry = Registry(LEASE, "secret")
    for token in (None, "", "wrong", "secret\0"):
        ((_, reply),) = registry.handle(b"a", join("subscriber", token=token), 0)
        assert isinstance(reply, Refused)
        assert reply.code == "unauthorized"
        assert "secret" not in reply.message
    assert joined(registry.handle(b"a", join("subscriber", token="secret"), 0), b"a").member


def test_versions_grow_and_a_new_epoch_may_repeat_the_newest_with_the_same_bits_only():
    registry = Registry(LEASE, None)
    first = joined(registry.handle(b"p", join("publisher"), 0), b"p")
    assert (first.epoch, first.version) == (1, -1)

    def announce(identity, member, epoch, version, value):
        out = registry.handle(identity, Announce(9, member, epoch, version, root(value)), 1)
        return next(message for to, message in out if to == identity)

    assert isinstance(announce(b"p", first.member, 1, 5, 5), Announced)
    stale = announce(b"p", first.member, 1, 4, 4)
    assert isinstance(stale, Refused)
    assert stale.code == "stale"
    assert "publish 6 or later" in stale.message
    second = joined(registry.handle(b"q", join("publisher"), 2), b"q")
    assert (second.epoch, second.version, second.root) == (2, 5, root(5))
    fenced = announce(b"p", first.member, 1, 6, 6)
    assert isinstance(fenced, Fenced)
    assert not fenced.rejoin
    assert isinstance(announce(b"q", second.member, 2, 5, 6), Refused)
    assert isinstance(announce(b"q", second.member, 1, 6, 6), Refused)
    assert isinstance(announce(b"q", second.member, 2, 5, 5), Announced)
    assert isinstance(announce(b"q", second.member, 2, 6, 6), Announced)


def test_only_the_publisher_announces_and_only_from_its_own_connection():
    registry = Registry(LEASE, None)
    publisher = joined(registry.handle(b"p", join("publisher"), 0), b"p").member
    subscriber = joined(registry.handle(b"s", join("subscriber", "s"), 0), b"s").member
    ((_, reply),) = registry.handle(b"s", Announce(1, subscriber, 1, 0, root(0)), 0)
    assert isinstance(reply, Refused)
    ((_, reply),) = registry.handle(b"s", Announce(1, publisher, 1, 0, root(0)), 0)
    assert isinstance(reply, Fenced)
    ((_, reply),) = registry.handle(b"s", Heartbeat(subscriber, None), 0)
    assert isinstance(reply, RunState)
    assert reply.announcement is None


def test_a_subscriber_that_does_not_fit_is_refused_or_fenced_and_named():
    registry = Registry(LEASE, None)
    early = joined(registry.handle(b"e", join("subscriber", "early", OTHER), 0), b"e").member
    out = registry.handle(b"p", join("publisher"), 0)
    (fenced,) = [message for to, message in out if to == b"e" and isinstance(message, Fenced)]
    assert fenced.member == early
    assert fenced.detail == {"tensor": "w", "got": "float32[3]", "expected": "float32[2]"}
    assert "'early'" in joined(out, b"p").roster.departed[early]
    ((_, refused),) = registry.handle(b"l", join("subscriber", "late", OTHER), 0)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.detail) == ("layout", fenced.detail)


def test_a_lease_lapses_without_heartbeats_and_the_publisher_is_told():
    registry = Registry(LEASE, None)
    publisher = joined(registry.handle(b"p", join("publisher"), 0), b"p").member
    member = joined(registry.handle(b"s", join("subscriber", "s"), 0), b"s").member
    registry.handle(b"p", Heartbeat(publisher, None), 4)
    assert registry.next_deadline() == LEASE
    assert registry.expire(4.9) == []
    out = dict(registry.expire(5))
    assert isinstance(out[b"s"], Fenced)
    assert out[b"s"].rejoin
    roster = out[b"p"]
    assert isinstance(roster, Roster)
    assert roster.live == {}
    assert "no heartbeat" in roster.departed[member]
    again = joined(registry.handle(b"s", join("subscriber", "s"), 6), b"s")
    assert again.member != member


def test_an_acknowledgement_only_grows_and_never_passes_the_run():
    registry = Registry(LEASE, None)
    publisher = joined(registry.handle(b"p", join("publisher"), 0), b"p").member
    member = joined(registry.handle(b"s", join("subscriber", "s"), 0), b"s").member
    registry.handle(b"p", Announce(1, publisher, 1, 3, root(3)), 0)

    def acked_after(version):
        registry.handle(b"s", Heartbeat(member, Acked(1, version, 0.1)), 0)
        ((_, roster),) = registry.handle(b"p", Heartbeat(publisher, None), 0)
        assert isinstance(roster, Roster)
        return roster.live[member].acked

    assert acked_after(4) is None
    assert acked_after(3) == Acked(1, 3, 0.1)
    assert acked_after(2) == Acked(1, 3, 0.1)


class Runs(RuleBasedStateMachine):
    """Whatever the members do, announcements only grow, and a fenced member changes nothing."""

    members = Bundle("members")

    @initialize()
    def start(self):
        self.registry = Registry(LEASE, None)
        self.now = 0.0
        self.count = 0
        self.seen: list[tuple[int, int]] = []
        self.roots: dict[int, bytes] = {}

    def note(self, out):
        for _, message in out:
            state = message.state if isinstance(message, Joined) else message
            if isinstance(state, RunState) and state.announcement is not None:
                announcement = state.announcement
                self.seen.append((announcement.epoch, announcement.version))
                assert self.roots.setdefault(announcement.version, announcement.root) == announcement.root

    @rule(target=members, role=st.sampled_from(["publisher", "subscriber"]), name=st.sampled_from("ab"))
    def join(self, role, name):
        self.count += 1
        identity = str(self.count).encode()
        out = self.registry.handle(identity, join(role, name), self.now)
        self.note(out)
        reply = joined(out, identity)
        return identity, reply.member, reply.epoch

    @rule(member=members, version=st.integers(0, 6), value=st.integers(0, 2), epoch=st.integers(-1, 0))
    def announce(self, member, version, value, epoch):
        identity, number, joined_at = member
        self.note(
            self.registry.handle(
                identity, Announce(1, number, joined_at + epoch, version, root(value)), self.now
            )
        )

    @rule(member=members, version=st.none() | st.integers(0, 6))
    def beat(self, member, version):
        identity, number, epoch = member
        acked = None if version is None else Acked(epoch, version, 0.0)
        self.note(self.registry.handle(identity, Heartbeat(number, acked), self.now))

    @rule(member=consumes(members))
    def leave(self, member):
        identity, number, _ = member
        self.note(self.registry.handle(identity, Leave(number, "done"), self.now))

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds):
        self.now += seconds
        self.note(self.registry.expire(self.now))

    @invariant()
    def announcements_only_grow(self):
        if hasattr(self, "seen"):
            assert self.seen == sorted(self.seen)
            deadline = self.registry.next_deadline()
            assert deadline is None or deadline <= self.now + LEASE


TestRuns = Runs.TestCase
TestRuns.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
