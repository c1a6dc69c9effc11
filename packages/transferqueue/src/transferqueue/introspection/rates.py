"""Rates a second, from two readings of a store's totals."""

from dataclasses import dataclass, field

from .statistics import PartitionStats, StoreStats, TaskStats


@dataclass(frozen=True)
class Reading:
    """What a store said of itself, and when: `at` is in seconds, on any clock that the reader keeps to."""

    at: float
    stats: StoreStats


@dataclass(frozen=True)
class TaskRates:
    """Samples a second that a task was given, completed, gave back and let lapse."""

    delivered: float = 0.0
    acked: float = 0.0
    nacked: float = 0.0
    lapsed: float = 0.0


@dataclass(frozen=True)
class PartitionRates:
    """Samples a second put, updated and dropped; bytes a second of puts and updates."""

    put_samples: float = 0.0
    put_bytes: float = 0.0
    updated: float = 0.0
    dropped: float = 0.0
    tasks: dict[str, TaskRates] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """The change between two readings, `seconds` apart on the store's own clock.

    `network_read_bytes` and `network_written_bytes` are bytes a second, of all units together.
    """

    seconds: float
    network_read_bytes: float
    network_written_bytes: float
    partitions: dict[str, PartitionRates]


def restarted(before: Reading, after: Reading) -> bool:
    """Whether another controller answered the second time: the first would have aged by the time between."""
    return after.stats.uptime - before.stats.uptime < 0.5 * (after.at - before.at)


def rates(before: Reading, after: Reading) -> Rates | None:
    """The rates between two readings; None if they cannot be told, as the store was restarted in between or
    no time has passed on its clock. What is new in the second reading counts from zero.
    """
    seconds = after.stats.uptime - before.stats.uptime
    if seconds <= 0 or restarted(before, after):
        return None
    earlier, later = before.stats, after.stats
    return Rates(
        seconds,
        _network(earlier, later, "network_read_bytes_total") / seconds,
        _network(earlier, later, "network_written_bytes_total") / seconds,
        {
            name: _partition(earlier.partitions.get(name), partition, seconds)
            for name, partition in later.partitions.items()
        },
    )


def _network(before: StoreStats, after: StoreStats, total: str) -> int:
    """The growth of a total of all units; one that shrank belongs to a new unit, which counts from zero."""
    old = {unit.unit: getattr(unit, total) for unit in before.units}
    now = {unit.unit: getattr(unit, total) for unit in after.units}
    return sum(
        count - old.get(unit, 0) if count >= old.get(unit, 0) else count for unit, count in now.items()
    )


def _partition(before: PartitionStats | None, after: PartitionStats, seconds: float) -> PartitionRates:
    def rate(total: str) -> float:
        return (getattr(after, total) - (0 if before is None else getattr(before, total))) / seconds

    return PartitionRates(
        rate("put_samples_total"),
        rate("put_bytes_total"),
        rate("updated_total"),
        rate("dropped_total"),
        {
            name: _task(None if before is None else before.tasks.get(name), task, seconds)
            for name, task in after.tasks.items()
        },
    )


def _task(before: TaskStats | None, after: TaskStats, seconds: float) -> TaskRates:
    def rate(total: str) -> float:
        return (getattr(after, total) - (0 if before is None else getattr(before, total))) / seconds

    return TaskRates(rate("delivered_total"), rate("acked_total"), rate("nacked_total"), rate("lapsed_total"))
