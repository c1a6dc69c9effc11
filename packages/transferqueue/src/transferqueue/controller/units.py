"""The storage units as the controller sees them: who is there, and what they have been told to do."""

import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import StorageLost, Unauthorized
from ..wire.messages import (
    Announce,
    Attach,
    Compact,
    Done,
    Expect,
    Forget,
    Load,
    Order,
    Punch,
    Range,
    Reply,
    Report,
    Save,
    UnitAddress,
    encoder,
)
from ..wire.node import Arena, Call, Session
from .timers import Timers

log = logging.getLogger("transferqueue")

_CHECK_SECONDS = 0.7  # between two questions whether a unit still answers; after two it counts as lost

Finished = Callable[[str, dict[str, Any]], None]
"""Told how an order ended: the error in words ("" for none), and what the unit reported."""


@dataclass(slots=True, eq=False)
class Unit:
    """One that has announced itself.

    Attributes:
        silent: it did not answer in time, and is not chosen until it does.
        orders: not reported yet, with what to do then.
        unanswered: orders that were under way at the last check.
        awaited: orders that a client waits for.
        moved: payload bytes it has sent to and received from other hosts, as it said last.
    """

    address: UnitAddress
    session: Session
    silent: bool = False
    orders: dict[int, Finished] = field(default_factory=dict)
    unanswered: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    moved: tuple[int, int] = (0, 0)


