"""Every sample is trained exactly once, or dropped with a reason.

Counted by id from the bus's own records, and held against the actor's journal.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import transferqueue as tq

from relax import schema
from relax.distributed.bus import Endpoint
from relax.distributed.schedule import read

UNTRAINED = "the run ended before this sample's step"


@dataclass(frozen=True)
class Accounting:
    """One segment of a run, by sample id.

    Attributes:
        put: samples that rollout put on the bus.
        trained: acknowledged by the actor.
        dropped: reason -> samples.
        faults: what does not add up; empty when the accounts are exact.
    """

    segment: int
    put: int
    trained: int
    dropped: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        dropped = sum(self.dropped.values())
        exact = "exact" if not self.faults else "NOT EXACT: " + "; ".join(self.faults)
        return f"{self.put} samples put = {self.trained} trained + {dropped} dropped ({exact})"


def settle(bus: Endpoint, journal: Path, segment: int) -> Accounting:
    """Drop what no step will train any more, with its reason, and count."""
    queue = tq.connect(bus.address, token=bus.token, transport=bus.transport)
    try:
        try:
            partition = queue.partition(schema.PARTITION)
        except tq.UnknownName:  # it ended before a role came to open it
            return Accounting(segment, put=0, trained=0)
        open_ids = [*(ledger := partition.ledger(schema.TASK_ACTOR)).pending, *ledger.leased]
        if open_ids:
            partition.drop(open_ids, reason=UNTRAINED)
        ledger = partition.ledger(schema.TASK_ACTOR)
    finally:
        queue.close()
    acked = {int(i) for i in ledger.acked}
    dropped = {int(i): reason for i, reason in ledger.dropped.items()}
    return Accounting(
        segment=segment,
        put=len(acked) + len(dropped) + len(ledger.pending) + len(ledger.leased),
        trained=len(acked),
        dropped=dict(Counter(dropped.values())),
        faults=_faults(acked, dropped, journaled(journal, segment)),
    )


def journaled(journal: Path, segment: int) -> Counter[int]:
    """How often each sample id was trained by a step that was completed."""
    steps: dict[int, list[int]] = {}
    done: set[int] = set()
    for entry in read(journal):
        if entry["segment"] != segment:
            continue
        if entry.get("done"):
            done.add(entry["step"])
        else:
            steps.setdefault(entry["step"], []).extend(entry["ids"])
    return Counter(i for step in done for i in steps.get(step, []))


def _faults(acked: set[int], dropped: dict[int, str], trained: Counter[int]) -> list[str]:
    faults = []
    twice = [i for i, times in trained.items() if times > 1]
    if twice:
        faults.append(f"{len(twice)} samples trained more than once, for example {twice[0]}")
    lost = acked - trained.keys()
    if lost:
        faults.append(f"{len(lost)} samples acknowledged but never trained, for example {min(lost)}")
    unacked = trained.keys() - acked
    if unacked:
        faults.append(f"{len(unacked)} samples trained but not acknowledged, for example {min(unacked)}")
    both = acked & dropped.keys()
    if both:
        faults.append(f"{len(both)} samples both trained and dropped, for example {min(both)}")
    return faults
