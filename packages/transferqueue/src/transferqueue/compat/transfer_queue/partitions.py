"""What the catalog knows of one partition: its samples, their fields, and what each task has consumed.

No sockets, clocks or payload. A task's ready samples are kept up to date as fields are written, so that a
choice costs what it takes and not what there is.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import InvalidRequest
from .messages import FieldWrite, Shape


class Cell(NamedTuple):
    """One field of one sample: how the store holds it, and the shape of its tensor (None: no tensor)."""

    kind: str
    shape: Shape | None


@dataclass(slots=True)
class Sample:
    """One row. `row` is its id in the store, 0 while it has no payload; `ordinal` counts in its partition."""

    index: int
    partition: "Partition"
    ordinal: int
    key: str | None = None
    row: int = 0
    cells: dict[str, Cell] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Field:
    """One column. While no sample has it, its dtype is free again."""

    dtype: str | None = None
    nested: bool = False
    shape: Shape | None = None
    samples: int = 0


@dataclass(slots=True)
class Task:
    """A consumer group: the samples it has consumed, and those that are ready, for each set of fields asked
    for.
    """

    taken: set[int] = field(default_factory=set)
    ready: dict[tuple[str, ...], list[int]] = field(default_factory=dict)


class Partition:
    """One logical partition. Samplers get it as ``partition``.

    Attributes:
        partition_id: its name.
        samples: by global index, in the order in which they were made.
        reserved: indexes set aside for samples that are announced and not put yet.
        keys: a user's key -> global index.
        changes: how often anything that a waiting consumer may care for has changed.
    """

    def __init__(self, partition_id: str, reserved: list[int]) -> None:
        self.partition_id = partition_id
        self.samples: dict[int, Sample] = {}
        self.reserved = reserved
        self.keys: dict[str, int] = {}
        self.fields: dict[str, Field] = {}
        self.tasks: dict[str, Task] = {}
        self.changes = 0
        self.made = 0

    # -- what samplers use -----------------------------------------------------------------------------------

    @property
    def total_samples_num(self) -> int:
        return len(self.samples)

    def get_custom_meta(self, global_indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The tags of those of the samples that are there, by global index."""
        return {at: self.samples[at].meta for at in global_indexes if at in self.samples}

    def ordinal(self, global_index: int) -> int:
        """The how-manieth sample of the partition it is, from 0."""
        return self.samples[global_index].ordinal

    # -- writing ---------------------------------------------------------------------------------------------

    def add(self, index: int, key: str | None = None) -> Sample:
        sample = Sample(index, self, self.made, key)
        self.made += 1
        self.samples[index] = sample
        if key is not None:
            self.keys[key] = index
        return sample

    def check(self, writes: Iterable[FieldWrite]) -> None:
        """Raises InvalidRequest if a field has another dtype than the samples that have it."""
        for write in writes:
            known = self.fields.get(write.name)
            fixed = known.dtype if known is not None and known.samples else None
            if None not in (fixed, write.dtype) and fixed != write.dtype:
                raise InvalidRequest(
                    f"field {write.name!r} of partition {self.partition_id!r} is {fixed}, got {write.dtype}; "
                    "convert it, or use another field"
                )

    def write(self, samples: Sequence[Sample], writes: Sequence[FieldWrite]) -> None:
        """Notes that fields of samples are written, and what becomes ready by it."""
        for write in writes:
            column = self.fields.setdefault(write.name, Field())
            if not column.samples:
                column.dtype, column.nested = write.dtype, write.nested
                column.shape = write.shape
            column.nested |= write.nested or write.shapes is not None or column.shape != write.shape
            column.dtype = column.dtype or write.dtype
            uniform = isinstance(write.kinds, str) and write.shapes is None
            same = Cell(write.kind(0), write.shape) if uniform else None
            for at, sample in enumerate(samples):
                column.samples += write.name not in sample.cells
                sample.cells[write.name] = same or Cell(write.kind(at), write.shape_of(at))
        for task in self.tasks.values():
            for names, ready in task.ready.items():
                self._admit(samples, task, names, ready)
        self.changes += 1

    @staticmethod
    def _admit(samples: Iterable[Sample], task: Task, names: tuple[str, ...], ready: list[int]) -> None:
        for sample in samples:
            if sample.index in task.taken or not all(name in sample.cells for name in names):
                continue
            if not ready or sample.index > ready[-1]:
                ready.append(sample.index)
            elif ready[bisect_left(ready, sample.index)] != sample.index:
                insort(ready, sample.index)

    def remove(self, samples: Sequence[Sample]) -> None:
        """Forgets samples."""
        gone = [sample.index for sample in samples]
        for task in self.tasks.values():
            task.taken.difference_update(gone)
            for ready in task.ready.values():
                _discard(ready, gone)
        for sample in samples:
            del self.samples[sample.index]
            if sample.key is not None:
                del self.keys[sample.key]
            for name in sample.cells:
                self.fields[name].samples -= 1
        self.changes += 1

    # -- consuming -------------------------------------------------------------------------------------------

    def task(self, name: str) -> Task:
        return self.tasks.setdefault(name, Task())

    def ready(self, task: str, fields: Sequence[str]) -> list[int]:
        """The samples that have all of `fields` and are not consumed, ascending. The list is the partition's
        own.
        """
        owner, names = self.task(task), tuple(sorted(set(fields)))
        if names not in owner.ready:
            owner.ready[names] = []
            self._admit(self.samples.values(), owner, names, owner.ready[names])
        return owner.ready[names]

    def consume(self, task: str, indexes: Sequence[int]) -> list[int]:
        """Marks samples as consumed; returns those that were not."""
        owner = self.task(task)
        new = [at for at in dict.fromkeys(indexes) if at not in owner.taken]
        owner.taken.update(new)
        for ready in owner.ready.values():
            _discard(ready, new)
        return new

    def give_back(self, task: str, indexes: Iterable[int]) -> None:
        """Undoes `consume` for the samples that are still there."""
        owner = self.task(task)
        samples = [self.samples[at] for at in indexes if at in self.samples and at in owner.taken]
        owner.taken.difference_update(sample.index for sample in samples)
        for names, ready in owner.ready.items():
            self._admit(samples, owner, names, ready)
        self.changes += bool(samples)

    def reset(self, task: str | None) -> None:
        """Makes all samples unconsumed, for one task or for all."""
        for name in list(self.tasks) if task is None else [task]:
            self.give_back(name, list(self.task(name).taken))

    # -- describing ------------------------------------------------------------------------------------------

    def announced(self) -> list[int]:
        """The indexes of all samples, those that are announced and not put yet among them."""
        return sorted([*self.samples, *self.reserved])

    def common_fields(self, samples: Sequence[Sample]) -> list[str]:
        """Those that all of the samples have."""
        return [name for name in self.fields if samples and all(name in one.cells for one in samples)]

    def describe(self, samples: Sequence[Sample], names: Iterable[str]) -> list[FieldWrite]:
        """What is known of these fields of the samples; fields that nobody has written are left out."""
        found: list[FieldWrite] = []
        for name in names:
            column = self.fields.get(name)
            cells = [sample.cells.get(name) for sample in samples]
            kinds = [cell.kind if cell else "" for cell in cells]
            shapes = [cell.shape if cell else None for cell in cells]
            if column is None or (samples and not any(kinds)):
                continue
            plain = not any(shape is not None for shape in shapes)
            found.append(
                FieldWrite(
                    name,
                    None if plain else column.dtype,
                    column.nested and not plain,
                    kinds[0] if len(set(kinds)) == 1 else kinds,
                    None if plain or column.nested else shapes[0],
                    None if plain or not column.nested else [shape or () for shape in shapes],
                )
            )
        return found


def _discard(ready: list[int], gone: Sequence[int]) -> None:
    if ready[: len(gone)] == list(gone):
        del ready[: len(gone)]
        return
    for index in gone:
        at = bisect_left(ready, index)
        if at < len(ready) and ready[at] == index:
            del ready[at]
