"""Loading the compiled loops that hatch_build.py puts beside their C sources, where there was a compiler."""

import ctypes
from pathlib import Path


def load(path: Path, abi: str, expected: int) -> tuple[ctypes.CDLL | None, str]:
    """The library and ""; or None and why it cannot be used.

    Args:
        path: the library.
        abi: the function of it that answers with the version of its signatures, uint32.
        expected: what it has to answer.
    """
    if not path.exists():
        return None, "this installation has no compiled kernel"
    try:
        library = ctypes.CDLL(str(path))
        found = getattr(library, abi)()
    except (OSError, AttributeError) as error:
        return None, f"the compiled kernel cannot be loaded: {error}"
    if found != expected:
        return None, f"the compiled kernel is of another version ({found}, expected {expected})"
    return library, ""
