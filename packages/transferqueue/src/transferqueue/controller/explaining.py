"""Why a fetch got nothing, in words that name the way out."""

from collections import Counter
from itertools import islice

from ..errors import Timeout
from ..samplers import group_size
from ..scheduling.partition import Partition
from ..scheduling.wanted import Wanted

_LOOKED_AT = 1_000  # samples, so that a timeout costs the same however many there are


def nothing_served(partition: Partition, wanted: Wanted) -> Timeout:
    """The error of a fetch whose deadline has passed."""
    task = partition.task(wanted.task)
    unready, ready, leased, _ = task.counts
    said = [f"{ready} ready, {leased} leased and not acked, {unready} lack a field"]
    lacking = _lacking(partition, wanted.task) if unready else ""
    if lacking:
        said.append(f"missing {lacking}: are the names those that put and update write?")
    oldest = partition.oldest_served(wanted)
    if oldest is not None:
        staleness = f" (max_staleness {wanted.max_staleness})" if wanted.max_staleness is not None else ""
        said.append(f"only versions of at least {oldest} are served{staleness}")
    if wanted.max_priority is not None:
        said.append(f"only priorities of at most {wanted.max_priority} are served")
    if group_size(wanted.sampler) is not None:
        said.append(_groups(partition))
    if leased and not ready:
        said.append("samples return when their lease ends or their consumer acks, nacks or closes")
    return Timeout(
        f"task {wanted.task!r} of partition {partition.name!r} had no {wanted.count} samples for "
        f"{wanted.sampler} until the deadline: {'; '.join(said)}",
        ready=ready,
        leased=leased,
        unready=unready,
    )


def _lacking(partition: Partition, name: str) -> str:
    task = partition.task(name)
    bits = {field: partition.fields_mask((field,)) for field in task.fields}
    lacking: Counter[str] = Counter()
    for sample in islice(partition.samples.values(), _LOOKED_AT):
        lacking.update(field for field, bit in bits.items() if bit is None or not sample.written & bit)
    return ", ".join(f"{field!r} in {count}" for field, count in lacking.most_common(5))


def _groups(partition: Partition) -> str:
    alone = sum(sample.group is None for sample in islice(partition.samples.values(), _LOOKED_AT))
    there = f"{len(partition.groups)} groups are there, whole or not"
    return f"{there}, and {alone} samples without a group key" if alone else there
