"""What members and the coordinator say to each other: msgspec structs in two ZMQ frames, header and body.

State is sent rather than events: a heartbeat carries the member's last acknowledged version, and its answer
carries the run's newest version (or, for a publisher, who has acknowledged what). A message lost in a
reconnect is therefore repaired by the next heartbeat, and a duplicate changes nothing.
"""

import struct
from typing import Annotated, Literal

import msgspec

from dcs.errors import ProtocolError, ProtocolMismatch
from dcs.layout import Layout

PROTOCOL = 1
MAX_MESSAGE_BYTES = 64 << 20
_MAGIC = b"dcs"
_HEADER = struct.Struct("<3sxH")

Text = Annotated[str, msgspec.Meta(max_length=8192)]
Reason = Annotated[str, msgspec.Meta(max_length=512)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Version = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Root = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Endpoint(msgspec.Struct, frozen=True):
    """Where a publisher serves chunks."""

    host: Label
    port: Port


class Acked(msgspec.Struct, frozen=True):
    """A version that a subscriber has committed, and how long its transfer took in seconds."""

    epoch: int
    version: Version
    transfer_seconds: float


class Announcement(msgspec.Struct, frozen=True):
    """A version that can be pulled from `endpoint` now."""

    run: str
    epoch: int
    version: Version
    root: Root
    endpoint: Endpoint


class Standing(msgspec.Struct, frozen=True):
    """A live subscriber, as its publisher sees it."""

    name: str
    acked: Acked | None


# Member to coordinator.


class Join(msgspec.Struct, frozen=True, tag="join"):
    request: int
    role: Literal["publisher", "subscriber"]
    run: Label
    name: Label
    layout: Layout
    token: Text | None
    endpoint: Endpoint | None


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    member: int
    acked: Acked | None


class Announce(msgspec.Struct, frozen=True, tag="announce"):
    request: int
    member: int
    epoch: int
    version: Version
    root: Root


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    member: int
    reason: Reason


# Coordinator to member.


class RunState(msgspec.Struct, frozen=True, tag="state"):
    """To subscribers, when it changes and in answer to a heartbeat."""

    publisher: Literal["absent", "alive", "lost"]
    announcement: Announcement | None


class Roster(msgspec.Struct, frozen=True, tag="roster"):
    """To the publisher, when it changes and in answer to a heartbeat: subscribers by member number."""

    live: dict[int, Standing]
    departed: dict[int, str]


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """`version` is the newest the run ever had (-1: none yet) and `root` its root hash."""

    request: int
    member: int
    epoch: int
    lease_seconds: float
    version: int
    root: bytes
    state: RunState
    roster: Roster


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    request: int
    version: int
    roster: Roster


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


FromMember = Join | Heartbeat | Announce | Leave
FromCoordinator = RunState | Roster | Joined | Announced | Refused | Fenced | Goodbye

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
