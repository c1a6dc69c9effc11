"""What travels between client, controller and storage units.

A message is a msgpack header (`Request` or `Reply`) and, where there is one, a payload. Only the types below
are ever decoded; anything else is refused as malformed. `Request`, `Hello` and `Reply` keep their first
fields in every version of the protocol, so that a peer of another version gets a refusal it can read.
"""

from typing import Any

import msgspec

from ..introspection.statistics import StoreStats
from ..scheduling.samples import Candidate
from ..scheduling.wanted import Wanted
from ..values.frame import FrameHeader
from ..values.spec import FieldSpec

PROTOCOL = 2
MAX_FRAME_BYTES = 1 << 30
MAX_HEADER_BYTES = 1 << 28  # of a message on a local connection; whoever gets a longer one hangs up
MAX_BODY_BYTES = MAX_HEADER_BYTES - (1 << 16)  # of a request or an answer in one
COPY_BELOW = 65_536  # bytes; below this a copy is cheaper than lending the buffer to the socket
# Bytes of payload in one message. A larger payload goes as several: the memory that libzmq receives one into
# is then that of the one before, where a single message would be faulted in page by page.
CHUNK = 1 << 20


class _Body(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A body is a tagged array: its type's name, then its fields."""


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start` to `stop` of an arena, given out under `grant`."""

    grant: int
    arena: int
    start: int
    stop: int


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """Where a block of `rows` rows lies. `block` names it when it is released; `grant` is what its prologue
    must say.
    """

    block: int
    grant: int
    arena: int
    start: int
    stop: int
    rows: int


class Places(msgspec.Struct, frozen=True, array_like=True):
    """Where the values of `rows` samples lie.

    Attributes:
        rows: samples.
        blocks: every block concerned, once.
        runs: ``(position, count, block, row)``: `count` samples from `position` on lie in ``blocks[block]``
            from row `row` on. Oldest writes first: a later run wins for the fields its block has.
    """

    rows: int
    blocks: list[Handle]
    runs: list[tuple[int, int, int, int]]


# -- connections ---------------------------------------------------------------------------------------------


class Hello(_Body, frozen=True):
    """The first message on every connection.

    Attributes:
        client: names the client across reconnects.
        pins: blocks that the client still looks at, once for every reply that named them.
        outstanding: requests that it has no answer to.
    """

    protocol: int
    token: str
    client: int
    pins: list[int] = []
    outstanding: list[int] = []


class UnitAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a storage unit listens for clients of other hosts. `ucx`: its port for UCX, 0 for none."""

    number: int
    host: str
    port: int
    ucx: int = 0


class Welcome(_Body, frozen=True):
    """Answers `Hello`.

    Attributes:
        incarnation: differs between two lives of a server, so that a client notices one that knows nothing
            of it.
        local: the abstract Unix socket on which a client of the same host is served, or "".
    """

    protocol: int
    incarnation: int
    units: list[UnitAddress]
    max_frame_bytes: int
    local: str = ""


class Goodbye(_Body, frozen=True):
    """The client leaves: what it has leased returns now, as does what it has pinned or been granted; on the
    same host, where it may still look at that, when its connection ends.
    """


class Cancel(_Body, frozen=True):
    """Gives up an earlier request: if it waits it ends, if it has leased the lease returns."""

    request: int


class Release(_Body, frozen=True):
    """The client has let go of the last view of these blocks. Not answered, so it bears a number that grows:
    one that comes twice, or behind a later one, is left out.
    """

    number: int
    blocks: list[int]


# -- to the controller ---------------------------------------------------------------------------------------


class OpenPartition(_Body, frozen=True):
    name: str
    tasks: dict[str, list[str]] | None
    max_samples: int | None
    max_bytes: int | None
    length_field: str | None
    max_staleness: int | None


class Opened(_Body, frozen=True):
    partition: int
    tasks: dict[str, list[str]]
    length_field: str | None


class TakeSlab(_Body, frozen=True):
    """Asks for memory to put small blocks into. `remote`: it will be written through a storage unit."""

    remote: bool


class Reserve(_Body, frozen=True):
    """Asks for memory for one large put before it is laid out; waits while the limits leave no room.

    Attributes:
        span: bytes of memory.
        nbytes: bytes that count against the limits.
    """

    partition: int
    rows: int
    span: int
    nbytes: int
    specs: dict[str, FieldSpec]
    groups: list[str | None] | None
    group_sizes: dict[str, int]
    ticket: int | None
    remote: bool


class ReserveUpdate(_Body, frozen=True):
    """Asks for memory for one large update. Limits do not hold it up: it is what lets samples go."""

    span: int
    remote: bool


class Granted(_Body, frozen=True):
    """Memory to write to, through storage unit `unit` if not in place."""

    range: Range
    unit: int


class Return(_Body, frozen=True):
    """What is left of a grant is not needed."""

    grant: int


class Commit(_Body, frozen=True):
    """The block of new samples is laid out (`remote`: on its way to the unit): they may be seen."""

    partition: int
    range: Range
    remote: bool
    rows: int
    nbytes: int
    specs: dict[str, FieldSpec]
    groups: list[str | None] | None
    group_sizes: dict[str, int]
    versions: list[int] | int
    priorities: list[int] | int
    lengths: list[int] | int
    ticket: int | None


class Committed(_Body, frozen=True):
    """The samples have the ids from `first` on."""

    first: int


class CommitUpdate(_Body, frozen=True):
    partition: int
    range: Range
    remote: bool
    ids: list[int]
    nbytes: int
    specs: dict[str, FieldSpec]
    lengths: list[int] | None


class CheckFields(_Body, frozen=True):
    partition: int
    specs: dict[str, FieldSpec]


class CloseGroup(_Body, frozen=True):
    partition: int
    key: str
    count: int
    tombstones: int


class Fetch(_Body, frozen=True):
    """`fields` None: those the task needs."""

    partition: int
    wanted: Wanted
    fields: list[str] | None
    partial: bool
    lease_seconds: float


class Leased(_Body, frozen=True):
    """Samples on loan. `lease` 0: a dummy, which is nobody's to ack. `round` -1: outside rounds."""

    lease: int
    ids: list[int]
    groups: list[str | None]
    versions: list[int]
    priorities: list[int]
    places: Places
    round: int
    is_last: bool
    dummy: bool


class Locate(_Body, frozen=True):
    """`fields` None: whatever is written."""

    partition: int
    ids: list[int]
    fields: list[str] | None


class Located(_Body, frozen=True):
    places: Places


class ListCandidates(_Body, frozen=True):
    """Asks for the first `limit` samples that a fetch could have; waits until there are as many as wanted."""

    partition: int
    wanted: Wanted
    limit: int


class Candidates(_Body, frozen=True):
    """Ready samples in the order they would be served."""

    samples: list[Candidate]


class FetchChosen(_Body, frozen=True):
    """Leases exactly these samples, or none of them: then the answer is a `Flag`, and others have them."""

    partition: int
    task: str
    ids: list[int]
    fields: list[str] | None
    lease_seconds: float


class Ack(_Body, frozen=True):
    partition: int
    lease: int


class Nack(_Body, frozen=True):
    partition: int
    lease: int


class Extend(_Body, frozen=True):
    partition: int
    lease: int
    seconds: float


class Drop(_Body, frozen=True):
    partition: int
    ids: list[int]
    reason: str


class Advance(_Body, frozen=True):
    """The policy is at `version` now."""

    partition: int
    version: int


class Admit(_Body, frozen=True):
    """Asks to start `samples` samples of policy `version`; waits while that is too much or too old."""

    partition: int
    version: int
    samples: int
    seconds: float


class Admitted(_Body, frozen=True):
    ticket: int


class ClosePartition(_Body, frozen=True):
    partition: int


class IsClosed(_Body, frozen=True):
    partition: int


class Flag(_Body, frozen=True):
    value: bool


class ReadLedger(_Body, frozen=True):
    partition: int
    task: str


class LedgerPage(_Body, frozen=True):
    """The account of a task. Ids are half-open ``(start, stop)``; `dropped` has each reason once."""

    acked: list[tuple[int, int]]
    dropped: list[tuple[str, list[tuple[int, int]]]]
    leased: list[tuple[int, int]]
    pending: list[tuple[int, int]]


class Snapshot(_Body, frozen=True):
    """Copy all that is stored now to a folder of the controller's host."""

    folder: str


class Restore(_Body, frozen=True):
    """Fill the store, which must be empty, with a snapshot."""

    folder: str


class ReadStats(_Body, frozen=True):
    pass


class Stats(_Body, frozen=True):
    values: StoreStats


# -- to a storage unit ---------------------------------------------------------------------------------------


class Write(_Body, frozen=True):
    """Puts the payload, the bytes from `at` on of a block laid out elsewhere, into its range. All messages of
    one block are one request; the one that completes it is answered.
    """

    range: Range
    at: int


class Read(_Body, frozen=True):
    """`fields` None: all that every one of the samples has."""

    places: Places
    fields: list[str] | None


class Values(_Body, frozen=True):
    """A frame of `nbytes` bytes: the payload of this message, or of the `Chunk` messages behind it."""

    frame: FrameHeader
    nbytes: int


class Chunk(_Body, frozen=True):
    """The bytes from `at` on of the payload of an answer."""

    at: int


# -- between controller and storage unit ---------------------------------------------------------------------


class Announce(_Body, frozen=True):
    """A storage unit is ready. `secret` is what only the processes of this store were told."""

    number: int
    address: UnitAddress
    secret: str


class Written(_Body, frozen=True):
    """A client of another host has filled a range."""

    range: Range


class Report(_Body, frozen=True):
    """An order is done, or failed with an error in words. `moved`: payload bytes that the unit has sent to
    and received from other hosts.
    """

    order: int
    error: str
    values: dict[str, Any]
    moved: tuple[int, int]


class Attach(_Body, frozen=True):
    """An arena to serve; its descriptor travels beside."""

    arena: int
    nbytes: int


class Expect(_Body, frozen=True):
    """Accept writes inside this range."""

    range: Range


class Forget(_Body, frozen=True):
    """Accept no more writes under this grant; the range will belong to another."""

    grant: int


class Compact(_Body, frozen=True):
    """Copy some rows of a block into a new block."""

    source: Range
    rows: list[int]
    target: Range


class Punch(_Body, frozen=True):
    """Give the pages of a range back to the system."""

    arena: int
    start: int
    stop: int


class Save(_Body, frozen=True):
    """Copy ranges into a file, one behind the other from byte `at` on, and report the XXH3 of each."""

    file: str
    at: int
    ranges: list[Range]


class Load(_Body, frozen=True):
    """Copy bytes of a file, from `at` on, into ranges; each must have its XXH3."""

    file: str
    at: int
    ranges: list[Range]
    sums: list[int]


class Order(_Body, frozen=True):
    """What the controller wants of a unit."""

    number: int
    what: Attach | Expect | Forget | Compact | Punch | Save | Load


class Done(_Body, frozen=True):
    pass


class Failure(_Body, frozen=True):
    """An error of `errors.py` by class name."""

    kind: str
    message: str
    details: dict[str, Any]


ControllerRequest = (
    OpenPartition | TakeSlab | Reserve | ReserveUpdate | Return | Commit | CommitUpdate | CheckFields |
    CloseGroup | Fetch | Locate | ListCandidates | FetchChosen | Ack | Nack | Extend | Drop | Advance |
    Admit | ClosePartition | IsClosed | ReadLedger | ReadStats | Snapshot | Restore | Announce | Written |
    Report
)  # fmt: skip
StorageRequest = Write | Read | ReadStats
RequestBody = Hello | Goodbye | Cancel | Release | ControllerRequest | StorageRequest
ReplyBody = (
    Welcome | Opened | Granted | Committed | Leased | Located | Candidates | Admitted | Flag | LedgerPage |
    Stats | Values | Chunk | Done | Failure | Order
)  # fmt: skip


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One request of a client.

    Attributes:
        id: unique within the client; a repeated id is the same request and has one effect. 0: not answered,
            or answered by id 0.
        done_below: the client has the answers of all requests with smaller ids.
        timeout: seconds until the client stops waiting.
        done: ids from `done_below` on that the client has the answers of, told once.
    """

    id: int
    done_below: int
    timeout: float
    body: RequestBody
    done: list[int] = []


class ArenaHere(msgspec.Struct, frozen=True, array_like=True):
    """A descriptor beside this message is that of an arena."""

    arena: int
    nbytes: int


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the request of the same id. Id 0 answers `Hello` and what could not be read.

    Attributes:
        arenas: one for each descriptor that travels beside, in order.
    """

    id: int
    body: ReplyBody
    arenas: list[ArenaHere] = []


encoder = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
