"""A block that arrives in parts, each copied to its place and summed up while it is in the cache."""

import numpy as np
import xxhash

from ..errors import Corrupt
from ..transport.arenas import ArenaMap
from ..values.block import PROLOGUE_BYTES, frame_start, is_checked, read_block
from ..values.frame import decode
from ..wire.messages import Range


class Incoming:
    """One block on its way to a range."""

    def __init__(self, arenas: ArenaMap, where: Range) -> None:
        self.where = where
        self._out = arenas.write(where.arena, where.start, where.stop)
        self._restart()

    def _restart(self) -> None:
        self._at = 0
        self._frame = len(self._out)  # where the frame begins, once that is known
        self._sum = xxhash.xxh3_64()

    def take(self, at: int, part: np.ndarray) -> bool:
        """Copies the bytes from `at` on; returns whether the block is whole.

        A part at 0 begins again: the client has lost its connection and sends everything once more. One that
        does not follow the last is a late one of the connection that was lost, and is left out.

        Raises:
            Corrupt: there are too many bytes, or they do not match their checksum.
        """
        if at == 0:
            self._restart()
        if at != self._at or not len(part):
            if not len(part):
                raise Corrupt(f"a part without bytes came for a block of {len(self._out)}")
            return False
        end = at + len(part)
        if end > len(self._out) or (at == 0 and len(part) < min(PROLOGUE_BYTES, len(self._out))):
            raise Corrupt(f"bytes {at} to {end} came for a block of {len(self._out)}")
        self._out[at:end] = part
        if at == 0:
            self._frame = frame_start(self._out)
        self._at = end
        if end > self._frame:
            self._sum.update(self._out[max(at, self._frame) : end])
        if end < len(self._out):
            return False
        header, frame = read_block(self._out, self.where.grant, "a block on its way")
        if is_checked(self._out) and self._sum.intdigest() != header.checksum:
            raise Corrupt(
                f"a block of {len(self._out)} bytes does not match its checksum; it was changed on the way"
            )
        decode(header, frame, verify=False)  # a description that does not fit is refused here, not at readers
        return True
