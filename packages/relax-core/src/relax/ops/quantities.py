"""Sizes, times and counts as people read them."""


def size(nbytes: float) -> str:
    """`312 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def short_time(seconds: float) -> str:
    """`1.3 ms`, `240 ms`, `2.4 s`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def counted(count: int, thing: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
