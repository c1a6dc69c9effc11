"""The version boundary as a whole: any interleaving of train, publish, commit and sample keeps its rules,
engines that leave and join among them.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from relax.distributed.version_clock import VersionClock, VersionViolation
from relax.engine.pacing import Pacer, Slot

GROUPS, STEPS = 2, 5


class Boundary(RuleBasedStateMachine):
    """Two engines, one rollout, one actor; every message between them may be late."""

    @initialize(staleness=st.integers(0, 3))
    def begin(self, staleness: int) -> None:
        self.staleness = staleness
        self.rollout = VersionClock(staleness)
        self.actor = VersionClock(staleness)
        self.pacer = Pacer(GROUPS, 0, STEPS)
        self.published = 0
        self.serving = {"a": -1, "b": -1}
        self.told = {"a": -1, "b": -1}
        for name in self.serving:
            self.rollout.joined(name)
        self.ordinal = 0
        self.running: dict[int, tuple[str, Slot, list[int]]] = {}
        self.bus: dict[int, list[list[int]]] = {}
        self.trained: list[tuple[int, list[int]]] = []

    @rule(name=st.sampled_from(["a", "b"]))
    def commit(self, name: str) -> None:
        """The engine takes the newest version; what it samples from now on is of that one."""
        if name in self.serving and self.published > self.serving[name]:
            self.serving[name] = self.published

    @rule(name=st.sampled_from(["a", "b"]))
    def tell_rollout(self, name: str) -> None:
        if name in self.serving and self.serving[name] > self.told[name]:
            self.told[name] = self.serving[name]
            self.rollout.committed(name, self.serving[name])

    @rule(name=st.sampled_from(["a", "b"]))
    def lose(self, name: str) -> None:
        """The engine is gone; what ran there is not, and is placed again when one may start it."""
        if name in self.serving:
            del self.serving[name], self.told[name]
            self.rollout.left(name)
            for ordinal, (engine, slot, versions) in self.running.items():
                if engine == name:
                    self.running[ordinal] = ("", slot, versions)

    @rule(name=st.sampled_from(["a", "b"]))
    def join_again(self, name: str) -> None:
        """A new start of it, without weights."""
        if name not in self.serving:
            self.serving[name] = self.told[name] = -1
            self.rollout.joined(name)

    @rule(keeps=st.booleans())
    def move(self, keeps: bool) -> None:
        """Requests of lost engines go to one that may start their step, with the tokens so far or without."""
        for ordinal, (engine, slot, versions) in self.running.items():
            routable = self.rollout.routable(slot.step)
            if not engine and routable:
                self.running[ordinal] = (routable[-1], slot, versions if keeps else [])

    @rule()
    def start(self) -> None:
        slot = self.pacer.peek()
        if slot is None:
            return
        routable = self.rollout.routable(slot.step)
        if routable:
            self.pacer.start(self.ordinal)
            self.running[self.ordinal] = (routable[0], slot, [])
            self.ordinal += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def sample(self, data: st.DataObject) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.running)))
        engine, _, versions = self.running[ordinal]
        if engine:
            versions.append(self.serving[engine])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), fails=st.booleans())
    def finish(self, data: st.DataObject, fails: bool) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.running)))
        engine, slot, versions = self.running[ordinal]
        if not engine and not fails:
            return
        del self.running[ordinal]
        if fails:
            self.pacer.failed(ordinal)
            return
        versions.append(self.serving[engine])
        self.rollout.admit(slot.step, [(v, i, i + 1) for i, v in enumerate(versions)])
        self.bus.setdefault(slot.step, []).append(versions)
        self.pacer.finished(ordinal)

    @rule()
    def train(self) -> None:
        step = self.actor.actor
        groups = self.bus.get(step, [])
        if step < STEPS and len(groups) == GROUPS:
            for versions in groups:
                self.actor.admit(step, [(v, i, i + 1) for i, v in enumerate(versions)])
                self.trained.append((step, versions))
            self.published = self.actor.stepped(step)

    @invariant()
    def no_token_is_older_or_newer_than_allowed(self) -> None:
        for step, versions in getattr(self, "trained", []):
            assert step - min(versions) <= self.staleness
            assert max(versions) <= step

    @invariant()
    def the_lead_is_bounded(self) -> None:
        if hasattr(self, "pacer"):
            untrained = self.pacer._next - len(self.trained)
            assert untrained <= GROUPS * (self.staleness + 1)

    def teardown(self) -> None:
        """From wherever it got to, the run can always be finished: nothing waits for ever."""
        if not hasattr(self, "pacer"):
            return
        for name in ("a", "b"):
            self.join_again(name)
        for _ in range(STEPS * GROUPS * 10):
            for name in self.serving:
                self.commit(name)
                self.tell_rollout(name)
            self.start()
            self.move(keeps=True)
            for ordinal in list(self.running):
                engine, slot, versions = self.running[ordinal]
                if not engine:
                    continue
                del self.running[ordinal]
                versions.append(self.serving[engine])
                self.bus.setdefault(slot.step, []).append(versions)
                self.pacer.finished(ordinal)
            self.train()
        assert self.actor.actor == STEPS
        assert self.pacer.exhausted
        self.no_token_is_older_or_newer_than_allowed()


TestBoundary = Boundary.TestCase
TestBoundary.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_on_policy_sampling_is_exactly_on_policy() -> None:
    clock = VersionClock(0)
    clock.joined("a")
    clock.committed("a", 0)
    assert clock.may_start(0, "a")
    assert not clock.may_start(1, "a")


def test_an_engine_without_weights_is_not_routable() -> None:
    clock = VersionClock(3)
    clock.joined("a")
    assert clock.routable(0) == []


def test_an_engine_that_left_is_not_waited_for_and_joins_again_without_weights() -> None:
    clock = VersionClock(1)
    clock.joined("a")
    clock.committed("a", 4)
    with pytest.raises(VersionViolation, match="joined a second time"):
        clock.joined("a")
    clock.left("a")
    assert clock.routable(0) == []
    with pytest.raises(VersionViolation, match="left but never joined"):
        clock.left("a")
    with pytest.raises(VersionViolation, match="never joined"):
        clock.committed("a", 5)
    clock.joined("a")
    assert not clock.may_start(4, "a")
    clock.committed("a", 5)
    assert clock.may_start(6, "a")


def test_a_version_never_goes_back() -> None:
    clock = VersionClock(1)
    clock.joined("a")
    clock.committed("a", 4)
    with pytest.raises(VersionViolation, match="committed version 4 while it served 4"):
        clock.committed("a", 4)


def test_old_new_and_unversioned_tokens_are_refused_by_name() -> None:
    clock = VersionClock(1)
    with pytest.raises(VersionViolation, match="older than 4"):
        clock.admit(5, [(4, 0, 3), (3, 3, 9)])
    with pytest.raises(VersionViolation, match="did not exist yet"):
        clock.admit(5, [(6, 0, 3)])
    with pytest.raises(VersionViolation, match="none of its tokens"):
        clock.admit(5, [])
    assert clock.admit(5, [(4, 0, 3), (5, 3, 9)]) == 1


def test_the_actor_trains_its_own_step_only() -> None:
    clock = VersionClock(1)
    assert clock.stepped(0) == 1
    with pytest.raises(VersionViolation, match="at version 1"):
        clock.stepped(3)
