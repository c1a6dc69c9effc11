"""Payload in memory that producer, store and consumer share: written once, never copied to be read."""

from collections.abc import Sequence

import numpy as np

from ..values.block import read_block
from ..values.columns import Column, assemble
from ..values.frame import decode
from ..wire.messages import Places, Range
from ..wire.steps import Exchange, Steps
from .arenas import ArenaMap
from .pins import Pins
from .places import pieces_of


class SharedMemoryTransport:
    """For clients on the host of the store."""

    name = "shm"
    remote = False

    def __init__(self, arenas: ArenaMap, pins: Pins) -> None:
        self._arenas = arenas
        self._pins = pins

    def stage(self, where: Range) -> np.ndarray:
        place = self._arenas.write(where.arena, where.start, where.stop)
        self._pins.writing(place)
        return place

    def send(self, unit: int, where: Range, block: np.ndarray, deadline: float) -> list[Exchange]:
        return []  # it is in its place

    def read(self, places: Places, fields: Sequence[str] | None, deadline: float) -> Steps[dict[str, Column]]:
        yield from ()
        views: list[np.ndarray] = []
        for at, handle in enumerate(places.blocks):
            try:
                view = self._arenas.read(handle.arena, handle.start, handle.stop)
            except BaseException:
                self._pins.let_go(*(later.block for later in places.blocks[at:]))
                raise
            self._pins.hold(handle.block, view)
            views.append(view)
        blocks: list[dict[str, Column]] = []
        for handle, view in zip(places.blocks, views, strict=True):
            header, frame = read_block(view, handle.grant, f"arena {handle.arena} at {handle.start}")
            blocks.append(decode(header, frame, verify=False))
        pieces = pieces_of(places, blocks, fields)
        return {name: assemble(runs, places.rows) for name, runs in pieces.items()}

    def close(self) -> None:
        self._arenas.close()