class Units:
    """All of them.

    Args:
        expected: how many the store was started with.
        secret: what a unit has to know.
        arenas: the arenas there are, for a unit that comes (again).
        unwritten: what is granted through a unit and not written yet, for one that comes again.
        fell_silent: told of a unit that does not answer any more.
    """

    def __init__(
        self,
        expected: int,
        secret: str,
        arenas: Callable[[], Sequence[Arena]],
        unwritten: Callable[[int], Sequence[Range]],
        timers: Timers,
        fell_silent: Callable[[int], None],
    ) -> None:
        self.expected = expected
        self._secret = secret.encode()
        self._arenas = arenas
        self._unwritten = unwritten
        self._timers = timers
        self._fell_silent = fell_silent
        self._units: dict[int, Unit] = {}
        self._next_order = 1
        self._turn = 0
        # Units that an earlier life of the controller knew do as it said until they hear from this one.
        self._unheard: dict[int, list[tuple[Any, Finished]]] = {}
        self._remembered: dict[int, UnitAddress] = {}

    @property
    def addresses(self) -> list[UnitAddress]:
        """Of those that are there, and of those that an earlier life of the controller knew."""
        known = self._remembered | {number: unit.address for number, unit in self._units.items()}
        return [known[number] for number in sorted(known)]

    @property
    def all_there(self) -> bool:
        return len(self._units) >= self.expected

    def alive(self, number: int) -> bool:
        return number in self._units and not self._units[number].silent

    def await_all(self, addresses: Sequence[UnitAddress]) -> None:
        """Units that are still to come know an earlier life of the controller: what they are told waits until
        they are here.
        """
        self._remembered = {address.number: address for address in addresses}
        self._unheard = {number: [] for number in range(self.expected)}

    def silent(self, number: int) -> bool:
        """Whether it is there, and does not answer."""
        return number in self._units and self._units[number].silent

    def numbers(self) -> Sequence[int]:
        return sorted(self._units)

    def announce(self, call: Call, body: Announce) -> None:
        """A unit is here, for the first time or again. Unauthorized if it is none of this store's."""
        if not (call.local and hmac.compare_digest(body.secret.encode(), self._secret)):
            raise Unauthorized("only a storage unit that was started with this store may announce itself")
        self._remembered.pop(body.number, None)
        unit = Unit(body.address, call.session)
        self._lose(body.number, "was replaced")
        self._units[body.number] = unit
        call.reply(Done())
        for arena in self._arenas():
            self._order(body.number, Attach(arena[0].arena, arena[0].nbytes), _nothing, [arena])
        for where in self._unwritten(body.number):
            self._order(body.number, Expect(where), _nothing)
        for what, done in self._unheard.pop(body.number, ()):
            self._order(body.number, what, done)
        self._check(unit, body.number)

    def _check(self, unit: Unit, number: int) -> None:
        """Asks again and again for a sign of life: a process that is stopped keeps its connection."""
        if self._units.get(number) is not unit:
            return
        was_silent, unit.silent = unit.silent, bool(unit.unanswered) and unit.unanswered <= unit.orders.keys()
        if unit.silent and not was_silent:
            log.warning("storage unit %d does not answer", number)
            for order in unit.awaited & unit.orders.keys():
                unit.orders.pop(order)(f"storage unit {number} does not answer", {})
            unit.awaited.clear()
            self._fell_silent(number)
        if not unit.orders:
            self._order(number, Forget(0), _nothing)
        unit.unanswered = set(unit.orders)
        self._timers.at(self._timers.now() + _CHECK_SECONDS, lambda: self._check(unit, number))

    def attach(self, arena: Arena) -> None:
        """Tells every unit of a new arena."""
        for number in list(self._units):
            self._order(number, Attach(arena[0].arena, arena[0].nbytes), _nothing, [arena])

    def choose(self) -> int:
        """The next unit in turn that answers. StorageLost if there is none."""
        numbers = [number for number in sorted(self._units) if not self._units[number].silent]
        if not numbers:
            raise StorageLost("no storage unit answers", unit=-1, address="")
        self._turn += 1
        return numbers[self._turn % len(numbers)]

    def answering(self) -> list[int]:
        """Those that can be told to do something now."""
        return [number for number in sorted(self._units) if not self._units[number].silent]

    def copy(self, number: int, what: Save | Load, done: Finished) -> None:
        """Has a unit copy blocks to a file, or from one."""
        self._order(number, what, done)

    def expect(self, number: int, where: Range, done: Callable[[str], None]) -> None:
        """Lets a unit take writes; `done` is told why not, or ""."""
        order = self._order(number, Expect(where), lambda error, _: done(error))
        if order is not None:
            self._units[number].awaited.add(order)

    def forget(self, number: int, grant: int, done: Callable[[], None]) -> None:
        """Lets a unit take no more writes under a grant. A unit that is gone takes none anyway."""
        self._order(number, Forget(grant), lambda error, values: done())

    def compact(self, source: Range, rows: list[int], target: Range, done: Finished) -> bool:
        """Has some unit copy rows into a new block; returns whether there is one to do it."""
        numbers = [number for number in self._units if not self._units[number].silent]
        if not numbers:
            return False
        self._order(numbers[source.arena % len(numbers)], Compact(source, rows, target), done)
        return True

    def punch(self, arena: int, start: int, stop: int, done: Callable[[str], None]) -> bool:
        """Has some unit give pages back; returns whether there is one to do it."""
        numbers = [number for number in self._units if not self._units[number].silent]
        if not numbers:
            return False
        self._order(numbers[0], Punch(arena, start, stop), lambda error, values: done(error))
        return True

    def _order(self, number: int, what: Any, done: Finished, arenas: Sequence[Arena] = ()) -> int | None:
        unit = self._units.get(number)
        if unit is None and number in self._unheard:
            self._unheard[number].append((what, done))
            return
        connection = None if unit is None else unit.session.connection
        if unit is None or connection is None:
            done(f"storage unit {number} is gone", {})
            return None
        order, self._next_order = self._next_order, self._next_order + 1
        unit.orders[order] = done
        reply = Reply(0, Order(order, what), [here for here, _ in arenas])
        connection.send(encoder.encode(reply), None, [descriptor for _, descriptor in arenas])
        return order

    def report(self, call: Call, body: Report) -> None:
        unit = self._units[self.number_of(call)]
        call.reply(Done())
        unit.silent = False
        unit.awaited.discard(body.order)
        unit.moved = body.moved
        done = unit.orders.pop(body.order, None)
        if done is not None:
            done(body.error, body.values)

    def moved(self, number: int) -> tuple[int, int]:
        """Payload bytes sent to and received from other hosts, a moment ago; 0 of one yet to come."""
        unit = self._units.get(number)
        return (0, 0) if unit is None else unit.moved

    def number_of(self, call: Call) -> int:
        """Which unit is asking. Unauthorized if none is."""
        for number, unit in self._units.items():
            if unit.session is call.session:
                return number
        raise Unauthorized(f"{type(call.body).__name__} is for storage units to say")

    def gone(self, session: Session) -> None:
        """A connection has ended; if it was a unit's, the unit is lost."""
        for number, unit in list(self._units.items()):
            if unit.session is session:
                log.warning("storage unit %d is gone", number)
                self._lose(number, "is gone")

    def _lose(self, number: int, how: str) -> None:
        unit = self._units.pop(number, None)
        if unit is not None:
            for done in list(unit.orders.values()):
                done(f"storage unit {number} {how}", {})


def _nothing(error: str, values: dict[str, Any]) -> None:
    """For orders whose end nobody waits for."""
