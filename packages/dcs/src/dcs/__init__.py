"""dcs: a new version of a model in every engine that serves it, verified and whole.

A `Publisher` freezes and offers versions, `Subscriber`s pull them into staging slots and hand them over, a
`Coordinator` issues versions and keeps leases. Names are loaded when first used, so a coordinator needs no
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcs.errors import (
    ApplyFailed,
    Closed,
    CoordinatorLost,
    CorruptChunk,
    DcsError,
    Evicted,
    InvalidArgument,
    LayoutMismatch,
    NoMemory,
    ProtocolError,
    ProtocolMismatch,
    PublisherLost,
    StaleVersion,
    Timeout,
    Unacknowledged,
    Unauthorized,
)

if TYPE_CHECKING:
    from dcs import appliers, delta, layout, replicas
    from dcs.control.coordinator import Coordinator
    from dcs.control.curve import CoordinatorKeys, MemberKeys
    from dcs.control.process import CoordinatorProcess, serve
    from dcs.follower import Follower
    from dcs.layout import Layout, Piece
    from dcs.manifest import Manifest
    from dcs.publisher import Publisher
    from dcs.staged import Health, Staged
    from dcs.subscriber import Subscriber
    from dcs.ticket import Stats, Ticket
    from dcs.wire.tls import Tls

__all__ = [
    "ApplyFailed",
    "Closed",
    "Coordinator",
    "CoordinatorKeys",
    "CoordinatorLost",
    "CoordinatorProcess",
    "CorruptChunk",
    "DcsError",
    "Evicted",
    "Follower",
    "Health",
    "InvalidArgument",
    "Layout",
    "LayoutMismatch",
    "Manifest",
    "MemberKeys",
    "NoMemory",
    "Piece",
    "ProtocolError",
    "ProtocolMismatch",
    "Publisher",
    "PublisherLost",
    "Staged",
    "StaleVersion",
    "Stats",
    "Subscriber",
    "Ticket",
    "Timeout",
    "Tls",
    "Unacknowledged",
    "Unauthorized",
    "appliers",
    "delta",
    "layout",
    "replicas",
    "serve",
]

_MODULES = ("appliers", "delta", "layout", "replicas")
_HOME = {
    "Coordinator": "dcs.control.coordinator",
    "CoordinatorProcess": "dcs.control.process",
    "Follower": "dcs.follower",
    "Health": "dcs.staged",
    "CoordinatorKeys": "dcs.control.curve",
    "Layout": "dcs.layout",
    "Manifest": "dcs.manifest",
    "MemberKeys": "dcs.control.curve",
    "Piece": "dcs.layout",
    "Publisher": "dcs.publisher",
    "Staged": "dcs.staged",
    "Stats": "dcs.ticket",
    "Subscriber": "dcs.subscriber",
    "Ticket": "dcs.ticket",
    "Tls": "dcs.wire.tls",
    "serve": "dcs.control.process",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"dcs.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dcs' has no attribute {name!r}")
