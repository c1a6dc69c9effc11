"""What `launch` and `process` say to each other over a child's stdin and stdout: one line of JSON each
way.
"""

import msgspec


class Assignment(msgspec.Struct, frozen=True):
    """What a server process is told to be.

    Attributes:
        parent: pid of the process whose end is its own end.
        local: abstract Unix socket of the controller.
        unit: number of the storage unit; None for the controller.
        units: how many of them there are.
        secret: known to the processes of this store alone: how the controller knows a unit from a client.
        incarnation: of this part, the same in all of its lives.
        ucx: storage units are to be reached by UCX too, if it can be used.
        curve: public and secret CURVE key (Z85), or None.
        journal, spill, restore: folders, or None.
        memory: bytes of shared memory before files are used.
    """

    parent: int
    host: str
    port: int
    token: str | None
    max_frame_bytes: int
    local: str
    secret: str
    units: int
    incarnation: int
    unit: int | None = None
    max_bytes: int | None = None
    curve: tuple[str, str] | None = None
    ucx: bool = False
    journal: str | None = None
    fsync: bool = False
    memory: int | None = None
    spill: str | None = None
    restore: str | None = None


class Listening(msgspec.Struct, frozen=True):
    """What a server process says when it is ready, or why it is not."""

    port: int = 0
    error: str = ""
