from relax.engine.pacing import Pacer, Slot


def test_slots_are_handed_out_in_order_to_the_last_step() -> None:
    pacer = Pacer(groups=2, first_step=3, last_step=5)
    slots = [pacer.start(ordinal) for ordinal in range(4)]
    assert slots == [Slot(3, 0), Slot(3, 1), Slot(4, 0), Slot(4, 1)]
    assert pacer.peek() is None
    assert not pacer.exhausted
    for ordinal in range(4):
        pacer.finished(ordinal)
    assert pacer.exhausted


def test_a_failed_group_gives_its_slot_to_the_next_one() -> None:
    pacer = Pacer(groups=2, first_step=0, last_step=2)
    for ordinal in range(3):
        pacer.start(ordinal)
    pacer.failed(2)
    pacer.failed(1)
    assert pacer.start(3) == Slot(0, 1)
    assert pacer.start(4) == Slot(1, 0)
    assert pacer.start(5) == Slot(1, 1)
    assert pacer.failures_in_a_row == 2
    pacer.finished(3)
    assert pacer.failures_in_a_row == 0


def test_groups_go_on_the_bus_step_by_step() -> None:
    pacer = Pacer(groups=2, first_step=0, last_step=3)
    for ordinal in range(4):
        pacer.start(ordinal)
    assert pacer.may_put(0)
    assert not pacer.may_put(1)
    pacer.finished(0)
    pacer.failed(1)
    assert not pacer.may_put(1)  # the slot of the failed group is still to be filled
    assert pacer.start(4) == Slot(0, 1)
    assert not pacer.may_put(1)
    pacer.finished(4)
    assert pacer.may_put(1)
