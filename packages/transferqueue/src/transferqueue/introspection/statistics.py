"""What a store says of itself: counts, bytes and totals, never one entry a sample.

The structs travel as they are. A gauge is the state now; a name that ends in ``_total`` only grows, until the
controller is started again.
"""

from collections import Counter
from typing import Any

import msgspec

from ..scheduling.groups import State
from ..scheduling.partition import Partition


class TaskStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where the samples of a partition are for one task, and what became of those it was given.

    Attributes:
        unready: samples that lack a field the task needs.
        ready: samples that a fetch could have now.
        leased: samples with a consumer.
        acked: samples completed, also those whose payload is long freed.
        leases: batches out. One batch is one lease.
        delivered_total: samples leased; a sample that comes back and is fetched again counts again.
        acked_total, nacked_total, lapsed_total: samples that were completed, that came back by `nack` or
            because their consumer left, and that came back because nobody acked them in time.
        lag: age in seconds of the oldest sample the task has not acked; 0 if it has acked all.
    """

    unready: int
    ready: int
    leased: int
    acked: int
    leases: int
    delivered_total: int
    acked_total: int
    nacked_total: int
    lapsed_total: int
    lag: float


class PartitionStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One partition.

    Attributes:
        samples: samples put and not yet acked by every task, nor dropped.
        nbytes: their payload.
        max_samples, max_bytes: the limits puts wait at, or None.
        closed: whether nothing can be put any more.
        groups: groups with members still to come or to be acked.
        dropped: samples that were dropped and are kept account of.
        put_samples_total, put_bytes_total: samples put; bytes of puts and updates.
        updated_total: samples updated, as often as each was.
        dropped_total: samples dropped.
        tasks: by name.
    """

    samples: int
    nbytes: int
    max_samples: int | None
    max_bytes: int | None
    closed: bool
    groups: int
    dropped: int
    put_samples_total: int
    put_bytes_total: int
    updated_total: int
    dropped_total: int
    tasks: dict[str, TaskStats]


class MemoryStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The memory of all storage units, in bytes, as the controller's allocator has it.

    Attributes:
        capacity: size of all arenas.
        granted: given to clients to write into and not yet written.
        used: blocks that hold payload of samples, or that a reader still views.
        pinned_only: of `used`, what no sample needs any more and only a reader's view keeps.
    """

    capacity: int
    granted: int
    used: int
    pinned_only: int


class UnitStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One storage unit.

    Attributes:
        unit: its number.
        alive: whether it answers the controller.
        address: where clients of other hosts reach it.
        arenas, capacity, used: the arenas it serves, their bytes, and the bytes of blocks in them. The units
            of one host serve the same ones.
        network_read_bytes_total, network_written_bytes_total: payload sent to and received from clients of
            other hosts. Clients of the same host use the memory itself.
    """

    unit: int
    alive: bool
    address: str
    arenas: int
    capacity: int
    used: int
    network_read_bytes_total: int
    network_written_bytes_total: int


class StoreStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A whole store at one moment.

    Attributes:
        uptime: seconds since this controller started. It is smaller than before after a restart.
        max_bytes: the limit on payload in the store, or None.
        nbytes: payload of all samples that are there.
        waiting_puts: puts that wait for room.
        waiting_fetches: fetches that wait for samples.
        clients: clients connected, among them the one that asks.
        memory: of all storage units together.
        units: the storage units, by number.
        partitions: by name.
    """

    uptime: float
    max_bytes: int | None
    nbytes: int
    waiting_puts: int
    waiting_fetches: int
    clients: int
    memory: MemoryStats
    units: list[UnitStats]
    partitions: dict[str, PartitionStats]


def partition_stats(
    partition: Partition, *, max_samples: int | None, max_bytes: int | None, now: float
) -> PartitionStats:
    """The statistics of one partition. The work depends on its tasks and leases, not on its samples.

    Args:
        max_samples, max_bytes: its limits, which its scheduler does not know.
        now: on the clock that the partition's puts were given.
    """
    leases = Counter(lease.task for lease in partition.leases.values())
    return PartitionStats(
        samples=len(partition.samples),
        nbytes=partition.nbytes,
        max_samples=max_samples,
        max_bytes=max_bytes,
        closed=partition.closed,
        groups=len(partition.groups),
        dropped=len(partition.dropped),
        put_samples_total=partition.put_samples_total,
        put_bytes_total=partition.put_bytes_total,
        updated_total=partition.updated_total,
        dropped_total=partition.dropped_total,
        tasks={
            name: TaskStats(
                unready=task.counts[State.UNREADY],
                ready=task.counts[State.READY],
                leased=task.counts[State.LEASED],
                acked=task.counts[State.ACKED],
                leases=leases[name],
                delivered_total=task.delivered_total,
                acked_total=task.acked_total,
                nacked_total=task.nacked_total,
                lapsed_total=task.lapsed_total,
                lag=partition.lag(task, now) or 0.0,
            )
            for name, task in partition.tasks.items()
        },
    )


def plain(value: Any) -> Any:
    """Statistics as dicts and lists with the names above as keys, for JSON."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return value
