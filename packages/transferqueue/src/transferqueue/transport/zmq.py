"""Payload over ZeroMQ, by way of the storage units."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import StorageLost
from ..values.columns import Column
from ..values.frame import decode
from ..wire.messages import Places, Range, Read, Values, Write
from ..wire.steps import Exchange, Steps, expect
from .pins import Pins
from .receive_buffers import ReceiveBuffers

_QUIET_SECONDS = 1.5
_SHUNNED_SECONDS = 5.0
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
        self._shunned: dict[int, float] = {}
        self._buffers = ReceiveBuffers(_IDLE_BYTES)

    def stage(self, where: Range) -> np.ndarray:
        return self._buffers.take(where.stop - where.start)

    def send(self, unit: int, where: Range, block: np.ndarray, deadline: float) -> list[Exchange]:
        return [Exchange(self._peer(unit), Write(where, 0), deadline, block)]

    def _turns(self) -> Iterator[tuple[int, float | None]]:
        """Units to ask, one after the other, each with how long it may say nothing. One that did not answer
        lately comes last; when none has, the first is asked again and given all the time there is.
        """
        units = list(self._units())
        self._turn += 1
        at = self._turn % max(1, len(units))
        now = time.monotonic()
        units = sorted(units[at:] + units[:at], key=lambda unit: self._shunned.get(unit, 0.0) > now)
        if len(units) > 1:
            yield from ((unit, _QUIET_SECONDS) for unit in units)
        yield from ((unit, None) for unit in units[:1])

    def read(self, places: Places, fields: Sequence[str] | None, deadline: float) -> Steps[dict[str, Column]]:
        try:
            if not places.rows:
                return {}
            request = Read(places, None if fields is None else list(fields))
            lost: StorageLost | None = None
            for unit, quiet in self._turns():
                try:
                    [answer] = yield [Exchange(self._peer(unit), request, deadline, quiet=quiet)]
                except StorageLost as error:
                    lost = error  # another unit has the same memory
                    self._shunned[unit] = time.monotonic() + _SHUNNED_SECONDS
                else:
                    self._shunned.pop(unit, None)
                    values = expect(answer, Values)
                    return decode(values.frame, answer.payload, verify=not answer.summed)
            raise lost or StorageLost("the store has no storage unit", unit=-1, address="")
        finally:
            self._pins.let_go(*(handle.block for handle in places.blocks))

    def close(self) -> None:
        self._buffers.close()
