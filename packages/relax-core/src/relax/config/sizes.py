"""Sizes of memory as a configuration gives them: bytes, text such as `8GiB`, or a share of what is there."""

import os
import re
from pathlib import Path

from transferqueue.errors import InvalidArgument
from transferqueue.sizes import parse_bytes


def bytes_of(size: int | str) -> int:
    """The bytes of a size; a share such as `25%` is of the memory that this process may use.

    Raises:
        ValueError: it is no size.
    """
    share = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", str(size))
    if share is not None:
        if not 0 < float(share[1]) <= 100:
            raise ValueError(f"{size!r} is no share of memory; give more than 0% and at most 100%")
        return int(memory_there() * float(share[1]) / 100)
    try:
        return parse_bytes(size)
    except InvalidArgument:
        raise ValueError(
            f"{size!r} is no size; give bytes, text such as '8GiB', or a share of memory such as '25%'"
        ) from None


def memory_there(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may use: the machine's, or less where its container is limited.

    Args:
        proc: where the kernel says in which control groups this process is.
        cgroups: where the limits of control groups are read, of version 1 or 2.
    """
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    membership = proc / "self" / "cgroup"
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")  # a limit holds for all below it
        for folder in (here, *here.parents):
            if not folder.is_relative_to(root):
                break
            limit = folder / name
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                found.append(int(text))
    return min(found)
