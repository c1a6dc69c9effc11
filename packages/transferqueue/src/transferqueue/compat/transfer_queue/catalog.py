"""The catalog: all metadata of all partitions, and who consumes what. The state behind `service`.

Global indexes count up and are never given out again, so metadata of a cleared sample names nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .errors import InvalidRequest, KeysNotFound, RequestFailed, StorageKeyNotFoundError
from .messages import FieldWrite, Places, Status, each
from .packing import pack, unpack
from .partitions import Cell, Field, Partition, Sample
from .sampler import BaseSampler, may_borrow


@dataclass(eq=False)
class Session:
    """One client, over all of its connections. `open`: what it has taken and may not be through with, by
    ticket: partition, task and indexes.
    """

    open: dict[int, tuple[str, str, list[int]]] = field(default_factory=dict)
    tickets: int = 0
    connections: int = 0
    left: bool = False


class Catalog:
    """Metadata of a store.

    Args:
        sampler: chooses what a `take` gets.
        announced: samples that a new partition counts before they are put (``TQ_PRE_ALLOC_SAMPLE_NUM``).
    """

    def __init__(self, sampler: BaseSampler, announced: int) -> None:
        self.sampler = sampler
        self.partitions: dict[str, Partition] = {}
        self._samples: dict[int, Sample] = {}
        self._next = 0
        self._announced = announced

    # -- producing -------------------------------------------------------------------------------------------

    def _partition(self, name: str) -> Partition:
        """The partition; made if it is not there."""
        if name not in self.partitions:
            self.partitions[name] = Partition(name, self._new_indexes(self._announced))
        return self.partitions[name]

    def _new_indexes(self, count: int) -> list[int]:
        first = self._next
        self._next += count
        return list(range(first, self._next))

    def _make(self, partition: Partition, count: int, keys: Sequence[str | None]) -> list[Sample]:
        indexes = partition.reserved[:count]
        del partition.reserved[:count]
        indexes += self._new_indexes(count - len(indexes))
        samples = [partition.add(index, key) for index, key in zip(indexes, keys, strict=True)]
        self._samples.update(zip(indexes, samples, strict=True))
        return samples

    def allocate(self, name: str, count: int, fields: list[str]) -> Places:
        """Makes samples without payload."""
        if count < 1:
            raise InvalidRequest(f"batch_size must be positive, got {count}")
        partition = self._partition(name)
        samples = self._make(partition, count, [None] * count)
        empty = [FieldWrite(field_name, None, False, "", None) for field_name in fields]
        return self._places(partition, samples, empty, bytes(count))

    def insert(self, name: str, rows: list[int], fields: list[FieldWrite]) -> Places:
        """Makes samples whose payload is stored."""
        partition = self._partition(name)
        partition.check(fields)
        samples = self._make(partition, len(rows), [None] * len(rows))
        for sample, row in zip(samples, rows, strict=True):
            sample.row = row
        partition.write(samples, fields)
        return self._places(partition, samples, fields, b"\1" * len(rows))

    def commit(
        self,
        indexes: list[int],
        partitions: str | list[str],
        rows: list[int],
        fields: list[FieldWrite],
        metas: bytes | None,
    ) -> list[int]:
        """Notes payload of samples that exist. Returns their rows in the store: where another client has
        given a sample its row meanwhile, that one and not the one proposed, and nothing is changed.
        """
        samples = self.known(indexes, partitions)
        owners = _by_partition(samples)
        for owner in owners:
            owner.check(fields)
        if any(sample.row not in (0, row) for sample, row in zip(samples, rows, strict=True)):
            return [sample.row or row for sample, row in zip(samples, rows, strict=True)]
        for sample, row in zip(samples, rows, strict=True):
            sample.row = row
        for owner, places in owners.items():
            owner.write([samples[at] for at in places], [_part(write, places) for write in fields])
        if metas is not None:
            self._merge(samples, metas)
        return rows

    def rows_of(self, name: str, keys: list[str]) -> list[int]:
        """Where the samples of keys lie; 0 for those that have no payload or are not there."""
        partition = self.partitions.get(name, Partition(name, []))
        found = [partition.keys.get(key) for key in keys]
        return [0 if index is None else partition.samples[index].row for index in found]

    def commit_keys(
        self,
        name: str,
        keys: list[str],
        known: list[int],
        rows: list[int],
        fields: list[FieldWrite],
        metas: bytes | None,
    ) -> Places:
        """Notes payload and tags of keys, and makes those that are missing. See `messages.CommitKeys`.

        Where another client has given a sample its row meanwhile, nothing is changed: the answer has no
        indexes, and the rows as they are.
        """
        there = self.rows_of(name, keys)
        gone = [key for key, old, now in zip(keys, known, there, strict=True) if old and old != now]
        if gone:
            raise StorageKeyNotFoundError(
                f"keys {gone[:8]} of partition {name!r} were cleared while they were written; put them again"
            )
        if any(now and row and now != row for now, row in zip(there, rows, strict=True)):
            return Places(name, [], there, [], b"", pack([]))
        if name in self.partitions:
            self.partitions[name].check(fields)
        partition = self._partition(name)
        missing = [key for key in keys if key not in partition.keys]
        self._make(partition, len(missing), missing)
        samples = [partition.samples[partition.keys[key]] for key in keys]
        for sample, row in zip(samples, rows, strict=True):
            sample.row = sample.row or row
        if fields:
            partition.write(samples, fields)
        if metas is not None:
            self._merge(samples, metas)
        return self._described(partition, samples, partition.common_fields(samples))

    def set_meta(self, indexes: list[int], partitions: str | list[str], metas: bytes) -> None:
        """Merges tags into those of samples."""
        self._merge(self.known(indexes, partitions), metas)

    @staticmethod
    def _merge(samples: list[Sample], metas: bytes) -> None:
        for sample, meta in zip(samples, unpack(metas), strict=True):
            sample.meta.update(meta)

    def known(self, indexes: list[int], partitions: str | list[str]) -> list[Sample]:
        """The samples; StorageKeyNotFoundError if some are cleared or were never there."""
        found = self._existing(indexes, partitions)
        if len(found) < len(indexes):
            there = {sample.index for sample in found}
            gone = [index for index in indexes if index not in there]
            raise StorageKeyNotFoundError(
                f"{len(gone)} of {len(indexes)} samples were cleared or never put (global indexes "
                f"{gone[:8]}); the metadata is stale, get it anew"
            )
        return found

    def _existing(self, indexes: list[int], partitions: str | list[str]) -> list[Sample]:
        found = [(self._samples.get(index), each(partitions, at)) for at, index in enumerate(indexes)]
        return [one for one, name in found if one is not None and one.partition.partition_id == name]

    # -- looking up ------------------------------------------------------------------------------------------

    def retrieve(
        self, name: str, keys: list[str], create: bool, strict: bool, fields: list[str] | None
    ) -> Places:
        """The samples of keys; see `messages.Retrieve`."""
        partition = self._partition(name) if create else self.partitions.get(name)
        if partition is None:
            partition = Partition(name, [])  # an empty stand-in, which is not kept
        missing = [key for key in dict.fromkeys(keys) if key not in partition.keys]
        if create and missing:
            self._make(partition, len(missing), missing)
        elif strict and missing:
            raise KeysNotFound(
                f"partition {name!r} has no samples under {len(missing)} of {len(keys)} keys: {missing[:8]}; "
                "keys or partition were not found"
            )
        samples = [partition.samples[partition.keys[key]] for key in keys if key in partition.keys]
        names = partition.common_fields(samples) if fields is None else fields
        return self._described(partition, samples, names)

    def locate(self, indexes: list[int], partitions: str | list[str], fields: list[str] | None) -> Places:
        """Where samples lie. Fields that a sample does not have are described with an empty kind."""
        samples = self.known(indexes, partitions)
        owner = samples[0].partition if samples else Partition("", [])
        if fields is None:
            return self._places(owner, samples, [], b"")
        cells = {name: [sample.cells.get(name, Cell("", None)) for sample in samples] for name in fields}
        writes = [
            FieldWrite(name, None, False, [cell.kind for cell in row], None) for name, row in cells.items()
        ]
        return self._places(owner, samples, writes, b"")

    def scan(self, name: str, fields: list[str] | None) -> Places:
        """All samples of a partition."""
        partition = self.partitions.get(name, Partition(name, []))
        samples = list(partition.samples.values())
        return self._described(partition, samples, list(partition.fields) if fields is None else fields)

    def _described(self, partition: Partition, samples: list[Sample], names: list[str]) -> Places:
        ready = bytes(bool(names) and all(name in sample.cells for name in names) for sample in samples)
        return self._places(partition, samples, partition.describe(samples, names), ready)

    @staticmethod
    def _places(
        partition: Partition, samples: list[Sample], fields: list[FieldWrite], ready: bytes
    ) -> Places:
        return Places(
            partition.partition_id,
            [sample.index for sample in samples],
            [sample.row for sample in samples],
            fields,
            ready,
            pack([sample.meta for sample in samples]),
        )

    def keys_of(self, name: str, indexes: list[int]) -> list[str]:
        """The keys of samples; KeysNotFound if one has none."""
        keys = [sample.key for sample in self.known(indexes, name)]
        if None in keys:
            raise KeysNotFound(
                f"sample {indexes[keys.index(None)]} of partition {name!r} was put without a key"
            )
        return [key for key in keys if key is not None]

    def list_keys(self, name: str | None) -> dict[str, dict[str, dict[str, Any]]]:
        """Partition -> key -> tags."""
        names = list(self.partitions) if name is None else [name] if name in self.partitions else []
        return {
            one: {key: partition.samples[at].meta for key, at in partition.keys.items()}
            for one, partition in ((one, self.partitions[one]) for one in names)
        }

    # -- consuming -------------------------------------------------------------------------------------------

    def take(
        self,
        session: Session,
        name: str,
        fields: list[str],
        task: str,
        count: int,
        config: dict[str, Any],
        done: Sequence[int] = (),
    ) -> Places | None:
        """The sampler's choice, consumed by the task; None while there is not enough. See `messages.Take`.

        Raises:
            RequestFailed: the sampler raised, or chose what is not there.
        """
        if count < 1:
            raise InvalidRequest(f"batch_size must be positive, got {count}")
        for ticket in done:
            session.open.pop(ticket, None)
        partition = self.partitions.get(name)
        if partition is None:
            return None
        cached = self.sampler.has_cached_result(name, task, config)
        ready = partition.ready(task, fields)
        if len(ready) < count and not cached:
            return None
        chosen, consumed = self._choose(partition, ready, count, config)
        if not chosen:
            return None
        samples = self.known([int(index) for index in chosen], name)
        new = partition.consume(task, [int(index) for index in consumed])
        partition.changes += 1  # a worker may have waited for its turn
        ticket = 0
        if new and not self.sampler.has_cached_result(name, task, config):
            # What is kept for a rank belongs to the rank: whoever takes its place asks for it by batch_index.
            session.tickets += 1
            ticket = session.tickets
            session.open[ticket] = name, task, new
        places = self._places(partition, samples, partition.describe(samples, fields), b"\1" * len(samples))
        return msgspec.structs.replace(places, ticket=ticket)

    def _choose(
        self, partition: Partition, ready: list[int], count: int, config: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        lent = ready if may_borrow(self.sampler) else list(ready)
        try:
            chosen, consumed = self.sampler(lent, count, partition=partition, **config)
        except Exception as error:  # a user's code; whatever it raises is for the one who asked
            raise RequestFailed(
                f"sampler {type(self.sampler).__name__} raised {type(error).__name__}: {error}"
            ) from error
        return chosen, consumed

    def ack(self, session: Session, name: str, task: str, indexes: list[int]) -> None:
        """Settles what a session has taken."""
        done = set(indexes)
        for ticket, (partition, owner, held) in list(session.open.items()):
            if (partition, owner) == (name, task):
                held[:] = [at for at in held if at not in done]
                if not held:
                    del session.open[ticket]

    def give_up(self, session: Session, ticket: int) -> str | None:
        """Gives back what was taken by one choice. Returns the partition."""
        name, task, indexes = session.open.pop(ticket, (None, "", []))
        if name in self.partitions:
            self.partitions[name].give_back(task, indexes)
        return name

    def leave(self, session: Session) -> set[str]:
        """Gives back what a dead session had open. Returns the partitions concerned."""
        return {name for ticket in list(session.open) if (name := self.give_up(session, ticket)) is not None}

    def consumption(self, name: str, task: str) -> Status:
        """1 for each announced sample that the task has consumed."""
        if name not in self.partitions:
            return Status(None, b"")
        partition = self.partitions[name]
        indexes, taken = partition.announced(), partition.task(task).taken
        return Status(indexes, bytes(at in taken for at in indexes))

    def production(self, name: str, fields: list[str]) -> Status:
        """1 for each announced sample and field that is written, sample by sample."""
        partition = self.partitions.get(name)
        if partition is None or not fields or any(one not in partition.fields for one in fields):
            return Status(None, b"")
        indexes = partition.announced()
        cells = [partition.samples[at].cells if at in partition.samples else {} for at in indexes]
        return Status(indexes, bytes(one in cell for cell in cells for one in fields))

    def drained(self, name: str, task: str, config: dict[str, Any]) -> bool:
        """Whether all announced samples are consumed, and none are kept for this rank's next batch."""
        status = self.consumption(name, task)
        done = bool(status.indexes) and all(status.states)
        return done and not self.sampler.has_cached_result(name, task, config)

    def in_turn(self, name: str, task: str, config: dict[str, Any]) -> bool:
        """Whether a rank's batch may be taken without leaving out the one before."""
        index = config["batch_index"]
        before = config | {"batch_index": index - 1}
        return not self.sampler.by_rank or not index or self.sampler.has_cached_result(name, task, before)

    # -- clearing --------------------------------------------------------------------------------------------

    def clear(self, indexes: list[int], partitions: str | list[str]) -> list[int]:
        """Forgets samples; returns the rows of the store that are free now."""
        wanted = {index: each(partitions, at) for at, index in enumerate(indexes)}
        samples = self._existing(list(wanted), list(wanted.values()))
        for owner, places in _by_partition(samples).items():
            owner.remove([samples[at] for at in places])
        for sample in samples:
            del self._samples[sample.index]
        return [sample.row for sample in samples if sample.row]

    def clear_partition(self, name: str) -> list[int]:
        """Forgets a partition; returns the rows of the store that are free now."""
        partition = self.partitions.pop(name, None)
        self.sampler.clear_cache(name)
        if partition is None:
            return []
        for index in partition.samples:
            del self._samples[index]
        partition.changes += 1
        return [sample.row for sample in partition.samples.values() if sample.row]

    # -- checkpoints -----------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """Everything but the payload, packed."""
        return pack(
            {
                "next": self._next,
                "sampler": _pairs(self.sampler.save_checkpoint()),
                "partitions": [_dumped(partition) for partition in self.partitions.values()],
            }
        )

    def load(self, state: bytes, rows: dict[int, int]) -> list[int]:
        """Takes up a dumped state, whose sample `index` now lies in ``rows[index]``. Returns the rows that
        were in use before. Indexes go on from the larger count, so that none is used twice.
        """
        old = [row for name in list(self.partitions) for row in self.clear_partition(name)]
        said = unpack(state)
        self._next = max(self._next, said["next"])
        self.sampler.load_checkpoint(_unpaired(said["sampler"]))
        for dumped in said["partitions"]:
            partition = _loaded(dumped, rows)
            self.partitions[partition.partition_id] = partition
            self._samples.update(partition.samples)
        return old


