"""What members and the coordinator say to each other: msgspec structs in two ZMQ frames, header and body.

State is sent rather than events: a heartbeat carries the member's last acknowledged version, and its answer
carries the run's newest version and its sources (or, for a publisher, who has acknowledged what). A message
lost in a reconnect is therefore repaired by the next heartbeat, and a duplicate changes nothing.
"""

import struct
from typing import Annotated, Literal

import msgspec

from dcs.errors import ProtocolError, ProtocolMismatch
from dcs.layout import Layout

PROTOCOL = 2
MAX_MESSAGE_BYTES = 64 << 20
_MAGIC = b"dcs"
_HEADER = struct.Struct("<3sxH")

Text = Annotated[str, msgspec.Meta(max_length=8192)]
Reason = Annotated[str, msgspec.Meta(max_length=512)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
HIGHEST_VERSION = (1 << 61) - 1
Version = Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_VERSION)]
Root = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Endpoint(msgspec.Struct, frozen=True):
    """Where a member serves chunks.

    `machine` is equal for members of one machine and network namespace, and `path` is the Unix socket there,
    at which it also lets its memory be mapped ("" when it does not).
    """

    host: Label
    port: Port
    machine: Annotated[str, msgspec.Meta(max_length=256)] = ""
    path: Annotated[str, msgspec.Meta(max_length=107)] = ""


class Acked(msgspec.Struct, frozen=True):
    """A version that a subscriber has committed; seconds that its transfer and its commit took."""

    epoch: int
    version: Version
    transfer_seconds: float
    pause_seconds: float = 0.0


class Receipt(msgspec.Struct, frozen=True):
    """The newest version that a subscriber has whole, and how it came: bytes received from training ranks and
    from peers, and the wire (`shm`, `tcp`, `collective`; `+delta`).
    """

    epoch: int
    version: Version
    wire: Annotated[str, msgspec.Meta(max_length=64)] = ""
    from_ranks: int = 0
    from_peers: int = 0


class Known(msgspec.Struct, frozen=True):
    """What a member that joins again knows, for a coordinator that does not (it may have been restarted)."""

    epoch: int
    version: int


class Store(msgspec.Struct, frozen=True):
    """Where the publisher's rank keeps a `torch.distributed.TCPStore` for collective groups."""

    host: Label
    port: Port


class Announcement(msgspec.Struct, frozen=True):
    """A version that all ranks of the epoch have announced; `roots` by rank."""

    run: str
    epoch: int
    version: Version
    roots: tuple[Root, ...]


class Source(msgspec.Struct, frozen=True):
    """A member to pull from. `rank` is -1 for a subscriber; `holds`: it has the whole version already."""

    member: int
    rank: int
    name: str
    layout: str
    endpoint: Endpoint
    holds: bool


class Gathering(msgspec.Struct, frozen=True):
    """A collective group that this member is to join for the announced version.

    Groups of one `key` are one group, used again for later versions; a new key makes a new one.
    """

    key: str
    backend: Literal["nccl", "gloo"]
    store: Store
    rank: int
    size: int


class Standing(msgspec.Struct, frozen=True):
    """A live subscriber, as its publisher sees it."""

    name: str
    acked: Acked | None


# Member to coordinator.


class Join(msgspec.Struct, frozen=True, tag="join"):
    """`session` names a gang of publisher ranks. Subscribers that give the same `group` commit together;
    `maps` is the machine whose memory a subscriber can map ("" when it maps none).
    """

    request: int
    role: Literal["publisher", "subscriber"]
    run: Label
    name: Label
    layout: Layout
    token: Text | None
    endpoint: Endpoint | None
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)] = 0
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1
    session: Annotated[str, msgspec.Meta(max_length=256)] = ""
    group: Annotated[str, msgspec.Meta(max_length=256)] = ""
    group_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    site: Annotated[str, msgspec.Meta(max_length=256)] = ""
    collective: Literal["", "nccl", "gloo"] = ""
    store: Store | None = None
    known: Known | None = None
    maps: Annotated[str, msgspec.Meta(max_length=256)] = ""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """`slow`: members that this one pulls from and that hardly progress; from a publisher, members that broke
    its collective group. `lost`: the last version that no rank held any more when this one asked for it.
    """

    member: int
    acked: Acked | None = None
    staged: Receipt | None = None
    slow: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()
    lost: Annotated[int, msgspec.Meta(ge=-1)] = -1


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    """One rank has frozen a version."""

    request: int
    member: int
    epoch: int
    version: Version
    root: Root
    nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    freeze_seconds: float = 0.0


