"""A storage unit: serves the arenas of its host to clients of other hosts, and copies for the controller."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash
from msgspec.structs import replace

from ..errors import Corrupt, InvalidArgument, QueueError
from ..transport.arenas import ArenaMap
from ..transport.places import pieces_of
from ..transport.ucx_runtime import UcxUnusable
from ..values.block import block_nbytes, is_checked, read_block, write_block
from ..values.columns import Column, gather
from ..values.frame import FrameHeader, decode, encode, layout
from ..values.spec import ColumnPlan
from ..wire.listeners import Poll
from ..wire.messages import (
    Attach,
    Compact,
    Done,
    Expect,
    Forget,
    Load,
    Order,
    Places,
    Punch,
    Range,
    Read,
    Report,
    Save,
    UnitAddress,
    Values,
    Write,
    Written,
)
from ..wire.node import Call, Session
from .incoming import Incoming
from .overseer import Overseer
from .payload_files import load, save
from .ucx_memory import UcxMemory

log = logging.getLogger("transferqueue")

_MAX_ROWS = 1 << 26
_NOTHING = np.empty(0, np.uint8)


class StorageUnit:
    """Answers the requests to a storage unit and does what the controller orders.

    Args:
        address: of its own.
        overseer: the connection to the controller.
        known: called when the controller knows this unit, and it knows what it may take.
        confirmed: a write is answered when the controller has taken note of it, and not before: it keeps a
            journal, and both may die at once.
    """

    def __init__(
        self, address: UnitAddress, overseer: Overseer, known: Callable[[], None], *, confirmed: bool
    ) -> None:
        self._address = address
        self._confirmed = confirmed
        self._arenas = ArenaMap()
        self._overseer = overseer
        self._expected: dict[int, Range] = {}
        self._written: dict[int, list[Range]] = {}
        self._incoming: dict[Call, Incoming] = {}
        self._known = known
        self._ucx: UcxMemory | None = None
        self.read_bytes = self.written_bytes = 0

    def offer_ucx(self, poll: Poll, token: str, max_bytes: int) -> None:
        """Lets clients come by UCX too; where that cannot be, the log says why."""
        memory = UcxMemory(self._arenas, self._checked, poll, self._filled)
        try:
            port = memory.serve(token, max_bytes + (1 << 20))
        except UcxUnusable as error:
            log.warning("UCX is not offered: %s", error)
            return
        self._ucx = memory
        self._address = replace(self._address, ucx=port)

    def start(self) -> None:
        """Connects to the controller."""
        self._overseer.start(self._address, self._arenas, self._ordered, self._again, self._known)

    # -- what clients ask ------------------------------------------------------------------------------------

    def handle(self, call: Call) -> None:
        match call.body:
            case Write():
                self._incoming[call] = Incoming(self._arenas, self._checked(call.body.range))
                self.more(call, call.body, call.payload)
            case Read(places, fields):
                header, payload = self._read(places, fields)
                self.read_bytes += len(payload)
                call.reply(Values(header, len(payload)), payload)
            case _:
                call.refuse()

    def more(self, call: Call, body: Write, payload: memoryview) -> None:
        """Takes the next part of a block.

        Raises:
            InvalidArgument: the range is no longer to be written.
            Corrupt: the block is not whole.
        """
        try:
            incoming = self._incoming.get(call)
            if incoming is None:
                return  # it is complete, and waits for the controller
            if body.range != incoming.where:
                raise InvalidArgument("a part of another put", grant=body.range.grant)
            self._checked(body.range)
            done = incoming.take(body.at, np.frombuffer(payload, np.uint8) if len(payload) else _NOTHING)
        except QueueError:
            self._incoming.pop(call, None)
            raise
        if not done:
            return
        del self._incoming[call]
        if self._confirmed:
            self._filled(body.range, lambda refusal: self._confirm(call, refusal))
        else:
            self._filled(body.range)
            call.reply(Done())

    def _filled(self, where: Range, heard: Callable[[QueueError | None], None] | None = None) -> None:
        """A range is written. `heard` is called when the controller has taken note."""
        self.written_bytes += where.stop - where.start
        if where.grant not in self._expected:
            return  # forgotten while UCX told of it
        written = self._written.setdefault(where.grant, [])
        if where not in written:
            written.append(where)
        self._overseer.tell(Written(where), heard)

    @staticmethod
    def _confirm(call: Call, refusal: QueueError | None) -> None:
        if call.answered:
            return
        if refusal is not None:
            call.fail(refusal)
        else:
            call.reply(Done())

    def _checked(self, where: Range) -> Range:
        """The range, if the controller lets it be written."""
        expected = self._expected.get(where.grant)
        if (
            expected is None
            or expected.arena != where.arena
            or not expected.start <= where.start < where.stop <= expected.stop
        ):
            raise InvalidArgument("the memory of this put was given up; put again", grant=where.grant)
        return where

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
        _check_runs(places, [header.rows for header in headers])
        whole = len(blocks) == 1 and places.runs == [(0, headers[0].rows, 0, 0)] == [(0, places.rows, 0, 0)]
        if whole and (fields is None or set(fields) == blocks[0].keys()):
            return (headers[0] if checked else _summed(headers[0], frames[0])), frames[0]
        pieces = pieces_of(places, blocks, fields)
        return encode(places.rows, {name: gather(runs) for name, runs in pieces.items()})

    # -- what the controller orders --------------------------------------------------------------------------

    def _ordered(self, order: Order) -> None:
        values: dict[str, Any] = {}
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
                    if self._ucx is not None:
                        self._ucx.forget(grant)
                    for call in [call for call in self._incoming if call.body.range.grant == grant]:  # type: ignore[union-attr]  # writes
                        del self._incoming[call]
                case Compact(source, rows, target):
                    values["nbytes"] = self._compact(source, rows, target)
                case Punch(arena, start, stop):
                    self._arenas.punch(arena, start, stop)
                case Save(file, at, ranges):
                    values["sums"] = save(self._arenas, file, at, ranges)
                case Load(file, at, ranges, sums):
                    load(self._arenas, file, at, ranges, sums)
        except QueueError as failure:
            error, values["kind"] = str(failure), type(failure).__name__
        except OSError as failure:
            error, values["kind"] = str(failure), "OSError"
        self._overseer.tell(Report(order.number, error, values, (self.read_bytes, self.written_bytes)))

    def _compact(self, source: Range, rows: list[int], target: Range) -> int:
        view = self._arenas.read(source.arena, source.start, source.stop)
        header, frame = read_block(view, source.grant, f"arena {source.arena} at {source.start}")
        columns = decode(header, frame, verify=False)
        if any(not 0 <= row < header.rows for row in rows):
            raise Corrupt(f"a block of {header.rows} rows was put as one of more")
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

    def leave(self, session: Session) -> None:
        """No client comes by a local connection."""

    def forget(self, session: Session) -> None:
        """A client is gone: what it had not finished is nothing."""
        for call in [call for call in self._incoming if call.session is session]:
            del self._incoming[call]

    def close(self) -> None:
        if self._ucx is not None:
            self._ucx.close()
        self._overseer.close()
        self._arenas.close()


def _check_runs(places: Places, rows: Sequence[int]) -> None:
    """Raises InvalidArgument for runs that leave the batch or the blocks, which have `rows` rows each."""
    if not 0 <= places.rows <= _MAX_ROWS:
        raise InvalidArgument(f"{places.rows} rows; at most {_MAX_ROWS} are read at once")
    for position, count, block, row in places.runs:
        if not (
            0 <= block < len(rows)
            and count > 0
            and 0 <= position <= places.rows - count
            and 0 <= row <= rows[block] - count
        ):
            raise InvalidArgument(f"{count} rows from {row} on of block {block} are not there")
    if sum(count for _, count, _, _ in places.runs) < places.rows:
        raise InvalidArgument(f"the runs have fewer rows than the {places.rows} that are asked for")


def _summed(header: FrameHeader, frame: np.ndarray) -> FrameHeader:
    return FrameHeader(header.rows, header.columns, xxhash.xxh3_64_intdigest(frame))
