"""A block: what one put or update leaves in an arena.

    prologue   40 bytes: magic, grant, header size, flags, frame size, checksum (little endian)
    header     the frame's description, msgpack
    padding    zeroes to a multiple of 64 bytes
    frame      the columns

The grant number is the block's generation: a handle to memory that has been given away again finds another
number, or no magic at all, and is refused. The magic is written last, so half a block is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct

import msgspec
import numpy as np
import xxhash

from ..errors import Corrupt, InvalidArgument, UnknownSample
from .frame import ALIGNMENT, FrameHeader, FrameLayout, aligned, write
from .spec import ColumnPlan

MAGIC = b"TQblock1"
CHECKED = 1  # flag: the prologue's checksum is that of the frame

_PROLOGUE = Struct("<8sQIIQQ")
PROLOGUE_BYTES = _PROLOGUE.size
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(FrameHeader)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The sizes of a block that is not written yet.

    Attributes:
        frame: the layout of its frame.
        nbytes: size of the whole block, a multiple of 64.
        frame_nbytes: size of the frame in it.
    """

    frame: FrameLayout
    nbytes: int
    frame_nbytes: int
    _header: bytes


def block_nbytes(layout: FrameLayout) -> BlockLayout:
    """How much room a block with this frame takes."""
    header = _ENCODER.encode(layout.header)
    nbytes = aligned(_PROLOGUE.size + len(header)) + layout.nbytes
    return BlockLayout(layout, nbytes, layout.nbytes, header)


def write_block(
    out: np.ndarray,
    grant: int,
    layout: BlockLayout | FrameLayout,
    plans: Mapping[str, ColumnPlan],
    *,
    checksum: bool,
) -> None:
    """Writes a block, its magic last.

    Args:
        out: uint8 ``[layout.nbytes]``, contiguous, its start at a multiple of 64 bytes.
        grant: the number under which the controller gave the range away; 64 bits.
        layout: what `block_nbytes` gave for these very plans (or the layout that it was given).
        plans: the columns.
        checksum: whether to take the frame's checksum (one more pass over it).

    Raises:
        InvalidArgument: `out` has another size or does not start at a multiple of 64 bytes.
    """
    if isinstance(layout, FrameLayout):
        layout = block_nbytes(layout)
    if len(out) != layout.nbytes or out.ctypes.data % ALIGNMENT:
        raise InvalidArgument(
            f"a block of {layout.nbytes} bytes cannot go to {len(out)} bytes at address {out.ctypes.data:#x};"
            f" it needs its size, at a multiple of {ALIGNMENT}"
        )
    header = layout._header
    start = layout.nbytes - layout.frame_nbytes
    head = memoryview(out)[:start]
    head[:8] = bytes(8)
    head[_PROLOGUE.size :] = header + bytes(start - _PROLOGUE.size - len(header))
    frame = out[start:]
    write(layout.frame, plans, frame)
    digest = xxhash.xxh3_64_intdigest(frame) if checksum else 0
    prologue = _PROLOGUE.pack(
        MAGIC, grant, len(header), CHECKED if checksum else 0, layout.frame_nbytes, digest
    )
    head[8 : _PROLOGUE.size] = prologue[8:]
    head[:8] = MAGIC


def read_block(view: np.ndarray, grant: int, where: str) -> tuple[FrameHeader, np.ndarray]:
    """The frame's description and the frame, a view of `view`. Columns are then ``decode(header, frame)``.

    The description's checksum is the one taken at the write, 0 if none was; see `is_checked`.

    Args:
        view: uint8 ``[nbytes]``, the memory that a handle names.
        grant: the grant number of that handle.
        where: how to name the place in an error ("arena 3 at 4096").

    Raises:
        UnknownSample: no block of that grant is there (any more): the handle is stale.
        Corrupt: there is one, and its sizes or its description do not fit the memory.
    """
    if len(view) < _PROLOGUE.size:
        raise Corrupt(f"{where}: {len(view)} bytes are too few for a block")
    magic, found, header_nbytes, _, frame_nbytes, checksum = _PROLOGUE.unpack_from(view)
    if magic != MAGIC or found != grant:
        raise UnknownSample(
            f"{where}: no block of grant {grant} is there; what was there has been freed since", ids=[]
        )
    start = aligned(_PROLOGUE.size + header_nbytes)
    if start + frame_nbytes != len(view):
        raise Corrupt(
            f"{where}: a block of {len(view)} bytes says that {start} bytes of header and {frame_nbytes} of "
            "frame are in it"
        )
    try:
        header = _DECODER.decode(view[_PROLOGUE.size : _PROLOGUE.size + header_nbytes])
    except msgspec.DecodeError as error:
        raise Corrupt(f"{where}: the description of the block cannot be read: {error}") from error
    return FrameHeader(header.rows, header.columns, checksum), view[start:]


def is_checked(view: np.ndarray) -> bool:
    """Whether the checksum of the block in `view` was taken when it was written."""
    return bool(_PROLOGUE.unpack_from(view)[3] & CHECKED)


def frame_start(view: np.ndarray) -> int:
    """Where the frame begins in a block of which at least the prologue is there, as that says.

    Raises:
        Corrupt: there is no room for a prologue.
    """
    if len(view) < PROLOGUE_BYTES:
        raise Corrupt(f"{len(view)} bytes are too few for a block")
    return max(0, len(view) - _PROLOGUE.unpack_from(view)[4])
