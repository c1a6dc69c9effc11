"""A storage unit: payload in memory, found by sample id. It schedules nothing."""

from collections.abc import Sequence

import numpy as np

from ..errors import FieldNotReady, InvalidArgument, UnknownSample
from ..ids import shortened
from ..values.columns import Column, ColumnPlan, gather, runs
from ..values.frame import FrameHeader, decode, encode
from ..wire.messages import Done, Free, Read, ReadStats, Stats, Store, Values
from ..wire.node import Call

_REFUSED_LIMIT = 100_000


class Block:
    """The columns of one store request. Rows die one by one; a half-dead block is copied into a smaller
    one.
    """

    __slots__ = ("columns", "header", "ids", "living", "nbytes", "payload")

    def __init__(self, ids: list[int], header: FrameHeader, payload: memoryview | np.ndarray) -> None:
        self.ids: list[int | None] = list(ids)
        self.living = len(ids)
        self.header = header
        self.payload = payload
        self.columns = decode(header, payload)
        self.nbytes = len(payload)


class Shelf:
    """All blocks of a unit, by sample.

    Attributes:
        nbytes: bytes held, including dead rows that are not compacted yet (never more than the living ones of
            their block).
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._places: dict[int, list[tuple[Block, int]]] = {}
        # Ids freed before they came: a put that was given up and whose payload may still be under way.
        self._refused: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._places)

    def store(self, ids: list[int], header: FrameHeader, payload: memoryview | np.ndarray, new: bool) -> None:
        """Keeps a frame as the values of `ids`, row by row; the buffer is kept, not copied.

        Raises:
            Corrupt: the frame does not fit its description or checksum.
            UnknownSample: a sample to add fields to is not here, or a new one was given up meanwhile.
        """
        if header.rows != len(ids) or len(set(ids)) != len(ids):
            raise InvalidArgument(f"a frame of {header.rows} rows for {len(set(ids))} samples")
        if new and not self._refused.keys().isdisjoint(ids):
            raise UnknownSample("the put of these samples was given up", ids=shortened(ids))
        if new and not self._places.keys().isdisjoint(ids):
            raise InvalidArgument(f"samples {shortened(ids)} are stored already")
        if not new:
            self._check_known(ids)
        block = Block(ids, header, payload)
        self.nbytes += block.nbytes
        for row, sample in enumerate(ids):
            self._places.setdefault(sample, []).append((block, row))

    def read(
        self, ids: Sequence[int], fields: list[str] | None
    ) -> tuple[FrameHeader, memoryview | np.ndarray]:
        """The frame with these fields of these samples, in this order. A whole block goes out as it came
        in.
        """
        self._check_known(ids)
        block = self._whole_block(ids, fields)
        if block is not None:
            return block.header, block.payload
        places = [self._places[sample] for sample in ids]
        names = fields if fields is not None else self._common_fields(places)
        return encode(len(ids), {name: self._plan(name, ids, places) for name in names})

    def _check_known(self, ids: Sequence[int]) -> None:
        missing = [sample for sample in ids if sample not in self._places]
        if missing:
            raise UnknownSample(
                f"{len(missing)} of {len(ids)} samples are not stored (freed or dropped): "
                f"{shortened(missing)}",
                ids=shortened(missing),
            )

    def _whole_block(self, ids: Sequence[int], fields: list[str] | None) -> Block | None:
        if not ids or len(self._places[ids[0]]) != 1:
            return None
        block = self._places[ids[0]][0][0]
        if len(block.ids) != len(ids) or block.ids != list(ids):
            return None
        if any(len(self._places[sample]) != 1 for sample in ids):
            return None
        return block if fields is None or set(fields) == block.columns.keys() else None

    @staticmethod
    def _common_fields(places: list[list[tuple[Block, int]]]) -> list[str]:
        names: dict[str, int] = {}
        for blocks in places:
            for name in {name for block, _ in blocks for name in block.columns}:
                names[name] = names.get(name, 0) + 1
        return sorted(name for name, count in names.items() if count == len(places))

    @staticmethod
    def _plan(name: str, ids: Sequence[int], places: list[list[tuple[Block, int]]]) -> ColumnPlan:
        """The column `name`, from the latest block of each sample that has it, in as few runs as there
        are.
        """
        rows: list[tuple[Column, int]] = []
        for sample, blocks in zip(ids, places, strict=True):
            for block, row in reversed(blocks):
                if name in block.columns:
                    rows.append((block.columns[name], row))
                    break
            else:
                raise FieldNotReady(
                    f"field {name!r} of sample {sample} is not written yet; wait for the task that writes "
                    "it, or name it in the task's fields",
                    field=name,
                    ids=[sample],
                )
        return gather(list(runs(rows)))

    def free(self, ids: Sequence[int]) -> None:
        """Lets go of samples; ids that are not here are remembered as given up."""
        shrinking: dict[Block, None] = {}
        for sample in ids:
            places = self._places.pop(sample, None)
            if places is None:
                self._refused[sample] = None
                continue
            for block, row in places:
                block.ids[row] = None
                block.living -= 1
                shrinking[block] = None
        while len(self._refused) > _REFUSED_LIMIT:
            del self._refused[next(iter(self._refused))]
        for block in shrinking:
            if not block.living:
                self.nbytes -= block.nbytes
            elif block.living * 2 <= len(block.ids):
                self._compact(block)

    def _compact(self, block: Block) -> None:
        """Copies the living rows of a block into a new one; O(1) amortised, as half of its rows died
        since.
        """
        rows = [row for row, sample in enumerate(block.ids) if sample is not None]
        ids = [sample for sample in block.ids if sample is not None]
        plans = {
            name: gather(list(runs((column, row) for row in rows))) for name, column in block.columns.items()
        }
        header, payload = encode(len(rows), plans)
        smaller = Block(ids, header, payload)
        self.nbytes += smaller.nbytes - block.nbytes
        for row, sample in enumerate(ids):
            places = self._places[sample]
            at = next(i for i, (held, _) in enumerate(places) if held is block)
            places[at] = (smaller, row)


class StorageService:
    """Answers the requests to a storage unit."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.shelf = Shelf()

    def handle(self, call: Call) -> None:
        match call.body:
            case Store(ids, header, new):
                self.shelf.store(ids, header, call.payload, new)
                call.reply(Done())
            case Read(ids, fields):
                header, payload = self.shelf.read(ids, fields)
                call.reply(Values(header), payload)
            case Free(ids):
                self.shelf.free(ids)
                call.reply(Done())
            case ReadStats():
                call.reply(
                    Stats({"unit": self.number, "samples": len(self.shelf), "nbytes": self.shelf.nbytes})
                )
            case _:
                call.refuse()

    def settle(self, now: float) -> float | None:
        """Nothing waits here."""
        return None

    def forget(self, client: int) -> None:
        """Clients hold nothing here."""
