"""The compiled loops of `kernel.c`, where this installation has them; numpy gives the same bits without.

numpy takes several passes over what has changed, and waits for memory in each. The kernel decodes beforehand,
asks for the lines of a range a little ahead, and touches each once.
"""

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dcs import compiled
from dcs.delta.difference import DTYPES, Bytes, Values
from dcs.delta.gaps import Gaps

_ABI: Final = 1
_LIBRARY: Final = Path(__file__).with_name("_kernel.so")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What this installation has.

    Attributes:
        kernel: the loops, or None.
        why: there are none; "" where there are.
    """

    kernel: "Kernel | None"
    why: str


class Kernel:
    """Calls of the compiled loops; each lets other threads run meanwhile.

    Nothing here looks at where gaps lead but `leads`: ask that first.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        small, size, pointer, data = ctypes.c_uint32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
        gaps = [pointer, small, small]
        self._last, self._decode = library.dcs_last, library.dcs_decode
        self._add, self._put = library.dcs_add, library.dcs_put
        self._last.argtypes, self._last.restype = gaps, size
        self._decode.argtypes = [small, data, data, small, data, small, small, small, pointer]
        self._add.argtypes = [*gaps, pointer, *gaps, pointer, small, pointer]
        self._put.argtypes = [*gaps, pointer, pointer, small, pointer]
        self._add.restype = self._put.restype = None

    def leads(self, gaps: Gaps, units: int) -> bool:
        """Whether these gaps name positions that ascend, within a range of so many units."""
        return not len(gaps) or 0 <= self._last(*_gaps(gaps)) < units

    def decoded(
        self, form: int, codes: bytes, narrow: bytes, wide: bytes, unit: int, count: int
    ) -> Values | None:
        """The `count` differences of sections, as `values.from_sections`; None where they do not fit."""
        differences = np.empty(count, DTYPES[unit])
        whole = self._decode(
            form, codes, narrow, len(narrow), wide, len(wide) // unit, unit, count, differences.ctypes.data
        )
        return differences if whole else None

    def add(
        self, gaps: Gaps, values: Values, target: Bytes, before: tuple[Gaps, Values] | None = None
    ) -> None:
        """Add `values` to what `gaps` name, and leave the sums in both; after putting those of `before`."""
        unit = values.itemsize
        stale, old = (None, 0, 0), None
        if before is not None:
            stale, old = _gaps(before[0]), before[1].ctypes.data
        self._add(*_gaps(gaps), values.ctypes.data, *stale, old, unit, target.ctypes.data)

    def put(self, gaps: Gaps, values: Values, target: Bytes) -> None:
        """Give what `gaps` name of `target` these values."""
        self._put(*_gaps(gaps), values.ctypes.data, None, values.itemsize, target.ctypes.data)

    def take(self, gaps: Gaps, source: Bytes, target: Bytes, unit: int) -> None:
        """Give what `gaps` name of `target` what `source` has there."""
        self._put(*_gaps(gaps), None, source.ctypes.data, unit, target.ctypes.data)


def _gaps(gaps: Gaps) -> tuple[int, int, int]:
    return gaps.ctypes.data, gaps.itemsize, len(gaps)


def loaded() -> "Kernel | None":
    """The loops, or None where numpy has to do. The first call logs which, at INFO or WARNING."""
    return found().kernel


def implementation() -> str:
    """What applies deltas here: ``compiled``, or ``numpy`` and why, for logs and benchmarks."""
    return f"numpy ({found().why})" if found().why else "compiled"


@functools.cache
def found() -> Found:
    """Look for the loops, once."""
    result = _load(_LIBRARY)
    if result.kernel is None:
        _log.warning(
            "numpy applies deltas, at about half the speed: %s. Install relax-dcs from a wheel for this"
            " platform, or where there is a C compiler.",
            result.why,
        )
    else:
        _log.info("deltas are applied by the compiled kernel")
    return result


def _load(path: Path) -> Found:
    library, why = compiled.load(path, "dcs_abi", _ABI)
    return Found(None if library is None else Kernel(library), why)
