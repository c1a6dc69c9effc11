"""What `launch` and `process` say to each other over a child's stdin and stdout: one line of JSON each
way.
"""

import msgspec

from ..wire.messages import UnitAddress


class Assignment(msgspec.Struct, frozen=True):
    """What a server process is told to be. `unit` is None for the controller."""

    parent: int
    host: str
    port: int
    token: str | None
    max_frame_bytes: int
    unit: int | None = None
    units: list[UnitAddress] = msgspec.field(default_factory=list)
    max_bytes: int | None = None


class Listening(msgspec.Struct, frozen=True):
    """What a server process says when it is ready, or why it is not."""

    port: int = 0
    error: str = ""
