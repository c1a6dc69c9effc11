"""Sizes in bytes, as people write them."""

import re

from .errors import InvalidArgument

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_bytes(size: int | str) -> int:
    """A number of bytes from an int or text such as "8GiB", "500 MB", "1024"."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", str(size).lower())
    if match is None or match[2] not in _UNITS or int(float(match[1]) * _UNITS[match[2]]) < 1:
        raise InvalidArgument(f'{size!r} is no size; give a positive number of bytes, or text such as "8GiB"')
    return int(float(match[1]) * _UNITS[match[2]])
