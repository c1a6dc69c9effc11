"""What ranks and keepers say to each other: msgspec structs. A rank asks, the keeper answers each request
once.
"""

from typing import Annotated

import msgspec
import xxhash

from dcs.control.messages import Label, Text

PROTOCOL = 2
CHUNK_BYTES = 4 << 20
DIGEST_BYTES = 16
MAX_MESSAGE_BYTES = 64 << 20
MAX_DROPS = 64

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
WorldSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Name = Annotated[str, msgspec.Meta(max_length=256)]  # of a session; "" stands for none
Digests = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]
Ranges = list[tuple[Count, Count]]  # of chunks: first, how many


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """What one rank keeps of one step: what it is called, and what its bytes have to be.

    `digests` are the xxh3-128 of its chunks, end to end; `structure` is how the tree is made of its bytes;
    `root` is the digest of all the rest, so that a shard is either exactly what its rank froze, or found out.
    """

    name: Label
    session: Label
    world_size: WorldSize
    rank: Count
    step: Count
    nbytes: Count
    digests: Digests
    structure: bytes
    root: bytes = b""

    @property
    def chunks(self) -> int:
        """Of how many chunks it is made; all but the last are of `CHUNK_BYTES`."""
        return -(-self.nbytes // CHUNK_BYTES)

    def digest(self, chunk: int) -> bytes:
        """What a chunk's xxh3-128 has to be."""
        return self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]

    def span(self, chunk: int) -> tuple[int, int]:
        """Where a chunk starts and ends."""
        return chunk * CHUNK_BYTES, min(self.nbytes, (chunk + 1) * CHUNK_BYTES)

    def sealed(self) -> "Shard":
        """The same with its root."""
        return msgspec.structs.replace(self, root=self._root())

    @property
    def intact(self) -> bool:
        """Whether the root is right, and the digests are as many as there are chunks."""
        return self.root == self._root() and len(self.digests) == self.chunks * DIGEST_BYTES

    def _root(self) -> bytes:
        bare = msgspec.structs.replace(self, root=b"")
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(bare))

    def __str__(self) -> str:
        return f"step {self.step} of rank {self.rank} of {self.name!r} (session {self.session!r})"


class Place(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A step of an attempt. Attempts are ordered by number, so a later start of a run counts as newer."""

    attempt: Count
    step: Count
    session: Name = ""


class Floor(msgspec.Struct, frozen=True, array_like=True):
    """What may be dropped: every step older than `oldest`, except `anchor`."""

    oldest: Place
    anchor: Place | None = None


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """The ranks whose shards of a step a keeper holds whole."""

    step: Count
    ranks: tuple[Count, ...]


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """What rank 0 of a session has chosen for all of its ranks to restore; None: there is nothing."""

    place: Place | None


class AttemptRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a keeper knows of one attempt of a run."""

    session: Label
    number: Count
    world_size: WorldSize
    steps: tuple[StepRecord, ...]
    choice: Choice | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a connection: who is asking, for error messages, and the secret."""

    who: Label
    token: Text | None


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Open `session`, unless it is "", and answer with an `Inventory` as soon as it differs from
    `generation`.

    A session that the keeper does not know gets `attempt` as its number, or, where that is 0, one that is
    greater than all before it. After `seconds` the answer comes in any case. What came from `rank` itself is
    no news to it: each `Held` told it so.
    """

    name: Label
    session: Name
    attempt: Count
    world_size: WorldSize
    generation: Count
    seconds: Annotated[float, msgspec.Meta(ge=0, le=60)]
    floor: Floor | None = None
    rank: Count = 0


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Let go of one shard. Answered by `Dropped`, after which the keeper will not look at its memory
    again.
    """

    name: Label
    session: Label
    rank: Count
    step: Count


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Take this shard. Answered by `Need`; chunks follow in that order, and are answered by `Need` or
    `Held`.

    A `pushed` one has all of its chunks behind it, wanted or not, and spares that question.
    """

    shard: Shard
    floor: Floor | None = None
    pushed: bool = False


class Hand(msgspec.Struct, frozen=True, tag="hand"):
    """Take this shard from a memfd, which comes with the message. Unix sockets only. Answered by `Held`.

    Without `copy` the keeper maps the memfd, and holds the shard there until it is dropped. With it, the
    shard is copied and verified before the answer, and the memfd let go of. `drops` are shards whose memory
    the rank wants back.
    """

    shard: Shard
    floor: Floor | None = None
    copy: bool = False
    drops: Annotated[tuple[Drop, ...], msgspec.Meta(max_length=MAX_DROPS)] = ()


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Give a shard. Answered by `Found`; the chunks of `ranges` follow, or all of them when it is None."""

    name: Label
    session: Label
    rank: Count
    step: Count
    ranges: Ranges | None = None


class Choose(msgspec.Struct, frozen=True, tag="choose"):
    """Rank 0 of `session` tells its other ranks, by way of the keepers, what to restore. Answered by
    `Done`.
    """

    name: Label
    session: Label
    choice: Choice


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Let go of everything under a name. Answered by `Done`."""

    name: Label


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """What do you hold? Answered by `KeeperStatus`."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The keeper serves this connection.

    `machine` is equal on one machine (and network namespace); `path` is the abstract Unix socket at which
    memory can be handed over there, or ""; `domain` is what fails together with this keeper.
    """

    keeper: Label
    machine: Text
    path: Text
    domain: Text


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request is not served, for a reason."""

    code: Label
    message: str


class Inventory(msgspec.Struct, frozen=True, tag="inventory"):
    """All that a keeper holds under a name; `generation` grows with every change."""

    generation: Count
    attempts: tuple[AttemptRecord, ...]


class Need(msgspec.Struct, frozen=True, tag="need"):
    """The chunks that are wanted."""

    ranges: Ranges


class Held(msgspec.Struct, frozen=True, tag="held"):
    """The shard is held, whole and verified; with what is held now, and which `drops` have been let go of."""

    inventory: Inventory
    dropped: tuple[bool, ...] = ()


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The shard's memory is the rank's again; not so when `free` is false, as somebody still reads it."""

    free: bool


class Found(msgspec.Struct, frozen=True, tag="found"):
    """The shard asked for."""

    shard: Shard


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done."""


class NameStatus(msgspec.Struct, frozen=True):
    """What a keeper holds under one name; `nbytes` of shards."""

    name: str
    nbytes: int
    attempts: tuple[AttemptRecord, ...]


class KeeperStatus(msgspec.Struct, frozen=True, tag="status"):
    """What a keeper holds, and may hold, in bytes; `used_bytes` includes memory kept to be used again."""

    keeper: str
    used_bytes: int
    max_bytes: int
    connections: int
    names: tuple[NameStatus, ...]


Request = Hello | Watch | Offer | Hand | Drop | Fetch | Choose | Forget | Ask
Answer = Welcome | Refused | Inventory | Need | Held | Dropped | Found | Done | KeeperStatus
