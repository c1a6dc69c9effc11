"""Snapshots: unconsumed samples and what tasks have done, in a folder, while the store goes on; and back."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..errors import Corrupt, Full, InvalidArgument, QueueError, StorageLost, Timeout, named
from ..wire.messages import Done, Load, Range, Save
from ..wire.node import Call
from . import events
from .blocks import Block, Grant
from .memory import Memory
from .recovery import load
from .shelves import Shelves
from .snapshot_folder import SavedBlock, Target, read
from .units import Units

_AT_ONCE = 8 << 20  # bytes that a unit copies between two looks at what else it has to do


@dataclass
class _Copying:
    """Blocks on their way between arenas and files, some at a time for each unit.

    Attributes:
        call: who waits for it, if anybody has to.
        todo: per unit: (file, byte in it, number and place of each block).
        under_way: units that are copying.
        done: called with the first error, or None, when nothing is under way any more.
    """

    call: Call | None
    todo: dict[int, deque[tuple[int, int, list[tuple[int, Range]]]]]
    done: Callable[[QueueError | None], None]
    under_way: set[int] = field(default_factory=set)
    error: QueueError | None = None
    saved: list[SavedBlock] = field(default_factory=list)

    def next(self, unit: int) -> tuple[int, int, list[tuple[int, Range]]] | None:
        """What a unit is to copy next; None where it has nothing more to do, or nobody waits any more."""
        if self.call is not None and (self.call.answered or time.monotonic() > self.call.deadline):
            self.error = self.error or Timeout("the copy took longer than its client waited")
        return None if self.error is not None or not self.todo[unit] else self.todo[unit].popleft()


class Snapshots:
    """Takes and restores them.

    Args:
        whole: the state as one message, without memory, grants and clients.
        restored: called when a snapshot is in place, with its generation; Full if it cannot be kept.
    """

    def __init__(
        self,
        shelves: Shelves,
        memory: Memory,
        units: Units,
        whole: Callable[[], bytes],
        restored: Callable[[int], None],
    ) -> None:
        self._shelves = shelves
        self._memory = memory
        self._units = units
        self._whole = whole
        self._restored = restored
        self._restoring = False

    # -- there -----------------------------------------------------------------------------------------------

    def take(self, call: Call, folder: Path) -> None:
        """Copies what is there now to a folder, and answers when it is whole.

        Raises:
            InvalidArgument: the folder cannot be written, holds something else, or gets a snapshot already.
            StorageLost: there is no storage unit to copy.
        """
        units = self._units.answering()
        if not units:
            raise StorageLost("no storage unit answers", unit=-1, address="")
        state = self._whole()
        target = Target(folder, len(units))
        blocks = [block for block in self._memory.blocks.values() if block.living]
        for block in blocks:
            block.pins += 1  # until it is copied

        def done(error: QueueError | None) -> None:
            for block in blocks:
                self._memory.let_go(block)
            if error is None:
                error = target.finish(copying.saved, state)
            else:
                target.give_up()
            _answer(call, error)

        copying = _Copying(call, _shared(units, blocks), done)
        for unit in units:
            self._save_next(copying, unit, target)
        self._end_if_done(copying)

    def _save_next(self, copying: _Copying, unit: int, target: Target) -> None:
        piece = copying.next(unit)
        if piece is None:
            return
        file, at, some = piece
        path = target.folder / target.files[file]

        def saved(error: str, values: dict[str, Any]) -> None:
            copying.under_way.discard(unit)
            if error:
                copying.error = copying.error or _failure(error, values, unit, target.folder)
            else:
                position = at
                for (number, where), digest in zip(some, values["sums"], strict=True):
                    copying.saved.append(SavedBlock(number, file, position, digest))
                    position += where.stop - where.start
                self._save_next(copying, unit, target)
            self._end_if_done(copying)

        copying.under_way.add(unit)
        self._units.copy(unit, Save(str(path), at, [where for _, where in some]), saved)

    @staticmethod
    def _end_if_done(copying: _Copying) -> None:
        if not copying.under_way:
            done, copying.done = copying.done, lambda error: None
            done(copying.error)

    # -- and back --------------------------------------------------------------------------------------------

    def restore(self, call: Call | None, folder: Path, done: Callable[[QueueError | None], None]) -> None:
        """Fills the store, which must be empty, with a snapshot. Nothing of it is seen before all of it is
        there.

        Args:
            call: answered at the end, if there is one.
            done: called at the end.

        Raises:
            InvalidArgument: the folder is no snapshot, or the store is not empty.
            Corrupt: it was changed, or is not all there.
            StorageLost: there is no storage unit to copy.
        """
        manifest, state = read(folder)
        self._check_empty()
        units = self._units.answering()
        if not units:
            raise StorageLost("no storage unit answers", unit=-1, address="")
        places = {one.number: one for one in state.blocks}
        grants: dict[int, Grant] = {}
        try:
            for one in state.blocks:
                grants[one.number] = self._memory.take(one.range.stop - one.range.start, None, None)
        except Full:
            self._end(grants.values())
            raise
        self._restoring = True

        def finish(error: QueueError | None) -> None:
            self._restoring = False
            if error is None:
                error = self._install(state, grants)
            self._end(grants.values())
            if call is not None:
                _answer(call, error)
            done(error)

        todo: dict[int, deque[tuple[int, int, list[tuple[int, Range]]]]] = {unit: deque() for unit in units}
        digests = {one.block: one.sum for one in manifest.blocks}
        pieces: list[tuple[int, int, list[tuple[int, Range]]]] = []
        end = -1
        for one in sorted(manifest.blocks, key=lambda one: (one.file, one.at)):
            old, grant = places[one.block].range, grants[one.block]
            nbytes = old.stop - old.start
            new = Range(old.grant, grant.arena, grant.start, grant.start + nbytes)
            if not pieces or pieces[-1][0] != one.file or one.at != end or one.at - pieces[-1][1] >= _AT_ONCE:
                pieces.append((one.file, one.at, []))
            pieces[-1][2].append((one.block, new))
            end = one.at + nbytes
        for turn, piece in enumerate(pieces):
            todo[units[turn % len(units)]].append(piece)
        copying = _Copying(call, todo, finish)
        for unit in units:
            self._load_next(copying, unit, folder, manifest.files, digests)
        self._end_if_done(copying)

    def _load_next(
        self, copying: _Copying, unit: int, folder: Path, files: Sequence[str], digests: dict[int, int]
    ) -> None:
        piece = copying.next(unit)
        if piece is None:
            return
        file, at, some = piece

        def loaded(error: str, values: dict[str, Any]) -> None:
            copying.under_way.discard(unit)
            if error:
                copying.error = copying.error or _failure(error, values, unit, folder)
            else:
                self._load_next(copying, unit, folder, files, digests)
            self._end_if_done(copying)

        copying.under_way.add(unit)
        what = Load(
            str(folder / files[file]),
            at,
            [where for _, where in some],
            [digests[number] for number, _ in some],
        )
        self._units.copy(unit, what, loaded)

    def _install(self, state: events.StoreState, grants: dict[int, Grant]) -> QueueError | None:
        try:
            self._check_empty()
        except InvalidArgument as error:
            return error
        moved: list[events.BlockState] = []
        for one in state.blocks:
            grant, nbytes = grants[one.number], one.range.stop - one.range.start
            start = grant.start
            grant.named.append((start, start + nbytes))
            where = Range(one.range.grant, grant.arena, start, start + nbytes)
            moved.append(events.BlockState(one.number, where, one.fields, one.rows))
        state = msgspec.structs.replace(
            state,
            next_grant=max(state.next_grant, self._memory.next_grant),
            next_block=max(state.next_block, self._memory.next_block),
            blocks=moved,
        )
        load(state, self._shelves, self._memory, time.monotonic() - state.now, _no_arena)
        self._restored(state.generation)
        return None

    def _check_empty(self) -> None:
        if any(True for _ in self._shelves) or self._memory.blocks or self._restoring:
            raise InvalidArgument("a snapshot can only be restored into a store that has no partition yet")

    def _end(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            self._memory.end(grant)


def _no_arena(number: int, nbytes: int) -> int:
    raise Corrupt(f"a snapshot names arena {number}")


def _shared(
    units: Sequence[int], blocks: Iterable[Block]
) -> dict[int, deque[tuple[int, int, list[tuple[int, Range]]]]]:
    """What each unit copies, in pieces; each has a file of its own."""
    todo: dict[int, deque[tuple[int, int, list[tuple[int, Range]]]]] = {unit: deque() for unit in units}
    ends = dict.fromkeys(units, 0)
    for block in blocks:
        file, unit = min(enumerate(units), key=lambda one: ends[one[1]])
        pieces = todo[unit]
        if not pieces or ends[unit] - pieces[-1][1] >= _AT_ONCE:
            pieces.append((file, ends[unit], []))
        pieces[-1][2].append((block.number, block.range))
        ends[unit] += block.nbytes
    return todo


def _failure(error: str, values: dict[str, Any], unit: int, folder: Path) -> QueueError:
    kind = values.get("kind", "")
    if kind == "OSError":
        return Full(f"storage unit {unit} could not copy to or from {folder}: {error}", folder=str(folder))
    if kind:
        return named(kind, error, {})
    return StorageLost(f"{error} while it copied a snapshot; try again", unit=unit, address="")


def _answer(call: Call, error: QueueError | None) -> None:
    if call.answered:
        return
    if error is not None:
        call.fail(error)
    else:
        call.reply(Done())
