"""A storage unit: serves the arenas of its host to clients of other hosts, and copies for the controller."""

from collections.abc import Sequence

import numpy as np
import xxhash

from ..errors import Corrupt, InvalidArgument, QueueError
from ..transport.arenas import ArenaMap
from ..transport.places import pieces_of
from ..values.block import block_nbytes, is_checked, read_block, write_block
from ..values.columns import Column, gather
from ..values.frame import FrameHeader, decode, encode, layout
from ..values.spec import ColumnPlan
from ..wire.messages import (
    Attach,
    Compact,
    Done,
    Expect,
    Forget,
    Order,
    Places,
    Punch,
    Range,
    Read,
    Report,
    UnitAddress,
    Values,
    Write,
    Written,
)
from ..wire.node import Call, Session
from .overseer import Overseer


class StorageUnit:
    """Answers the requests to a storage unit and does what the controller orders.

    Args:
        address: of its own.
        overseer: the connection to the controller.
    """

    def __init__(self, address: UnitAddress, overseer: Overseer) -> None:
        self._address = address
        self._arenas = ArenaMap()
        self._overseer = overseer
        self._expected: dict[int, Range] = {}
        self._written: dict[int, list[Range]] = {}
        self.read_bytes = self.written_bytes = 0
        overseer.start(self._address, self._arenas, self._ordered, self._again)

    # -- what clients ask ------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        match call.body:
            case Write(where):
                self._write(where, call.payload)
                call.reply(Done())
            case Read(places, fields):
                header, payload = self._read(places, fields)
                self.read_bytes += len(payload)
                call.reply(Values(header), payload)
            case _:
                call.refuse()

    def _write(self, where: Range, payload: memoryview) -> None:
        """Takes a block that a client has laid out.

        Raises:
            InvalidArgument: the range is not, or no longer, to be written.
            Corrupt: the block is not whole.
        """
        expected = self._expected.get(where.grant)
        inside = (
            expected is not None
            and expected.arena == where.arena
            and expected.start <= where.start < where.stop <= expected.stop
        )
        if not inside:
            raise InvalidArgument("the memory of this put was given up; put again", grant=where.grant)
        if len(payload) != where.stop - where.start:
            raise Corrupt(f"{len(payload)} bytes came for a range of {where.stop - where.start}")
        block = np.frombuffer(payload, np.uint8)
        header, frame = read_block(block, where.grant, "a block on its way")
        if is_checked(block) and xxhash.xxh3_64_intdigest(frame) != header.checksum:
            raise Corrupt(
                f"a block of {len(block)} bytes does not match its checksum; it was changed on the way"
            )
        decode(header, frame, verify=False)  # a description that does not fit is refused here, not at readers
        self._arenas.write(where.arena, where.start, where.stop)[:] = block
        self.written_bytes += len(block)
        written = self._written.setdefault(where.grant, [])
        if where not in written:
            written.append(where)
        self._overseer.tell(Written(where))

    def _read(self, places: Places, fields: list[str] | None) -> tuple[FrameHeader, np.ndarray]:
        headers: list[FrameHeader] = []
        frames: list[np.ndarray] = []
        blocks: list[dict[str, Column]] = []
        checked = True
        for handle in places.blocks:
            where = f"arena {handle.arena} at {handle.start}"
            view = self._arenas.read(handle.arena, handle.start, handle.stop)
            header, frame = read_block(view, handle.grant, where)
            checked = checked and is_checked(view)
            headers.append(header)
            frames.append(frame)
            blocks.append(decode(header, frame, verify=False))
        whole = len(blocks) == 1 and places.runs == [(0, headers[0].rows, 0, 0)] == [(0, places.rows, 0, 0)]
        if whole and (fields is None or set(fields) == blocks[0].keys()):
            return (headers[0] if checked else _summed(headers[0], frames[0])), frames[0]
        pieces = pieces_of(places, blocks, fields)
        return encode(places.rows, {name: gather(runs) for name, runs in pieces.items()})

    # -- what the controller orders --------------------------------------------------------------------------

    def _ordered(self, order: Order) -> None:
        values: dict[str, int] = {}
        error = ""
        try:
            match order.what:
                case Attach():
                    pass  # the overseer has added it already
                case Expect(where):
                    self._expected[where.grant] = where
                case Forget(grant):
                    self._expected.pop(grant, None)
                    self._written.pop(grant, None)
                case Compact(source, rows, target):
                    values["nbytes"] = self._compact(source, rows, target)
                case Punch(arena, start, stop):
                    self._arenas.punch(arena, start, stop)
        except QueueError as failure:
            error = str(failure)
        except OSError as failure:
            error = f"{order.what}: {failure}"
        self._overseer.tell(Report(order.number, error, values))

    def _compact(self, source: Range, rows: list[int], target: Range) -> int:
        view = self._arenas.read(source.arena, source.start, source.stop)
        header, frame = read_block(view, source.grant, f"arena {source.arena} at {source.start}")
        columns = decode(header, frame, verify=False)
        plans: dict[str, ColumnPlan] = {
            name: gather([(column, row, row + 1) for row in rows]) for name, column in columns.items()
        }
        sizes = block_nbytes(layout(len(rows), plans))
        if sizes.nbytes > target.stop - target.start:
            raise InvalidArgument(f"{len(rows)} rows need {sizes.nbytes} bytes")
        out = self._arenas.write(target.arena, target.start, target.start + sizes.nbytes)
        write_block(out, target.grant, sizes, plans, checksum=False)
        return sizes.nbytes

    def _again(self) -> None:
        """The controller was started anew: it has to hear again what has arrived."""
        for ranges in self._written.values():
            for where in ranges:
                self._overseer.tell(Written(where))

    # -- what a node asks of its service ---------------------------------------------------------------------

    def settle(self, now: float) -> float | None:
        return self._overseer.settle(now)

    def resume(self, session: Session, pins: Sequence[int]) -> None:
        """Clients hold nothing here."""

    def release(self, session: Session, blocks: Sequence[int]) -> None:
        """Clients hold nothing here."""

    def forget(self, session: Session) -> None:
        """Clients hold nothing here."""

    def close(self) -> None:
        self._overseer.close()
        self._arenas.close()


def _summed(header: FrameHeader, frame: np.ndarray) -> FrameHeader:
    return FrameHeader(header.rows, header.columns, xxhash.xxh3_64_intdigest(frame))
