"""What ``dcs top`` shows: a frame an interval, with what changed since the last one."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from dcs.control.views import DepartedView
from dcs.errors import DcsError
from dcs.introspection.reader import GONE, Reading, TopologyReader

DEPARTED_SECONDS = 60.0
"""For how long a member that is gone is shown."""


@dataclass(frozen=True)
class Frame:
    """One picture of a coordinator.

    Attributes:
        url: of its HTTP server.
        reading: the newest one there is.
        away: why it could not be read now; `reading` is then the last one before.
        restart_seen: when it was last noticed that the coordinator had been restarted, local time.
    """

    url: str
    reading: Reading
    away: DcsError | None = None
    restart_seen: datetime | None = None

    @property
    def notice(self) -> str | None:
        """What a person has to be told, if anything."""
        if self.away is not None:
            since = time.monotonic() - self.reading.at
            return f"not read since {since:.0f} s, trying again: {self.away}"
        if self.restart_seen is not None:
            return f"the coordinator was restarted (seen at {self.restart_seen:%H:%M:%S})"
        return None

    def departed(self, run: int) -> tuple[DepartedView, ...]:
        """Who has left a run (by its place in the topology) a short while ago, the latest first."""
        topology = self.reading.topology
        gone = topology.runs[run].departed
        return tuple(one for one in reversed(gone) if topology.at - one.at < DEPARTED_SECONDS)


def frames(
    reader: TopologyReader,
    first: Reading,
    interval: float,
    pause: Callable[[float], object],
) -> Iterator[Frame]:
    """A frame now and one after every `interval` seconds, for ever.

    A coordinator that goes away gives frames that say so, and is read again once it is back.

    Args:
        pause: waits for so many seconds.

    Raises:
        DcsError: the coordinator refuses us.
    """
    yield Frame(reader.url, first)
    last, seen = first, None
    while True:
        pause(interval)
        try:
            reading = reader.read()
        except GONE as error:
            yield Frame(reader.url, last, away=error, restart_seen=seen)
            continue
        # The same coordinator would have aged by the time between.
        aged = reading.topology.uptime_seconds - last.topology.uptime_seconds
        if aged < 0.5 * (reading.at - last.at):
            seen = datetime.now()
        last = reading
        yield Frame(reader.url, reading, restart_seen=seen)
