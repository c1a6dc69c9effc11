"""What ``transferqueue top`` shows: a frame an interval, with the change since the last one."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from ..errors import QueueError
from .rates import Rates, Reading, rates, restarted
from .reader import GONE, StatsReader


@dataclass(frozen=True)
class Frame:
    """One picture of a store.

    Attributes:
        address: of the store.
        reading: the newest one there is.
        rates: since the reading before; None in the first frame, while the store is away and after a restart.
        away: why the store could not be read now; `reading` is then the last one before.
        restarted: whether the store was restarted since the reading before.
        restart_seen: when that was last noticed, local time.
    """

    address: str
    reading: Reading
    rates: Rates | None = None
    away: QueueError | None = None
    restarted: bool = False
    restart_seen: datetime | None = None

    @property
    def notice(self) -> str | None:
        """What a person has to be told, if anything."""
        if self.away is not None:
            since = time.monotonic() - self.reading.at
            return f"not read since {since:.0f} s, trying again: {self.away}"
        if self.restart_seen is not None:
            return f"the store was restarted (seen at {self.restart_seen:%H:%M:%S}); its totals began again"
        return None


def frames(
    reader: StatsReader,
    before: Reading,
    interval: float,
    *,
    once: bool,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[Frame]:
    """A frame now and one after every `interval` seconds, for ever; with `once` only the second.

    A store that goes away gives frames that say so, and is read again once it is back.

    Args:
        pause: waits for so many seconds.

    Raises:
        QueueError: the store refuses us; with `once` also if it went away.
    """
    if not once:
        yield Frame(reader.address, before)
    seen: datetime | None = None
    while True:
        pause(interval)
        try:
            after = reader.read()
        except GONE as error:
            if once:
                raise
            yield Frame(reader.address, before, away=error, restart_seen=seen)
            continue
        again = restarted(before, after)
        seen = datetime.now() if again else seen
        yield Frame(reader.address, after, rates(before, after), restarted=again, restart_seen=seen)
        if once:
            return
        before = after
