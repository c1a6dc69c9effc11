"""What a run says of the engines that it lost: a note for each loss and return, and a line at the end."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from relax.ops.quantities import short_time


class EngineLosses:
    """Counts the events `engine lost`, `engine back` and `engine given up`."""

    def __init__(self) -> None:
        self._lost: Counter[str] = Counter()
        self._given_up: list[str] = []
        self._away: list[float] = []
        self.asked_again = 0
        """Requests that were asked of another engine."""

    def note(self, event: Mapping[str, Any]) -> str | None:
        """Count an event; what to show of it, None for one that is about something else."""
        name = event.get("engine", "")
        match event["event"]:
            case "engine lost":
                self._lost[name] += 1
                requests = event["requests"]
                moved = f"; its {requests} requests go to others" if requests else ""
                return (
                    f"{name} was lost {short_time(event['seconds'])} after it was last heard: "
                    f"{_short(event['reason'])}{moved}"
                )
            case "engine back":
                self._away.append(event["seconds"])
                return f"{name} is back after {short_time(event['seconds'])}, at version {event['version']}"
            case "engine given up":
                self._given_up.append(name)
                return f"{name} is not started again: {_short(event['reason'])}"
        return None

    @property
    def summary(self) -> str:
        """All of it in one line; empty when no engine was lost."""
        if not self._lost:
            return ""
        who = ", ".join(f"{name} ({count}x)" for name, count in sorted(self._lost.items()))
        back = f"; back {len(self._away)}x, after {short_time(max(self._away))} at most" if self._away else ""
        gone = f"; not started again: {', '.join(self._given_up)}" if self._given_up else ""
        return f"lost {who}{back}{gone}; {self.asked_again} requests were asked again"


def _short(reason: str) -> str:
    """A reason's last line: that of a traceback says what happened."""
    return next((line.strip() for line in reversed(reason.splitlines()) if line.strip()), reason)
