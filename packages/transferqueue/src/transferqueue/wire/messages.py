"""What travels between client, controller and storage units.

A message is two frames: a msgpack header (`Request` or `Reply`) and, where there is one, a jagged frame of
payload. Only the types below are ever decoded; anything else is refused as malformed. `Request`, `Hello` and
`Reply` keep their first fields in every version of the protocol, so that a peer of another version gets a
refusal it can read.
"""

from typing import Any

import msgspec

from ..samplers import Sampler
from ..values.columns import FieldSpec
from ..values.frame import FrameHeader

PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 30
COPY_BELOW = 65_536  # bytes; below this a copy is cheaper than lending the buffer to the socket


class _Body(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A body is a tagged array: its type's name, then its fields."""


class Hello(_Body, frozen=True):
    """The first message on every connection. `client` names the client across reconnects."""

    protocol: int
    token: str
    client: int


class UnitAddress(msgspec.Struct, frozen=True, array_like=True):
    number: int
    host: str
    port: int


class Welcome(_Body, frozen=True):
    """`incarnation` differs between two lives of a server, so that a client notices a replaced one."""

    protocol: int
    incarnation: int
    units: list[UnitAddress]
    max_frame_bytes: int


class Goodbye(_Body, frozen=True):
    """The client leaves: its leases return now."""


class Cancel(_Body, frozen=True):
    """Gives up an earlier request: if it waits it ends, if it has leased the lease returns."""

    request: int


class OpenPartition(_Body, frozen=True):
    name: str
    tasks: dict[str, list[str]] | None
    max_samples: int | None
    max_bytes: int | None


class Opened(_Body, frozen=True):
    partition: int
    tasks: dict[str, list[str]]


class Reserve(_Body, frozen=True):
    """Asks for ids and room before anything is stored; waits while the limits leave none."""

    partition: int
    rows: int
    nbytes: int
    specs: dict[str, FieldSpec]
    groups: list[str | None] | None
    group_sizes: dict[str, int]


class Reserved(_Body, frozen=True):
    """`rows` consecutive ids from `first` on, all on `unit`."""

    reservation: int
    first: int
    unit: int


class Commit(_Body, frozen=True):
    """The payload of a reservation is stored: its samples may be seen now."""

    reservation: int
    specs: dict[str, FieldSpec]
    groups: list[str | None] | None
    group_sizes: dict[str, int]
    versions: list[int] | int
    priorities: list[int] | int


class Abort(_Body, frozen=True):
    reservation: int


class CheckFields(_Body, frozen=True):
    partition: int
    specs: dict[str, FieldSpec]


class CommitUpdate(_Body, frozen=True):
    partition: int
    ids: list[int]
    specs: dict[str, FieldSpec]
    nbytes: int


class CloseGroup(_Body, frozen=True):
    partition: int
    key: str
    count: int
    tombstones: int


class Fetch(_Body, frozen=True):
    partition: int
    task: str
    count: int
    sampler: Sampler
    max_priority: int | None
    min_version: int | None
    at_least: int | None
    partial: bool
    lease_seconds: float


class Leased(_Body, frozen=True):
    lease: int
    ids: list[int]
    groups: list[str | None]
    versions: list[int]
    priorities: list[int]


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
    acked: list[tuple[int, int]]
    dropped: dict[int, str]
    leased: list[int]
    pending: list[int]


class ReadStats(_Body, frozen=True):
    pass


class Stats(_Body, frozen=True):
    values: dict[str, Any]


class Store(_Body, frozen=True):
    """Payload of samples: new ones, or more fields of those that are there."""

    ids: list[int]
    frame: FrameHeader
    new: bool


class Read(_Body, frozen=True):
    """`fields` None: all that were written for every one of the samples."""

    ids: list[int]
    fields: list[str] | None


class Values(_Body, frozen=True):
    frame: FrameHeader


class Free(_Body, frozen=True):
    ids: list[int]


class Done(_Body, frozen=True):
    pass


class Failure(_Body, frozen=True):
    """An error of `errors.py` by class name."""

    kind: str
    message: str
    details: dict[str, Any]


ControllerRequest = (
    Goodbye | Cancel | OpenPartition | Reserve | Commit | Abort | CheckFields | CommitUpdate | CloseGroup |
    Fetch | Ack | Nack | Extend | Drop | ClosePartition | IsClosed | ReadLedger | ReadStats
)  # fmt: skip
StorageRequest = Goodbye | Cancel | Store | Read | Free | ReadStats
RequestBody = Hello | ControllerRequest | StorageRequest
ReplyBody = (
    Welcome | Opened | Reserved | Leased | Flag | LedgerPage | Stats | Values | Done | Failure
)  # fmt: skip


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One request of a client.

    Attributes:
        id: unique within the client; a repeated id is the same request and has one effect.
        done_below: the client has the answers of all requests with smaller ids.
        timeout: seconds until the client stops waiting.
    """

    id: int
    done_below: int
    timeout: float
    body: RequestBody


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the request of the same id. Id 0 answers `Hello` and what could not be read."""

    id: int
    body: ReplyBody


encoder = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
