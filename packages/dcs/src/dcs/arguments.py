"""Checks of what the public classes are given, before anything is opened. Each names it, and the way out."""

import math
import operator
import re
import threading
from collections.abc import Iterable
from typing import Any

from dcs.errors import InvalidArgument
from dcs.layout import Layout
from dcs.manifest import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES

WIRES = ("shm", "tcp")
COLLECTIVES = ("", "nccl", "gloo")
LABEL_LENGTH = 256
_TOKEN_LENGTH = 8192
_SHOWN = 200
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def shown(value: object) -> str:
    """A value in an error, at a length that can be read, and in characters that every terminal takes."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def require_label(value: object, what: str, *, empty: bool = False) -> None:
    """Raise for what is no name, or one that cannot travel."""
    least = 0 if empty else 1
    if not isinstance(value, str) or not least <= len(value) <= LABEL_LENGTH or not _is_text(value):
        raise InvalidArgument(
            f"{what} is {shown(value)}; it has to be a string of {least} to {LABEL_LENGTH} characters"
        )


def require_secret(token: object, what: str) -> None:
    """Raise for a token that is no string; what it was is not shown."""
    if token is None:
        return
    if not isinstance(token, str) or len(token) > _TOKEN_LENGTH or not _is_text(token):
        raise InvalidArgument(
            f"the token of {what} is a {type(token).__name__}; it has to be a string of at most"
            f" {_TOKEN_LENGTH} characters, or None"
        )


def require_whole(value: object, what: str, least: float, most: float = math.inf) -> int:
    """Raise for what is no whole number from `least` to `most`; returns it."""
    number = None if isinstance(value, bool) else _index(value)
    if number is None or not least <= number <= most:
        bounds = "" if least == -math.inf else f" of at least {least}"
        bounds = bounds if most == math.inf else f" from {least} to {most}"
        raise InvalidArgument(f"{what} is {shown(value)}; it has to be a whole number{bounds}")
    return number


def require_seconds(value: object, what: str, *, zero: bool = False, forever: bool = False) -> float:
    """Raise for what is no positive number of seconds; returns it. `forever`: infinite is one too."""
    number = math.nan if isinstance(value, bool | str | bytes) else _real(value)
    fits = number >= 0 if zero else number > 0
    if not fits or (number == math.inf and not forever):
        kind = "a number of seconds, zero or more" if zero else "a positive number of seconds"
        raise InvalidArgument(f"{what} is {shown(value)}; it has to be {kind}")
    return number


def require_timeout(value: object, what: str = "timeout") -> float:
    """Raise for what bounds no wait; returns it, as the standard library takes it. Below zero is now."""
    number = math.nan if isinstance(value, bool | str | bytes) else _real(value)
    if math.isnan(number):
        raise InvalidArgument(f"{what} is {shown(value)}; it has to be a number of seconds")
    return min(max(number, 0.0), threading.TIMEOUT_MAX)


def require_wires(wires: object) -> None:
    """Raise unless these are wires, and at least one."""
    named = list(wires) if isinstance(wires, Iterable) and not isinstance(wires, str | bytes) else []
    if not named or any(wire not in WIRES for wire in named):
        raise InvalidArgument(f"wires is {shown(wires)}; name one or more of {', '.join(WIRES)}, in a list")


def require_collective(collective: object, seconds: object, world_size: int = 1) -> None:
    """Raise for a backend that is none, or that several ranks cannot use."""
    if not isinstance(collective, str) or collective not in COLLECTIVES:
        raise InvalidArgument(
            f"collective is {shown(collective)}; it is nccl, gloo, or empty for no broadcasts"
        )
    if collective and world_size > 1:
        raise InvalidArgument(
            f"collective is {collective!r} with {world_size} ranks; broadcasts are for a single rank: leave"
            " it out, and ranks are read from as the plan says"
        )
    require_seconds(seconds, "collective_seconds")


def require_chunk_bytes(chunk_bytes: object) -> None:
    """Raise for a size of chunks that is not taken."""
    require_whole(chunk_bytes, "chunk_bytes", MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)


def require_port(port: object, what: str) -> int:
    """Raise for what is no port to listen at; returns it."""
    number = None if isinstance(port, bool) else _index(port)
    if number is None or not 0 <= number <= 65535:
        raise InvalidArgument(
            f"{what} would listen at port {shown(port)}; ports are 1 to 65535, and 0 takes a free one"
        )
    return number


def require_host(host: object, what: str) -> None:
    """Raise for what is no name or address of a host."""
    if not isinstance(host, str) or not _is_text(host) or "://" in host or not 1 <= len(host) <= LABEL_LENGTH:
        raise InvalidArgument(
            f"{what} is {shown(host)}; it has to be a host's name or address, such as '127.0.0.1'"
        )


def require_address(address: object, what: str) -> None:
    """Raise for what is no address at all; who connects finds out whether it leads anywhere."""
    if not isinstance(address, str) or not _is_text(address):
        raise InvalidArgument(
            f"{what}'s address is {shown(address)}; it has to be a string such as 'tcp://127.0.0.1:4000'"
        )


def require_addresses(addresses: object, what: str) -> list[str]:
    """Raise for what is no list of addresses, one string above all; returns them."""
    if isinstance(addresses, str | bytes) or not isinstance(addresses, Iterable):
        raise InvalidArgument(
            f"{what} is {shown(addresses)}; it has to be a list of addresses, such as"
            " ['tcp://127.0.0.1:4000']"
        )
    found = list(addresses)
    for address in found:
        require_address(address, f"one of {what}: it")
    return found


def require_layout(layout: object) -> None:
    """Raise for what is no `Layout`."""
    if not isinstance(layout, Layout):
        raise InvalidArgument(f"layout is a {type(layout).__name__}; make one with dcs.layout.of(model)")


def require_device(device: object) -> None:
    """Raise for what names no device that versions can be staged on."""
    if device is not None and (not isinstance(device, str) or _DEVICE.fullmatch(device) is None):
        raise InvalidArgument(
            f"device is {shown(device)}; versions are staged on cuda, cuda:N or cpu, or None for the host"
        )


def require_group(group: object, size: object) -> None:
    """Raise for a size without a group, or a group without a size."""
    require_label(group, "group", empty=True)
    if (require_whole(size, "group_size", 1) > 1 and not group) or (size == 1 and group):
        raise InvalidArgument(
            f"group_size is {size} and group is {group!r}; give the ranks of one engine the same group, and"
            " how many they are"
        )


def require_kind(value: object, kind: type[Any], what: str, way: str) -> None:
    """Raise unless `value` is None or one of `kind`; `way` makes one."""
    if value is not None and not isinstance(value, kind):
        raise InvalidArgument(f"{what} is {_of(value)}; give {way}, or None")


def require_call(value: object, what: str, *, optional: bool = False) -> None:
    """Raise for what cannot be called."""
    if not callable(value) and not (optional and value is None):
        raise InvalidArgument(f"{what} is {shown(value)}; it has to be a function")


def _of(value: object) -> str:
    """A value that may be a secret: its type, and a text only where it is a path or the like."""
    return f"the string {shown(value)}" if isinstance(value, str) else f"a {type(value).__name__}"


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:
        return None


def _real(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: of a tensor of several values
        return math.nan


def _is_text(value: str) -> bool:
    """Whether it can travel: surrogates cannot."""
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
