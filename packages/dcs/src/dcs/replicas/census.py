"""What the keepers hold all together: which steps are complete, and what may go. Pure functions over
inventories.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dcs.replicas.messages import Choice, Floor, Inventory, Place


@dataclass(frozen=True)
class HeldStep:
    """One step of one attempt: the keepers that hold each rank's shard."""

    place: Place
    world_size: int
    holders: Mapping[int, frozenset[str]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every rank's shard is held by somebody."""
        return len(self.holders) == self.world_size

    def copied(self, copies: int) -> bool:
        """Whether every rank's shard is held so many times."""
        return self.complete and all(len(keepers) >= copies for keepers in self.holders.values())

    @property
    def missing(self) -> list[int]:
        """The ranks whose shard nobody holds."""
        return [rank for rank in range(self.world_size) if rank not in self.holders]


@dataclass(frozen=True)
class Census:
    """`steps` are newest first; `numbers` and `choices` are by session."""

    steps: tuple[HeldStep, ...]
    numbers: Mapping[str, int]
    choices: Mapping[str, Choice]

    def newest_complete(self) -> HeldStep | None:
        """What a restore would take."""
        return next((step for step in self.steps if step.complete), None)

    def find(self, session: str, step: int) -> HeldStep | None:
        """One step, if anybody holds any of it."""
        return next((s for s in self.steps if (s.place.session, s.place.step) == (session, step)), None)

    def floor(self, keep: int, copies: int) -> Floor | None:
        """What may be dropped, so that `keep` complete steps stay; None while there are not as many.

        The newest step of which all copies are made stays as well, until a newer one has as many: where a
        keeper is slow or full, newer steps may be complete with too few copies.
        """
        complete = [step for step in self.steps if step.complete]
        if len(complete) < keep:
            return None
        copied = next((step for step in complete if step.copied(copies)), None)
        return Floor(complete[keep - 1].place, None if copied is None else copied.place)


def take(inventories: Mapping[str, Inventory]) -> Census:
    """Add up what each keeper (by any name) holds under one name."""
    records = [(keeper, record) for keeper, inventory in inventories.items() for record in inventory.attempts]
    numbers: dict[str, int] = {}
    choices: dict[str, Choice] = {}
    sizes: dict[str, int] = {}
    holders: dict[tuple[str, int], dict[int, set[str]]] = {}
    # Ascending, so that where keepers disagree the greatest number, which is the latest word, wins.
    for keeper, record in sorted(records, key=lambda entry: entry[1].number):
        numbers[record.session] = record.number
        sizes[record.session] = record.world_size
        if record.choice is not None:
            choices[record.session] = record.choice
        for step in record.steps:
            ranks = holders.setdefault((record.session, step.step), {})
            for rank in step.ranks:
                ranks.setdefault(rank, set()).add(keeper)
    steps = (
        HeldStep(
            Place(numbers[session], step, session),
            sizes[session],
            {rank: frozenset(keepers) for rank, keepers in ranks.items() if rank < sizes[session]},
        )
        for (session, step), ranks in holders.items()
    )
    return Census(tuple(sorted(steps, key=lambda step: step.place, reverse=True)), numbers, choices)


def missing_text(step: HeldStep | None, world_size: int) -> str:
    """Whose shards a step lacks, for error messages."""
    lacking: Iterable[int] = range(world_size) if step is None else step.missing
    named = [str(rank) for rank in lacking]
    return ", ".join(named[:16]) + (", ..." if len(named) > 16 else "")
