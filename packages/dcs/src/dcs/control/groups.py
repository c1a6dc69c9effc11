"""The ranks of one engine: which version they go for together, and which they may commit.

A group goes for one version until all of it have that version whole. Were each to go for the newest, then
versions that come faster than the slowest takes them would never meet. Its goal moves on when it has been
committed, when a member cannot get it any more, and when members come or go.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcs.control.members import Member
from dcs.control.messages import Announcement


@dataclass(eq=False, slots=True)
class _Group:
    goal: Announcement | None = None
    commit: int = -1
    told: set[int] = field(default_factory=set)  # members that were there when `commit` was said


class Groups:
    """Those of one run; a member without a group goes for the newest version and may commit it."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def goal(self, name: str, newest: Announcement | None) -> Announcement | None:
        """What the members of a group are to get."""
        if not name or newest is None:
            return newest
        group = self._groups.setdefault(name, _Group())
        goal = group.goal
        done = goal is None or goal.version <= group.commit
        if goal is None or done or goal.epoch != newest.epoch or goal.version > newest.version:
            goal = group.goal = newest
        return goal

    def commit(self, name: str) -> int:
        """The newest version that all of a group have had whole; -1 before the first."""
        group = self._groups.get(name)
        return -1 if group is None else group.commit

    def settle(self, name: str, members: Sequence[Member]) -> bool:
        """Commit what all of a group have, if they are all there and have the same; whether there is news.

        Not before all that were told the version before have committed it: so the ranks of an engine commit
        the same versions in the same order.
        """
        if not name or not members:
            return False
        group = self._groups.setdefault(name, _Group())
        versions = {member.staged_version for member in members}
        if len(versions) != 1 or len(members) < max(member.join.group_size for member in members):
            return False
        if any(member.id in group.told and member.acked_version < group.commit for member in members):
            return False
        version = versions.pop()
        if version <= group.commit:
            return False
        group.commit, group.told = version, {member.id for member in members}
        if group.goal is not None and group.goal.version <= version:
            group.goal = None
        return True

    def changed(self, name: str) -> None:
        """Members have come or gone: they go for the newest version."""
        group = self._groups.get(name)
        if group is not None:
            group.goal = None

    def lost(self, name: str, version: int) -> bool:
        """A member cannot get this version any more; whether that was the goal."""
        group = self._groups.get(name)
        if group is None or group.goal is None or group.goal.version > version:
            return False
        group.goal = None
        return True

    def forget(self, name: str) -> None:
        """The last member has gone."""
        self._groups.pop(name, None)
