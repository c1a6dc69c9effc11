"""The partitions of a store, their limits, and how much of those is promised to puts under way."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgument, SchemaMismatch, TooLarge, UnknownName
from ..ids import MAX_PARTITIONS
from ..scheduling.partition import Partition
from ..wire.messages import OpenPartition


@dataclass(slots=True, eq=False)
class Shelf:
    """A partition with its limits.

    Attributes:
        body: how it was opened first.
        serial: of the next sample put.
        reserved_rows, reserved_bytes: promised to puts that have not committed.
        due: when it will be looked at because a lease or a ticket lapses, or None.
        counted: what it adds to `Shelves.nbytes`, when that was last found out.
    """

    number: int
    body: OpenPartition
    partition: Partition
    serial: int = 0
    reserved_rows: int = 0
    reserved_bytes: int = 0
    due: float | None = None
    counted: int = 0

    @property
    def max_bytes(self) -> int | None:
        return self.body.max_bytes

    @property
    def max_samples(self) -> int | None:
        return self.partition.max_samples

    def fits(self, rows: int, nbytes: int, ticket: int | None) -> bool:
        held = self.partition.nbytes + self.reserved_bytes + nbytes
        return self.partition.fits(rows + self.reserved_rows, ticket) and (
            self.max_bytes is None or held <= self.max_bytes
        )


class Shelves:
    """All partitions, by name and by number.

    Args:
        max_bytes: payload bytes in the whole store, or None.

    Attributes:
        opened: told of every new partition, if set.
        touched: those in which something may have changed: the others need not be looked at, however many
            there are.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.opened: Callable[[Shelf], None] | None = None
        self._by_name: dict[str, Shelf] = {}
        self._by_number: list[Shelf] = []
        self.touched: set[Shelf] = set()
        self._nbytes = 0

    def __iter__(self) -> Iterator[Shelf]:
        return iter(self._by_number)

    def __getitem__(self, number: int) -> Shelf:
        if not 0 <= number < len(self._by_number):
            raise UnknownName(f"no partition has number {number}; open it by name", partition=number)
        shelf = self._by_number[number]
        self.touched.add(shelf)
        return shelf

    def touch_all(self) -> None:
        """Something may have changed anywhere."""
        self.touched.update(self._by_number)

    def take_touched(self) -> set[Shelf]:
        """Those in which something may have changed since the last call."""
        self._count()
        touched, self.touched = self.touched, set()
        return touched

    def _count(self) -> int:
        for shelf in self.touched:
            held = shelf.partition.nbytes + shelf.reserved_bytes
            self._nbytes += held - shelf.counted
            shelf.counted = held
        return self._nbytes

    @property
    def nbytes(self) -> int:
        """Payload bytes held or promised."""
        return self._count()

    def fits(self, shelf: Shelf, rows: int, nbytes: int, ticket: int | None) -> bool:
        """Whether a put fits the limits of its partition and of the store."""
        return shelf.fits(rows, nbytes, ticket) and (
            self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes
        )

    def check_size(self, shelf: Shelf, rows: int, nbytes: int) -> None:
        """Raises TooLarge for a put that can never fit."""
        for what, asked, limit in (
            ("samples", rows, shelf.max_samples),
            ("bytes", nbytes, shelf.max_bytes),
            ("bytes", nbytes, self.max_bytes),
        ):
            if limit is not None and asked > limit:
                raise TooLarge(
                    f"a put of {asked} {what} can never fit a limit of {limit}; put fewer samples at once",
                    nbytes=asked,
                    limit=limit,
                )

    def open(self, body: OpenPartition) -> Shelf:
        """The partition of that name, made if there is none.

        Raises:
            UnknownName: there is none, and no tasks are given.
            SchemaMismatch: there is one that differs.
        """
        shelf = self._by_name.get(body.name) or self._make(body)
        partition = shelf.partition
        tasks = {task.name: list(task.fields) for task in partition.tasks.values()}
        for what, got, has in (
            ("tasks", body.tasks, tasks),
            ("max_samples", body.max_samples, shelf.max_samples),
            ("max_bytes", body.max_bytes, shelf.max_bytes),
            ("length_field", body.length_field, partition.length_field),
            ("max_staleness", body.max_staleness, partition.max_staleness),
        ):
            if got is not None and _unordered(got) != _unordered(has):
                raise SchemaMismatch(
                    f"partition {body.name!r} exists with {what} {has}, asked for with {got}",
                    field=what,
                    got=got,
                    expected=has,
                )
        return shelf

    def _make(self, body: OpenPartition) -> Shelf:
        if body.tasks is None:
            raise UnknownName(
                f"there is no partition {body.name!r}; pass tasks={{name: fields}} to create it",
                partition=body.name,
            )
        if len(self._by_number) == MAX_PARTITIONS:
            raise InvalidArgument(f"a store has at most {MAX_PARTITIONS} partitions")
        for limit in (body.max_samples, body.max_bytes):
            if limit is not None and limit < 1:
                raise InvalidArgument(
                    f"a limit of {limit} for partition {body.name!r}; give a positive one or None"
                )
        if body.max_staleness is not None and body.max_staleness < 0:
            raise InvalidArgument(
                f"max_staleness is {body.max_staleness} for partition {body.name!r}; 0 admits the newest only"
            )
        partition = Partition(
            body.name,
            body.tasks,
            length_field=body.length_field,
            max_samples=body.max_samples,
            max_staleness=body.max_staleness,
        )
        shelf = self.add(body, partition)
        if self.opened is not None:
            self.opened(shelf)
        return shelf

    def add(self, body: OpenPartition, partition: Partition) -> Shelf:
        """Takes in a partition that is there."""
        shelf = Shelf(len(self._by_number), body, partition)
        self._by_number.append(shelf)
        self.touched.add(shelf)
        self._by_name[body.name] = shelf
        return shelf


def _unordered(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {task: sorted(fields) for task, fields in value.items()}
    return value
