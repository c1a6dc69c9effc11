"""What a launcher does: bring the roles of a run to life, tell how they fare, end them."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from relax.ops.reports import Report

State = Literal["starting", "running", "done", "failed", "lost"]
"""`failed` ends the run. An engine that is lost is `starting` again, or `lost` when it is not started again.
"""


@dataclass(frozen=True)
class WorkerStatus:
    """One worker of a role, and the traceback it failed with."""

    worker: str
    state: State
    error: str = ""


@dataclass
class Poll:
    """What has happened since the last poll."""

    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)

    @property
    def failed(self) -> list[WorkerStatus]:
        return [status for status in self.workers.values() if status.state == "failed"]

    @property
    def ready(self) -> bool:
        return bool(self.workers) and all(status.state != "starting" for status in self.workers.values())

    def done(self, endless: frozenset[str]) -> bool:
        """Every worker is done but those that serve until they are ended."""
        return all(s.state == "done" for name, s in self.workers.items() if name not in endless)


class RoleFailed(RuntimeError):
    """A role ended with a fault; the message holds its traceback."""


class Launcher(Protocol):
    """Runs the roles of one plan."""

    async def start(self) -> None:
        """Begin to start every role; returns before they are ready."""
        ...

    async def poll(self) -> Poll: ...

    async def stop(self) -> None:
        """Ask the actor for a tidy end; the others follow."""
        ...

    async def close(self) -> None:
        """End everything that is left. Idempotent."""
        ...
