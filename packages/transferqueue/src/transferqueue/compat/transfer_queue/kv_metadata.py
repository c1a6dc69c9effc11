"""`KVBatchMeta`: which keys a batch has, and their tags."""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .batch_metadata import merged_info, parts
from .errors import InvalidRequest, RequestFailed


@dataclass
class KVBatchMeta:
    """Keys of one partition with a dict of tags each. Plain data: it may be pickled, and sent to any process.

    Attributes:
        keys: each once.
        tags: one dict a key; copied.
        partition_id: where they are.
        fields: what the samples have, or None if that is not known.
        extra_info: what a user wants to carry along; copied.
    """

    keys: list[str] = dataclasses.field(default_factory=list)
    tags: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise InvalidRequest(
                f"keys and tags must have the same length, got {len(self.keys)} and {len(self.tags)}"
            )
        for name, values in (("keys", self.keys), ("fields", self.fields or [])):
            if len(set(values)) != len(values):
                raise InvalidRequest(f"{name} names something twice: {list(values)}")
        self.tags = copy.deepcopy(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _at(self, places: Sequence[int]) -> "KVBatchMeta":
        return dataclasses.replace(
            self, keys=[self.keys[at] for at in places], tags=[self.tags[at] for at in places]
        )

    def select_keys(self, keys_to_select: list[str]) -> "KVBatchMeta":
        """A batch of these keys, in this order.

        Raises:
            InvalidRequest: a key is named twice.
            RequestFailed: the batch does not have a key.
        """
        places = {key: at for at, key in enumerate(self.keys)}
        missing = [key for key in keys_to_select if key not in places]
        if missing:
            raise RequestFailed(f"keys {missing} are not found in this batch of {self.size}")
        return self._at([places[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Puts the keys into another order, in place: `indexes` is a permutation of the positions."""
        if sorted(indexes) != list(range(self.size)):
            raise InvalidRequest(f"{list(indexes)} is no permutation of {self.size} positions")
        ordered = self._at(indexes)
        self.keys, self.tags = ordered.keys, ordered.tags

    def chunk(self, chunks: int) -> list["KVBatchMeta"]:
        """`chunks` batches of consecutive keys; the first ones have one more where it does not divide."""
        return [self._at(part) for part in parts(self.size, chunks)]

    @classmethod
    def concat(cls, data: Sequence["KVBatchMeta"]) -> "KVBatchMeta":
        """One batch of all keys, in order; empty batches add nothing.

        Raises:
            InvalidRequest: the batches differ in partition, fields, or the value of an ``extra_info``.
        """
        batches = [batch for batch in data if batch]
        if not batches:
            return cls()
        first = batches[0]
        for batch in batches:
            if batch.fields is not None and set(batch.fields) != set(first.fields or ()):
                raise InvalidRequest(
                    f"batches have fields {batch.fields} and {first.fields}; they cannot be joined"
                )
            if batch.partition_id != first.partition_id:
                raise InvalidRequest(
                    f"batches are of partitions {batch.partition_id!r} and {first.partition_id!r}; they "
                    "cannot be joined"
                )
        return cls(
            keys=[key for batch in batches for key in batch.keys],
            tags=[tag for batch in batches for tag in batch.tags],
            partition_id=first.partition_id,
            fields=first.fields,
            extra_info=merged_info(batch.extra_info for batch in batches) or None,
        )
