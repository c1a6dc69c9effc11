"""What clients and the catalog say to each other. Metadata only: payload goes through the store."""

from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 256 << 20
Shape = tuple[int, ...]


class FieldWrite(msgspec.Struct, frozen=True, array_like=True):
    """One field of some samples, as it was written or is to be read.

    Attributes:
        dtype: by name; None for what is no tensor.
        nested: whether the rows were a nested tensor, or differ in shape.
        kinds: how the store holds it, of all rows or of each: "int64[]", "int64[*,3]", "object".
        shape: of a row, where it is the same for all; None for what is no tensor.
        shapes: of each row, where they may differ.
    """

    name: str
    dtype: str | None
    nested: bool
    kinds: str | list[str]
    shape: Shape | None
    shapes: list[Shape] | None = None

    def kind(self, row: int) -> str:
        return self.kinds if isinstance(self.kinds, str) else self.kinds[row]

    def shape_of(self, row: int) -> Shape | None:
        return self.shape if self.shapes is None else self.shapes[row]

    @property
    def is_plain(self) -> bool:
        """No tensor."""
        return self.shape is None and self.shapes is None


class Request(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of what a client asks."""


class Hello(Request, frozen=True, array_like=True, tag=True):
    """The first request on a connection. All connections of one client share a session."""

    session: str
    token: str | None


class Goodbye(Request, frozen=True, array_like=True, tag=True):
    """The session ends in order: what it has taken stays consumed."""


class Retrieve(Request, frozen=True, array_like=True, tag=True):
    """The samples of keys. `create` makes those that are missing; otherwise they are left out, or, if
    `strict`, an error. `fields` None: those that all of the samples have.
    """

    partition: str
    keys: list[str]
    create: bool = False
    strict: bool = False
    fields: list[str] | None = None


class Allocate(Request, frozen=True, array_like=True, tag=True):
    """`count` new samples without payload."""

    partition: str
    count: int
    fields: list[str]


class Insert(Request, frozen=True, array_like=True, tag=True):
    """New samples whose payload lies in these rows of the store."""

    partition: str
    rows: list[int]
    fields: list[FieldWrite]


class Commit(Request, frozen=True, array_like=True, tag=True):
    """Payload of samples was written to these rows. `metas`: packed list of tags to merge, or None."""

    indexes: list[int]
    partitions: str | list[str]
    rows: list[int]
    fields: list[FieldWrite]
    metas: bytes | None


class RowsOf(Request, frozen=True, array_like=True, tag=True):
    """Where the samples of keys lie in the store; 0 for those that have no payload or are not there."""

    partition: str
    keys: list[str]


class CommitKeys(Request, frozen=True, array_like=True, tag=True):
    """Payload of keys was written, over what lay in `known` rows (0: none known) and now lies in `rows` (0:
    tags alone). Samples that are missing are made, so that no key is there before its payload.
    """

    partition: str
    keys: list[str]
    known: list[int]
    rows: list[int]
    fields: list[FieldWrite]
    metas: bytes | None


class Locate(Request, frozen=True, array_like=True, tag=True):
    """Where samples lie; `fields` None for a write, where a row may be missing (0)."""

    indexes: list[int]
    partitions: str | list[str]
    fields: list[str] | None


class Take(Request, frozen=True, array_like=True, tag=True):
    """The sampler's choice of `count` ready samples for a task, which consumes them; none if there are not
    enough in `patience` seconds. `done`: tickets of earlier choices that the session is through with.
    """

    partition: str
    fields: list[str]
    task: str
    count: int
    config: bytes
    patience: float
    done: list[int]


class Scan(Request, frozen=True, array_like=True, tag=True):
    """All samples of a partition, ready or not; `fields` None: every field there is."""

    partition: str
    fields: list[str] | None


class Ack(Request, frozen=True, array_like=True, tag=True):
    """The session is done with samples: they no longer return if it dies."""

    partition: str
    task: str
    indexes: list[int]


class SetMeta(Request, frozen=True, array_like=True, tag=True):
    indexes: list[int]
    partitions: str | list[str]
    metas: bytes


class Clear(Request, frozen=True, array_like=True, tag=True):
    """Forgets samples; those that are gone already are left out."""

    indexes: list[int]
    partitions: str | list[str]


class ClearPartition(Request, frozen=True, array_like=True, tag=True):
    partition: str


class Consumption(Request, frozen=True, array_like=True, tag=True):
    partition: str
    task: str


class Production(Request, frozen=True, array_like=True, tag=True):
    partition: str
    fields: list[str]


class Reset(Request, frozen=True, array_like=True, tag=True):
    partition: str
    task: str | None


class Names(Request, frozen=True, array_like=True, tag=True):
    """Of all partitions."""


class KeysOf(Request, frozen=True, array_like=True, tag=True):
    partition: str
    indexes: list[int]


class ListKeys(Request, frozen=True, array_like=True, tag=True):
    partition: str | None


class News(Request, frozen=True, array_like=True, tag=True):
    """How often a partition has changed; waits up to `patience` seconds for another number than `seen`."""

    partition: str
    seen: int
    patience: float


class Drained(Request, frozen=True, array_like=True, tag=True):
    """Whether a task has consumed all of a partition, and no batch is kept for this rank and index."""

    partition: str
    task: str
    config: bytes


class InTurn(Request, frozen=True, array_like=True, tag=True):
    """Whether the batch before this rank's and index's was taken, or the sampler does not go by rank."""

    partition: str
    task: str
    config: bytes


class Dump(Request, frozen=True, array_like=True, tag=True):
    """The catalog's whole state, packed, for a checkpoint."""


class Load(Request, frozen=True, array_like=True, tag=True):
    """Replaces the state by a dumped one, whose samples now lie in `rows`."""

    state: bytes
    rows: dict[int, int]


class Places(msgspec.Struct, frozen=True, array_like=True):
    """Samples, where they lie and what they have.

    Attributes:
        rows: of the store, 0 for a sample without payload.
        ready: 1 for a sample that has all fields asked for.
        metas: packed list of tags.
        ticket: of what was taken; 0 where there is nothing to be through with.
    """

    partition: str
    indexes: list[int]
    rows: list[int]
    fields: list[FieldWrite]
    ready: bytes
    metas: bytes
    ticket: int = 0


class Status(msgspec.Struct, frozen=True, array_like=True):
    """One byte for each sample (and field); None if the partition or a field does not exist."""

    indexes: list[int] | None
    states: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """An error in place of the answer: the name of its class, and its message."""

    kind: str
    message: str


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """What a client needs to know: the store's address and token, and the configuration, packed."""

    store: str
    token: str | None
    config: bytes


AnyRequest = (
    Hello | Goodbye | Retrieve | Allocate | Insert | Commit | RowsOf | CommitKeys | Locate | Take | Scan | Ack
    | SetMeta | Clear | ClearPartition | Consumption | Production | Reset | Names | KeysOf | ListKeys | News
    | Drained | InTurn | Dump | Load
)  # fmt: skip


def each(value: Any, row: int) -> Any:
    """Item `row` of a list, or the one value that stands for all rows."""
    return value[row] if isinstance(value, list) else value
