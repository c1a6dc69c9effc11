"""Checks of what publishers and subscribers are given, before anything is opened."""

import re
from collections.abc import Sequence

from dcs.errors import DcsError
from dcs.layout import Layout
from dcs.manifest import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES

WIRES = ("shm", "tcp")
COLLECTIVES = ("", "nccl", "gloo")
_LABEL_LENGTH = 256
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def require_label(value: str, what: str) -> None:
    """Raise `DcsError` for a name that is empty or too long."""
    if not isinstance(value, str) or not 1 <= len(value) <= _LABEL_LENGTH:
        raise DcsError(f"{what} is {value!r}; it has to be a string of 1 to {_LABEL_LENGTH} characters")


def require_wires(wires: Sequence[str]) -> None:
    """Raise `DcsError` unless these are wires, and at least one."""
    unknown = sorted(set(wires) - set(WIRES))
    if isinstance(wires, str) or unknown or not wires:
        raise DcsError(f"wires is {wires!r}; name one or more of {', '.join(WIRES)}, in a list")


def require_collective(collective: str, seconds: float, world_size: int = 1) -> None:
    """Raise `DcsError` for a backend that is none, or that several ranks cannot use."""
    if collective not in COLLECTIVES:
        raise DcsError(f"collective is {collective!r}; it is nccl, gloo, or empty for no broadcasts")
    if collective and world_size > 1:
        raise DcsError(
            f"collective is {collective!r} with {world_size} ranks; broadcasts are for a single rank: leave"
            " it out, and ranks are read from as the plan says"
        )
    if seconds <= 0:
        raise DcsError(f"collective_seconds is {seconds}; a broadcast needs some time")


def require_chunk_bytes(chunk_bytes: int) -> None:
    """Raise `DcsError` for a size of chunks that is not taken."""
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise DcsError(f"chunk_bytes is {chunk_bytes}; it must be {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}")


def require_port(port: int, what: str) -> None:
    """Raise `DcsError` for what is no port to listen at."""
    if not 0 <= port <= 65535:
        raise DcsError(f"{what} would listen at port {port}; ports are 1 to 65535, and 0 takes a free one")


def require_layout(layout: object) -> None:
    """Raise `DcsError` for what is no `Layout`."""
    if not isinstance(layout, Layout):
        raise DcsError(f"layout is a {type(layout).__name__}; make one with dcs.layout.of(model)")


def require_device(device: str | None) -> None:
    """Raise `DcsError` for what names no device that versions can be staged on."""
    if device is not None and _DEVICE.fullmatch(device) is None:
        raise DcsError(
            f"device is {device!r}; versions are staged on cuda, cuda:N or cpu, or None for the host"
        )


def require_group(group: str, size: int) -> None:
    """Raise `DcsError` for a size without a group, or a group without a size."""
    if size < 1 or (size > 1) != bool(group):
        raise DcsError(
            f"group_size is {size} and group is {group!r}; give the ranks of one engine the same group, and"
            " how many they are"
        )