class WantLayouts(msgspec.Struct, frozen=True, tag="want_layouts"):
    """Ask for the layouts of sources, by fingerprint."""

    request: int
    member: int
    fingerprints: Annotated[tuple[Label, ...], msgspec.Meta(max_length=4096)]


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    member: int
    reason: Reason


# Coordinator to member.


class RunState(msgspec.Struct, frozen=True, tag="state"):
    """To subscribers, when it changes and in answer to a heartbeat.

    Attributes:
        publisher: of the run. `lost` when a rank's lease has lapsed.
        announcement: the newest complete version.
        sources: whom this subscriber may pull it from, best first; training ranks last, all of them.
        commit: the newest version that everybody in this subscriber's group has whole; -1 before the first.
        gathering: the collective group that this subscriber takes part in, if any.
        behind: the ranks that have not announced the newest version that any has; the first few of them, and
            as of the last message that was due anyway.
    """

    publisher: Literal["absent", "alive", "lost"]
    announcement: Announcement | None
    sources: tuple[Source, ...] = ()
    commit: int = -1
    gathering: Gathering | None = None
    behind: tuple[int, ...] = ()


class Roster(msgspec.Struct, frozen=True, tag="roster"):
    """To publisher ranks, when it changes and in answer to a heartbeat: subscribers by member number.

    `announced` is by rank the newest version that each has announced in this epoch, -1 before the first: as
    of the last message that was due anyway.
    """

    live: dict[int, Standing]
    departed: dict[int, str]
    gathering: Gathering | None = None
    announced: tuple[int, ...] = ()


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """To publisher ranks: all of them have announced this version; these subscribers are told.

    The newest one of the epoch is repeated, with the roster as it is then, whenever a `Roster` is due.
    """

    epoch: int
    version: int
    roster: Roster


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """`version` is the newest that the run ever had complete (-1: none) and `root` that rank's root of it
    (empty when it is not known, as after a restart of the coordinator).
    """

    request: int
    member: int
    epoch: int
    lease_seconds: float
    version: int
    root: bytes
    state: RunState
    roster: Roster


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    """This rank's part is known. `Complete` follows when all ranks' are."""

    request: int
    version: int


class Layouts(msgspec.Struct, frozen=True, tag="layouts"):
    """Those that are known of the ones asked for."""

    request: int
    layouts: dict[str, Layout]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    request: int
    code: str
    message: str
    detail: dict[str, str]


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """The member is none any more. `rejoin`: it may join again under the same name."""

    member: int
    code: str
    message: str
    detail: dict[str, str]
    rejoin: bool


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The coordinator is closing."""


FromMember = Join | Heartbeat | Announce | WantLayouts | Leave
FromCoordinator = RunState | Roster | Complete | Joined | Announced | Layouts | Refused | Fenced | Goodbye

_from_member = msgspec.msgpack.Decoder(FromMember)
_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator)
_encoder = msgspec.msgpack.Encoder()


def encode(message: FromMember | FromCoordinator) -> list[bytes]:
    """The two frames of a message."""
    return [_HEADER.pack(_MAGIC, PROTOCOL), _encoder.encode(message)]


def decode_from_member(frames: list[bytes]) -> FromMember:
    """Raises `ProtocolError` or `ProtocolMismatch`; never anything else, whatever the bytes."""
    body = _body(frames, "a member", "this coordinator")
    try:
        return _from_member.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"a member sent a message of {len(body)} bytes that cannot be read: {error}"
        ) from error


def decode_from_coordinator(frames: list[bytes]) -> FromCoordinator:
    """Raises `ProtocolError` or `ProtocolMismatch`; never anything else, whatever the bytes."""
    body = _body(frames, "the coordinator", "this member")
    try:
        return _from_coordinator.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the coordinator sent {len(body)} bytes that cannot be read: {error}") from error


def _body(frames: list[bytes], sender: str, receiver: str) -> bytes:
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise ProtocolError(
            f"{sender} sent {len(frames)} frames that are no dcs message; is the address right?"
        )
    magic, protocol = _HEADER.unpack(frames[0])
    if magic != _MAGIC:
        raise ProtocolError(
            f"{sender} sent {frames[0]!r} where a dcs header was expected; is the address right?"
        )
    if protocol != PROTOCOL:
        raise ProtocolMismatch(
            f"{sender} speaks dcs protocol {protocol}, {receiver} speaks {PROTOCOL}; install the same"
            " relax-dcs on both"
        )
    return frames[1]