def _by_partition(samples: Sequence[Sample]) -> dict[Partition, list[int]]:
    """Positions of the samples, by their partition."""
    owners: dict[Partition, list[int]] = {}
    for at, sample in enumerate(samples):
        owners.setdefault(sample.partition, []).append(at)
    return owners


def _part(write: FieldWrite, places: list[int]) -> FieldWrite:
    kinds = [write.kinds[at] for at in places] if isinstance(write.kinds, list) else write.kinds
    shapes = None if write.shapes is None else [write.shapes[at] for at in places]
    return msgspec.structs.replace(write, kinds=kinds, shapes=shapes)


def _dumped(partition: Partition) -> dict[str, Any]:
    return {
        "name": partition.partition_id,
        "made": partition.made,
        "reserved": partition.reserved,
        "fields": [[name, one.dtype, one.nested, one.shape] for name, one in partition.fields.items()],
        "samples": [
            [
                one.index,
                one.ordinal,
                one.key,
                one.row,
                [[name, *cell] for name, cell in one.cells.items()],
                one.meta,
            ]
            for one in partition.samples.values()
        ],
        "tasks": [[name, sorted(task.taken)] for name, task in partition.tasks.items()],
    }


def _loaded(said: dict[str, Any], rows: dict[int, int]) -> Partition:
    partition = Partition(said["name"], said["reserved"])
    counts: Counter[str] = Counter()
    for index, ordinal, key, _, cells, meta in said["samples"]:
        sample = partition.add(index, key)
        sample.ordinal, sample.row, sample.meta = ordinal, rows.get(index, 0), meta
        sample.cells = {
            name: Cell(kind, None if shape is None else tuple(shape)) for name, kind, shape in cells
        }
        counts.update(list(sample.cells))
    partition.made = said["made"]
    for name, dtype, nested, shape in said["fields"]:
        partition.fields[name] = Field(dtype, nested, None if shape is None else tuple(shape), counts[name])
    for name, taken in said["tasks"]:
        partition.task(name).taken.update(taken)
    return partition


def _pairs(value: Any) -> Any:
    """Dicts as lists of pairs, so that keys of any plain kind survive."""
    if isinstance(value, dict):
        return {"pairs": [[_pairs(key), _pairs(one)] for key, one in value.items()]}
    return [_pairs(one) for one in value] if isinstance(value, list | tuple) else value


def _unpaired(value: Any) -> Any:
    if isinstance(value, dict):
        return {_key(_unpaired(key)): _unpaired(one) for key, one in value["pairs"]}
    return [_unpaired(one) for one in value] if isinstance(value, list) else value


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
