"""Payload over UCX where it is large, and over ZeroMQ where it is small or UCX fails."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import QueueError, StorageLost
from ..values.block import read_block
from ..values.columns import Column, assemble
from ..values.frame import decode
from ..wire.channel import Answer, deadline_of
from ..wire.messages import Done, Handle, Places, Range, UnitAddress, Write
from ..wire.steps import Exchange, Steps
from .base import Unavailable
from .pins import Pins
from .places import pieces_of
from .ucx import UcxTransport, UcxUnusable, probe
from .zmq import ZmqTransport

_LARGE = 1 << 20  # bytes; below that a ZeroMQ round trip is faster


@dataclass(frozen=True)
class ReadBlocks:
    """Asks a unit for whole blocks."""

    blocks: Sequence[Handle]


@dataclass(eq=False, slots=True)
class _Pending:
    """A request under way, as `wire.link` waits for it."""

    deadline: float
    future: "Future[Answer]" = field(default_factory=Future)
    under: "Future[Any] | None" = None

    def withdraw(self) -> None:
        if self.under is not None:
            self.under.cancel()


class UcxUnit:
    """One storage unit, reached by UCX; takes requests like a peer of `wire.link`.

    Attributes:
        lost: it could not be reached; ZeroMQ goes on.
    """

    def __init__(self, host: str, port: int, token: str, number: int) -> None:
        self._transport = UcxTransport(host, port, token=token, unit=number)
        self.lost = False

    def submit(self, body: Any, payload: Any, timeout: float) -> _Pending:
        pending = _Pending(deadline_of(timeout))
        seconds = max(0.1, pending.deadline - time.monotonic())
        if isinstance(body, Write):
            where = body.range
            pending.under = self._transport.write(
                where.grant, where.arena, where.start, where.stop, payload, timeout=seconds
            )
        else:
            ranges = [(block.arena, block.start, block.stop) for block in body.blocks]
            pending.under = self._transport.read(ranges, timeout=seconds)
        pending.under.add_done_callback(lambda done: self._ended(pending, done))
        return pending

    def _ended(self, pending: _Pending, done: "Future[Any]") -> None:
        if done.cancelled():
            pending.future.set_exception(QueueError("given up"))
            return
        error = done.exception()
        if error is None:
            pending.future.set_result(Answer(Done(), done.result(), summed=True))
        else:
            self.lost = self.lost or isinstance(error, StorageLost)
            pending.future.set_exception(error)

    def close(self) -> None:
        self._transport.close()


class UcxPayload:
    """See `transport.base.Transport`.

    Args:
        units: where the storage units are.
        reach: a unit's host as this client reaches it.
        token: of the store.
        small: for all that UCX is not used for.
        pins: of this client.

    Raises:
        QueueError: UCX cannot be used; the message says why.
    """

    name = "ucx"
    remote = True

    def __init__(
        self,
        units: Sequence[UnitAddress],
        reach: Callable[[str], str],
        token: str,
        small: ZmqTransport,
        pins: Pins,
    ) -> None:
        self._small = small
        self._pins = pins
        self._turn = 0
        self._lock = threading.Lock()
        self._units: dict[int, UcxUnit] = {}
        offered = [unit for unit in units if unit.ucx]
        if not offered:
            raise QueueError("ucx: the store does not offer it; start it with ucx=True, or --ucx")
        why = probe(reach(offered[0].host), offered[0].ucx, token=token)
        if isinstance(why, Unavailable):
            raise QueueError(f"ucx: {why.why}")
        try:
            self._units = {u.number: UcxUnit(reach(u.host), u.ucx, token, u.number) for u in offered}
        except UcxUnusable as error:
            raise QueueError(f"ucx: {error}") from error

    def stage(self, where: Range) -> np.ndarray:
        return self._small.stage(where)

    def send(self, unit: int, where: Range, block: np.ndarray, deadline: float) -> list[Exchange]:
        peer = self._units.get(unit)
        if len(block) < _LARGE or peer is None or peer.lost:
            return self._small.send(unit, where, block, deadline)
        return [Exchange(peer, Write(where, 0), deadline, block)]

    def read(self, places: Places, fields: Sequence[str] | None, deadline: float) -> Steps[dict[str, Column]]:
        with self._lock:
            units = [unit for unit in self._units.values() if not unit.lost]
            self._turn += 1
            peer = units[self._turn % len(units)] if units else None
        wanted = sum(count for _, count, _, _ in places.runs)
        there = sum(block.rows for block in places.blocks)
        nbytes = sum(block.stop - block.start for block in places.blocks)
        # UCX moves whole blocks: where most of their rows are not wanted, a unit picks and sends the others.
        if peer is None or nbytes < _LARGE or 2 * wanted < there:
            return (yield from self._small.read(places, fields, deadline))
        try:
            [answer] = yield [Exchange(peer, ReadBlocks(places.blocks), deadline)]
        except StorageLost:
            return (yield from self._small.read(places, fields, deadline))
        self._pins.let_go(*(handle.block for handle in places.blocks))
        blocks: list[dict[str, Column]] = []
        for handle, view in zip(places.blocks, answer.payload, strict=True):
            header, frame = read_block(view, handle.grant, f"arena {handle.arena} at {handle.start}")
            blocks.append(decode(header, frame, verify=False))
        return {name: assemble(runs, places.rows) for name, runs in pieces_of(places, blocks, fields).items()}

    def close(self) -> None:
        """Idempotent."""
        for unit in self._units.values():
            unit.close()
        self._small.close()
