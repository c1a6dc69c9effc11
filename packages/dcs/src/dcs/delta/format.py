"""The bytes of a delta: a header, then up to four sections, each stored with zstd where that makes it
a good deal smaller.

    header | index | codes | narrow | wide | tail

`index` says where the changes are (`gaps.py`); `codes`, `narrow` and `wide` by how much (`values.py`); `tail`
is the end of the new range that fills no whole unit. The counts in the header fix the size of every section,
so a section is compressed exactly when it is stored in fewer bytes than that, and no frame may claim to hold
anything else: what decoding allocates is bounded by the range that the receiver has, whatever it was sent.
"""

import struct
import threading
from dataclasses import dataclass
from typing import Final

import zstandard

from dcs.errors import CorruptChunk

VERSION: Final = 1
UNITS: Final = (1, 2, 4)

# Kinds of index.
GAPS8: Final = 1
GAPS16: Final = 2
BITMAP: Final = 3

# Forms of values.
WIDE: Final = 1
NARROW: Final = 2
CODES: Final = 3

_HEADER = struct.Struct("<BBBBIIIIIIII")
_WORTH_COMPRESSING = 64
# A frame has to be smaller by this share. Unpacking gaps that shrink by 7%, as those of a step of training,
# took a fifth of the time of applying.
_WORTH_UNPACKING: Final = 1 / 8
_contexts = threading.local()


class CorruptDelta(CorruptChunk):
    """A delta is damaged, or is not for this range. What it was to be applied to is as it was."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a delta says of itself.

    Attributes:
        unit: bytes of one value.
        index: kind of index, `GAPS8`, `GAPS16` or `BITMAP`.
        form: form of the values, `WIDE`, `NARROW` or `CODES`.
        nbytes: length of the range, for the base and the new version alike.
        count: entries of the index.
        narrow: entries of the section `narrow`; `wide` alike.
        stored: bytes of the four sections as they are stored.
    """

    unit: int
    index: int
    form: int
    nbytes: int
    count: int
    narrow: int
    wide: int
    stored: tuple[int, int, int, int]

    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of the four sections once they are unpacked."""
        units = self.nbytes // self.unit
        index = {GAPS8: self.count, GAPS16: 2 * self.count, BITMAP: (units + 7) // 8}[self.index]
        codes = (self.count + 3) // 4 if self.form == CODES else 0
        return index, codes, self.narrow, self.wide * self.unit


def pack(header: Header, sections: list[bytes], tail: bytes) -> bytes:
    """The payload of these sections, as `stored` makes them; `header.stored` must give their sizes."""
    head = _HEADER.pack(
        VERSION,
        header.unit,
        header.index,
        header.form,
        header.nbytes,
        header.count,
        header.narrow,
        header.wide,
        *header.stored,
    )
    return b"".join((head, *sections, tail))


def stored(section: bytes | memoryview, compress: bool) -> bytes:
    """The section as it goes into the payload: a zstd frame where that is an eighth smaller, else itself."""
    if compress and len(section) >= _WORTH_COMPRESSING:
        frame = _compressor().compress(section)
        if len(frame) < (1 - _WORTH_UNPACKING) * len(section):
            return frame
    return bytes(section)


def overhead(nbytes: int, unit: int) -> int:
    """Bytes of a delta that has no change at all."""
    return _HEADER.size + nbytes % unit


def unpack(payload: bytes | bytearray | memoryview, nbytes: int) -> tuple[Header, list[bytes], bytes]:
    """Header, the four sections unpacked, and the tail, of a delta for a range of `nbytes`.

    The sections are copies. Raises `CorruptDelta` where the payload contradicts itself or the range.
    """
    view = memoryview(payload).cast("B")
    if len(view) < _HEADER.size:
        raise CorruptDelta(f"a delta of {len(view)} bytes is cut off: its header alone has {_HEADER.size}")
    version, unit, index, form, length, count, narrow, wide, *lengths = _HEADER.unpack_from(view)
    if version != VERSION:
        raise CorruptDelta(f"a delta of format {version} came, and {VERSION} is spoken here")
    if unit not in UNITS or index not in (GAPS8, GAPS16, BITMAP) or form not in (WIDE, NARROW, CODES):
        raise CorruptDelta(f"a delta has unit {unit}, index {index} and form {form}, which do not exist")
    if length != nbytes:
        raise CorruptDelta(f"a delta for {length} bytes came for a range of {nbytes}")
    units = nbytes // unit
    if count > units or narrow > count or wide > count:
        raise CorruptDelta(f"a delta names {count} changes ({narrow}, {wide}) of a range of {units} values")
    header = Header(unit, index, form, length, count, narrow, wide, tuple(lengths))
    tail = nbytes % unit
    expected = _HEADER.size + sum(header.stored) + tail
    if len(view) != expected:
        raise CorruptDelta(f"a delta of {len(view)} bytes came, and its header says {expected}")
    sections: list[bytes] = []
    at = _HEADER.size
    for name, size, held in zip(
        ("index", "codes", "narrow", "wide"), header.sizes(), header.stored, strict=True
    ):
        sections.append(_unpacked(view[at : at + held], size, name))
        at += held
    return header, sections, bytes(view[at:])


def _unpacked(section: memoryview, size: int, name: str) -> bytes:
    if len(section) == size:
        return bytes(section)
    if len(section) > size:
        raise CorruptDelta(f"section `{name}` of a delta has {len(section)} bytes, expected at most {size}")
    try:
        # Asked before decompressing, because zstandard allocates what the frame claims.
        claimed = zstandard.frame_content_size(section)
        if claimed != size:
            raise CorruptDelta(f"section `{name}` of a delta unpacks to {claimed} bytes, expected {size}")
        unpacked = _decompressor().decompress(section, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDelta(f"section `{name}` of a delta is no zstd frame: {error}") from error
    if len(unpacked) != size:
        raise CorruptDelta(f"section `{name}` of a delta unpacks to {len(unpacked)} bytes, expected {size}")
    return unpacked


def _compressor() -> zstandard.ZstdCompressor:
    # Contexts are not thread-safe, and cost more to make than a chunk costs to compress.
    found = getattr(_contexts, "compressor", None)
    if found is None:
        found = _contexts.compressor = zstandard.ZstdCompressor(level=1)
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    found = getattr(_contexts, "decompressor", None)
    if found is None:
        found = _contexts.decompressor = zstandard.ZstdDecompressor()
    return found
