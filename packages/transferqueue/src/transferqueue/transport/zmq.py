"""Payload over ZeroMQ, by way of the storage units."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import StorageLost
from ..values.columns import Column
from ..values.frame import decode
from ..wire.messages import Places, Range, Read, Values, Write
from ..wire.steps import Exchange, Steps, expect
from .pins import Pins
from .receive_buffers import ReceiveBuffers

_IDLE_BYTES = 1 << 28  # of memory kept for the next puts


class ZmqTransport:
    """For clients anywhere.

    Args:
        units: numbers of the storage units. Each of them can read every block.
        peer: the connection to one of them, made when first asked for.
        pins: of this client.
    """

    name = "zmq"
    remote = True

    def __init__(self, units: Callable[[], Sequence[int]], peer: Callable[[int], Any], pins: Pins) -> None:
        self._units = units
        self._peer = peer
        self._pins = pins
        self._turn = 0
        self._buffers = ReceiveBuffers(_IDLE_BYTES)

    def stage(self, where: Range) -> np.ndarray:
        return self._buffers.take(where.stop - where.start)

    def send(self, unit: int, where: Range, block: np.ndarray, deadline: float) -> list[Exchange]:
        return [Exchange(self._peer(unit), Write(where, 0), deadline, block)]

    def read(self, places: Places, fields: Sequence[str] | None, deadline: float) -> Steps[dict[str, Column]]:
        try:
            if not places.rows:
                return {}
            request = Read(places, None if fields is None else list(fields))
            units = list(self._units())
            self._turn += 1
            lost: StorageLost | None = None
            for at in range(len(units)):
                unit = units[(self._turn + at) % len(units)]
                try:
                    [answer] = yield [Exchange(self._peer(unit), request, deadline)]
                except StorageLost as error:
                    lost = error  # another unit has the same memory
                else:
                    values = expect(answer, Values)
                    return decode(values.frame, answer.payload, verify=not answer.summed)
            raise lost or StorageLost("the store has no storage unit", unit=-1, address="")
        finally:
            self._pins.let_go(*(handle.block for handle in places.blocks))
