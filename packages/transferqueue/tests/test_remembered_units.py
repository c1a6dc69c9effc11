"""Storage units that an earlier life of the controller knew, before they are here again."""

from transferqueue.controller.timers import Timers
from transferqueue.controller.units import Units
from transferqueue.wire.messages import UnitAddress


def test_a_unit_that_is_yet_to_come_is_told_of_as_not_alive_and_has_moved_nothing():
    units = Units(1, "secret", list, lambda _: (), Timers(), lambda _: None)
    units.await_all([UnitAddress(0, "127.0.0.1", 4711)])
    (address,) = units.addresses
    assert address.number == 0
    assert not units.alive(0)
    assert units.moved(0) == (0, 0)
