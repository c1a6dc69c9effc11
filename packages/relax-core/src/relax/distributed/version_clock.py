"""The version boundary: which version may sample, which may be trained, which may be served next.

A version is a number of optimizer steps done; the actor starts at 0. A group of samples is assigned to one
optimizer step when it is started, and step k is trained when the actor is at version k. So one rule bounds
the age of every token: a group of step k starts only on an engine that serves at least version
k - max_staleness. Nothing has to be thrown away for age, and a group that is late cannot become older than it
may be, because the step it belongs to waits for it.

Each role keeps a clock of its own and tells it what it sees; every transition that would break the rule
raises VersionViolation instead of happening. There is no Ray, no socket and no time in here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Spans = Iterable[Any]
"""(version, start, end) triples, or the rows of an int array [k, 3]: a version sampled the response tokens
[start, end)."""


class VersionViolation(RuntimeError):
    """A transition that the version rules forbid: a fault in the program or in what arrived."""


@dataclass
class VersionClock:
    """The rules, and what this role knows of the versions.

    Attributes:
        max_staleness: versions a trained token may lie behind the actor.
        actor: optimizer steps done, as far as this role knows.
        engines: engine name -> version it serves; -1 before it has any weights.
    """

    max_staleness: int
    actor: int = 0
    engines: dict[str, int] = field(default_factory=dict)

    def earliest(self, step: int) -> int:
        """The oldest version whose tokens step `step` may train."""
        return max(0, step - self.max_staleness)

    # What engines do

    def joined(self, engine: str) -> None:
        """An engine without weights: not routable."""
        if engine in self.engines:
            raise VersionViolation(f"engine {engine!r} joined a second time and had not left")
        self.engines[engine] = -1

    def left(self, engine: str) -> None:
        """An engine is gone: nothing starts there, and nobody waits for it. It may join again, as one without
        weights.
        """
        if self.engines.pop(engine, None) is None:
            raise VersionViolation(f"engine {engine!r} left but never joined")

    def committed(self, engine: str, version: int) -> None:
        """An engine serves `version` from now on. Versions only grow."""
        served = self.engines.get(engine)
        if served is None:
            raise VersionViolation(f"engine {engine!r} committed version {version} but never joined")
        if version <= served:
            raise VersionViolation(f"engine {engine!r} committed version {version} while it served {served}")
        self.engines[engine] = version
        self.actor = max(self.actor, version)

    def routable(self, step: int) -> list[str]:
        """Engines on which a group of `step` may start now."""
        return [name for name, version in self.engines.items() if version >= self.earliest(step)]

    def may_start(self, step: int, engine: str) -> bool:
        return self.engines.get(engine, -1) >= self.earliest(step)

    # What the actor does

    def admit(self, step: int, spans: Spans) -> int:
        """Check a finished sample for `step`; returns its age in versions when trained.

        Raises:
            VersionViolation: a token older than allowed, or newer than the step that trains it.
        """
        versions = [int(span[0]) for span in spans]
        if not versions:
            raise VersionViolation(
                f"a sample of step {step} says of none of its tokens which version sampled it"
            )
        oldest, newest = min(versions), max(versions)
        if oldest < self.earliest(step):
            raise VersionViolation(
                f"a sample of step {step} holds tokens of version {oldest}, older than {self.earliest(step)} "
                f"(max_staleness {self.max_staleness})"
            )
        if newest > step:
            raise VersionViolation(
                f"a sample of step {step} holds tokens of version {newest}, which did not exist yet"
            )
        return step - oldest

    def may_train(self, step: int) -> bool:
        return step == self.actor

    def stepped(self, step: int) -> int:
        """Optimizer step `step` is done; returns the version to publish."""
        if not self.may_train(step):
            raise VersionViolation(f"step {step} was trained while the actor is at version {self.actor}")
        self.actor = step + 1
        return self.actor
