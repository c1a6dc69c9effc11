"""Repeats recorded changes."""

from .events import (
    Acked,
    Admitted,
    Advanced,
    Drained,
    Dropped,
    Ended,
    Event,
    Extended,
    Forgotten,
    GroupClosed,
    Handed,
    Leased,
    Planned,
    Put,
    Released,
    Returned,
    TakenBack,
    Told,
    Unadmitted,
    Updated,
    Watched,
)
from .partition import Partition
from .samples import MAX_LENGTH, MAX_MEMBERS, MAX_NBYTES, within


def apply(partition: Partition, event: Event, now: float) -> None:
    """Repeats a change. The partition must be in the state in which the event was recorded."""
    match event:
        case Put(rows, specs, sizes, ticket):
            for row in rows:
                row.nbytes = within(row.nbytes, MAX_NBYTES)
                row.length = within(row.length, MAX_LENGTH)
            sizes = {key: within(size, MAX_MEMBERS) for key, size in sizes.items()}
            partition.put(rows, specs, sizes, now, ticket)
        case Updated(ids, specs, nbytes, lengths, places):
            nbytes = [within(more, MAX_NBYTES) for more in nbytes]
            if lengths is not None:
                lengths = [within(length, MAX_LENGTH) for length in lengths]
            partition.update(ids, specs, nbytes, lengths, places)
        case Leased(lease, task, ids, owner, seconds):
            samples = partition.known(ids)
            partition.grant(partition.task(task), samples, owner, now + seconds, lease)
        case Planned() | Drained() | Told() | Handed() | TakenBack() | Forgotten():
            partition.rounds.apply(event, now)
        case Acked(lease):
            partition.complete(lease)
        case Returned(lease, lapsed):
            partition.give_back(partition.lease_numbered(lease), lapsed=lapsed)
        case Extended(lease, seconds):
            partition.prolong(lease, now + seconds)
        case Dropped(ids, reason):
            partition.drop(ids, reason)
        case GroupClosed(key, count, tombstones):
            partition.close_group(key, within(count - tombstones, MAX_MEMBERS), 0)
        case Watched(task, n):
            partition.view(partition.task(task), n)
        case Advanced(version):
            partition.advance(version)
        case Ended():
            partition.close()
        case Admitted(ticket, samples, version, owner, seconds):
            partition.promise(ticket, samples, version, owner, now + seconds)
        case Unadmitted(ticket):
            partition.unpromise(ticket)
        case Released(owner):
            partition.release(owner)
