"""`BatchMeta`: which samples a batch has, what is known of their fields, and the user's tags."""

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from .errors import InvalidRequest
from .messages import FieldWrite, Places
from .packing import unpack
from .rows import encode

Schema = dict[str, dict[str, Any]]


class BatchMeta:
    """Metadata of a batch, column by column. Plain data: it may be pickled, and sent to any process.

    Attributes:
        global_indexes: one a sample; never given to another sample, also when this one is cleared.
        partition_ids: one a sample.
        field_schema: field -> ``dtype``, ``shape`` of a sample, ``is_nested``, ``is_non_tensor``, and
            ``per_sample_shapes`` where shapes differ.
        production_status: int8 ``[samples]``, 1 where all fields are written.
        extra_info: what a user wants to carry along with the batch.
        custom_meta: one dict of tags a sample.
    """

    def __init__(
        self,
        global_indexes: Sequence[int],
        partition_ids: Sequence[str],
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: np.ndarray | Sequence[int] | None = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema: Schema = {name: dict(known) for name, known in (field_schema or {}).items()}
        size = len(self.global_indexes)
        status = np.zeros(size, np.int8) if production_status is None else production_status
        self.production_status = np.array(status, np.int8)
        self.extra_info: dict[str, Any] = dict(extra_info or {})
        self.custom_meta: list[dict[str, Any]] = [dict(one) for one in custom_meta or [{}] * size]
        counts = {
            "partition_ids": len(self.partition_ids),
            "production_status": len(self.production_status),
            "custom_meta": len(self.custom_meta),
        } | {
            f"per_sample_shapes of field {name!r}": len(known["per_sample_shapes"])
            for name, known in self.field_schema.items()
            if known.get("per_sample_shapes") is not None
        }
        for name, count in counts.items():
            if count != size:
                raise InvalidRequest(f"{name} has {count} entries for {size} samples")

    # -- what is in it ---------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """Sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether there are samples, and all fields of all of them are written."""
        return self.size > 0 and bool((self.production_status == 1).all())

    @property
    def samples(self) -> Sequence["SampleView"]:
        """Read-only views of the samples."""
        return [SampleView(self, at) for at in range(self.size)]

    def get_dtypes(self, field_name: str) -> list[Any]:
        """The field's dtype, once a sample. KeyError if there is no such field."""
        return [self._field(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """The field's shape in each sample. KeyError if there is no such field."""
        known = self._field(field_name)
        each = known.get("per_sample_shapes")
        return [known.get("shape")] * self.size if each is None else list(each)

    def _field(self, name: str) -> dict[str, Any]:
        if name not in self.field_schema:
            raise KeyError(f"there is no field {name!r}; the batch has {self.field_names}")
        return self.field_schema[name]

    # -- extra_info and custom_meta --------------------------------------------------------------------------

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Takes a key out; returns its value or None."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    def get_all_extra_info(self) -> dict[str, Any]:
        """A copy."""
        return copy.deepcopy(self.extra_info)

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A copy."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]] | None) -> None:
        """Merges one dict of tags a sample. Other processes see them after `set_custom_meta` or a put."""
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise InvalidRequest(f"custom_meta has {len(custom_meta)} entries for {self.size} samples")
        for mine, new in zip(self.custom_meta, custom_meta, strict=True):
            mine.update(new)

    def clear_custom_meta(self) -> None:
        self.custom_meta = [{} for _ in range(self.size)]

    # -- other batches from it -------------------------------------------------------------------------------

    def add_fields(self, tensor_dict: Any, set_all_ready: bool = True) -> Self:
        """Notes the fields of a TensorDict with one row a sample, in place."""
        return self._add(encode(tensor_dict).writes, len_of(tensor_dict), set_all_ready)

    def _add(self, writes: Iterable[FieldWrite], rows: int, set_all_ready: bool = True) -> Self:
        if rows != self.size:
            raise InvalidRequest(f"fields of {rows} rows cannot be added to {self.size} samples")
        for write in writes:
            self.field_schema[write.name] = described(write)
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def select_samples(self, sample_indices: Sequence[int]) -> "BatchMeta":
        """A batch of the samples at these positions, in this order."""
        if any(not 0 <= at < self.size for at in sample_indices):
            raise InvalidRequest(f"positions {list(sample_indices)} are not all in [0, {self.size})")
        return BatchMeta(
            [self.global_indexes[at] for at in sample_indices],
            [self.partition_ids[at] for at in sample_indices],
            {name: _chosen(known, sample_indices) for name, known in self.field_schema.items()},
            self.production_status[list(sample_indices)],
            self.extra_info,
            [copy.deepcopy(self.custom_meta[at]) for at in sample_indices],
        )

    def select_fields(self, field_names: Sequence[str]) -> "BatchMeta":
        """A batch of the same samples with these fields alone; those it does not have are left out."""
        chosen = self.copy()
        chosen.field_schema = {
            name: chosen.field_schema[name] for name in field_names if name in chosen.field_schema
        }
        return chosen

    def copy(self) -> "BatchMeta":
        """A deep copy."""
        return copy.deepcopy(self)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, item: int | slice) -> "BatchMeta":
        if isinstance(item, slice):
            return self.select_samples(range(*item.indices(self.size)))
        if not isinstance(item, int | np.integer):
            raise TypeError(f"a batch is indexed by int or slice, not {type(item).__name__}")
        at = int(item) + (self.size if item < 0 else 0)
        if not 0 <= at < self.size:
            raise IndexError(f"position {item} of a batch of {self.size}")
        return self.select_samples([at])

    def chunk(self, chunks: int) -> list["BatchMeta"]:
        """`chunks` batches of consecutive samples; the first ones have one more where it does not divide."""
        return [self.select_samples(part) for part in parts(self.size, chunks)]

    def chunk_by_partition(self) -> list["BatchMeta"]:
        """One batch for each partition, in order of their first samples."""
        places: dict[str, list[int]] = {}
        for at, name in enumerate(self.partition_ids):
            places.setdefault(name, []).append(at)
        return [self.select_samples(part) for part in places.values()]

    def union(self, other: "BatchMeta | None") -> "BatchMeta":
        """The fields of both, for the same samples in the same order; `other`'s count where both have one.

        Raises:
            InvalidRequest: the samples differ.
        """
        if not other:
            return self.copy()
        if not self:
            return other.copy()
        mine, theirs = (
            list(zip(one.global_indexes, one.partition_ids, strict=True)) for one in (self, other)
        )
        if mine != theirs:
            raise InvalidRequest(
                f"a union needs the same samples in the same order; got {self.global_indexes} of "
                f"{self.partition_ids} and {other.global_indexes} of {other.partition_ids}"
            )
        both = self.copy()
        both.field_schema |= copy.deepcopy(other.field_schema)
        both.production_status &= other.production_status
        both.extra_info |= copy.deepcopy(other.extra_info)
        both.update_custom_meta(copy.deepcopy(other.custom_meta))
        return both

    @classmethod
    def concat(cls, data: Sequence["BatchMeta"], validate: bool = True) -> "BatchMeta":
        """One batch of all samples, in order; empty batches add nothing.

        Raises:
            InvalidRequest: the batches differ in their fields or dtypes (unless not `validate`), or in the
                value of an ``extra_info``.
        """
        batches = [batch for batch in data if batch]
        if not batches:
            return cls.empty()
        first = batches[0]
        for at, batch in enumerate(batches if validate else ()):
            if batch.field_names != first.field_names:
                raise InvalidRequest(
                    f"batch {at} has fields {batch.field_names}, batch 0 {first.field_names}"
                )
            for name in first.field_names:
                dtypes = batch.field_schema[name].get("dtype"), first.field_schema[name].get("dtype")
                if dtypes[0] != dtypes[1]:
                    raise InvalidRequest(
                        f"field {name!r} is {dtypes[0]} in batch {at}, {dtypes[1]} in batch 0"
                    )
        return cls(
            [index for batch in batches for index in batch.global_indexes],
            [name for batch in batches for name in batch.partition_ids],
            {name: _joined(name, batches) for name in first.field_schema},
            np.concatenate([batch.production_status for batch in batches]),
            merged_info([batch.extra_info for batch in batches]),
            [copy.deepcopy(one) for batch in batches for one in batch.custom_meta],
        )

    def reorder(self, indices: Sequence[int]) -> None:
        """Puts the samples into another order, in place: `indices` is a permutation of the positions."""
        if sorted(indices) != list(range(self.size)):
            raise InvalidRequest(f"{list(indices)} is no permutation of {self.size} positions")
        self.__dict__.update(self.select_samples(indices).__dict__)

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> "BatchMeta":
        """A batch of no samples."""
        return cls([], [], extra_info=extra_info)

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    __repr__ = __str__


class SampleView:
    """One sample of a batch, read-only."""

    def __init__(self, batch: BatchMeta, at: int) -> None:
        self._batch, self._at = batch, at

    @property
    def global_index(self) -> int:
        return self._batch.global_indexes[self._at]

    @property
    def partition_id(self) -> str:
        return self._batch.partition_ids[self._at]

    @property
    def production_status(self) -> int:
        return int(self._batch.production_status[self._at])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        return MappingProxyType(self._batch.custom_meta[self._at])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """Field -> what is known of it; ``shape`` is this sample's own."""
        return MappingProxyType(
            {
                name: MappingProxyType(
                    {key: value for key, value in known.items() if key != "per_sample_shapes"}
                    | {"shape": self._batch.get_shapes(name)[self._at]}
                )
                for name, known in self._batch.field_schema.items()
            }
        )


def len_of(fields: Any) -> int:
    """Rows of a TensorDict, or of a mapping of columns."""
    batch_size = getattr(fields, "batch_size", None)
    if batch_size is not None and len(batch_size):
        return int(batch_size[0])
    return max((len(value) for value in fields.values()), default=0)


def parts(size: int, chunks: int) -> Iterator[range]:
    """`chunks` consecutive ranges of `size` positions, the longer ones first."""
    if chunks < 1:
        raise InvalidRequest(f"chunks must be positive, got {chunks}")
    for at in range(chunks):
        start = at * (size // chunks) + min(at, size % chunks)
        yield range(start, start + size // chunks + (at < size % chunks))


def merged_info(infos: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """All entries; InvalidRequest where two differ in one."""
    merged: dict[str, Any] = {}
    for info in infos:
        for key, value in (info or {}).items():
            if key in merged and not _equal(merged[key], value):
                raise InvalidRequest(
                    f"extra_info {key!r} is {merged[key]!r} and {value!r}; it cannot be joined"
                )
            merged[key] = value
    return merged


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) or hasattr(one, "numpy"):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


def _chosen(known: dict[str, Any], at: Sequence[int]) -> dict[str, Any]:
    each = known.get("per_sample_shapes")
    return dict(known) if each is None else known | {"per_sample_shapes": [each[one] for one in at]}


def _joined(name: str, batches: Sequence[BatchMeta]) -> dict[str, Any]:
    known = [batch.field_schema.get(name, {}) for batch in batches]
    shapes = [shape for batch in batches if name in batch.field_schema for shape in batch.get_shapes(name)]
    nested = any(one.get("is_nested") for one in known)
    joined = {
        "dtype": known[0].get("dtype"),
        "shape": None if nested else known[0].get("shape"),
        "is_nested": nested,
        "is_non_tensor": known[0].get("is_non_tensor", False),
    }
    if nested or any(one.get("per_sample_shapes") for one in known):
        joined["per_sample_shapes"] = shapes
    return joined


# -- from and to what the catalog knows ----------------------------------------------------------------------


def described(write: FieldWrite) -> dict[str, Any]:
    """A field as a batch's ``field_schema`` has it. A scalar a sample counts as shape ``(1,)``."""
    torch = sys.modules.get("torch")
    dtype = getattr(torch, write.dtype, write.dtype) if torch is not None and write.dtype else write.dtype
    shape = write.shapes[0] if write.shapes else write.shape
    if shape is not None:
        shape = (shape or (1,)) if torch is None else torch.Size(shape or (1,))
    known = {"dtype": dtype, "shape": shape, "is_nested": write.nested, "is_non_tensor": write.is_plain}
    return known if write.shapes is None else known | {"per_sample_shapes": write.shapes}


def batch_of(places: Places) -> BatchMeta:
    """The batch that an answer of the catalog means."""
    return BatchMeta(
        places.indexes,
        [places.partition] * len(places.indexes),
        {write.name: described(write) for write in places.fields},
        np.frombuffer(places.ready, np.int8) if places.ready else None,
        {},
        unpack(places.metas),
    )
