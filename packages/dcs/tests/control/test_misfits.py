"""A trainer comes back with another layout: who does not fit says so, and goes on with the next that fits."""

import threading
import time

import dcs
import pytest
import torch

OLD = {"w": torch.zeros(1000)}
NEW = {"w": torch.zeros(2000)}


def taken(subscriber: dcs.Subscriber, after: int, seconds: float = 10.0) -> int:
    """The version that comes, however often it is said meanwhile that the layout does not fit."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while time.monotonic() < deadline:
        try:
            staged = subscriber.next(after, 1.0)
        except dcs.LayoutMismatch:
            pause.wait(0.02)
            continue
        if staged is not None:
            staged.ack()
            return staged.version
    raise AssertionError(f"nothing came: {subscriber.health()}")


def test_who_does_not_fit_a_new_trainer_says_so_and_takes_up_the_next_that_fits(
    publish_to, subscribe, eventually, no_leak
):
    applied: list[int] = []
    old, follows = subscribe(OLD, "old"), subscribe(OLD, "follows")
    follower = follows.follow(lambda staged: applied.append(staged.version))
    with publish_to(OLD) as right:
        right.publish(0, OLD)
        assert taken(old, -1) == follower.wait_for(0, 10) == 0
    new = subscribe(NEW, "new")  # nobody is there whom it would not fit
    with publish_to(NEW) as wrong:
        ticket = wrong.publish(1, NEW)
        assert taken(new, -1) == 1
        began = time.monotonic()
        for wait in (lambda: old.next(0, 10), lambda: follower.wait_for(1, 10)):
            with pytest.raises(dcs.LayoutMismatch, match=r"float32\[1000\], but .* float32\[2000\]"):
                wait()
        assert time.monotonic() - began < 5  # at once, and not when the time is over
        assert isinstance(old.health().error, dcs.LayoutMismatch)
        assert isinstance(follower.error, dcs.LayoutMismatch)
        assert list(ticket.wait(10).acked) == ["new"]
        wrong.publish(2, NEW)  # it stays with those that fit it
        assert taken(new, 1) == 2
    with publish_to(OLD) as right:
        right.publish(3, OLD)
        assert taken(old, 0) == 3
        eventually(lambda: applied == [0, 3])
        assert old.health().error is None
        assert follower.error is None
        assert follower.wait_for(3, 10) == 3
    for each in (old, follows, new):
        each.close()


def test_who_waits_for_a_trainer_that_fits_can_be_closed(publish_to, subscribe, no_leak):
    subscriber = subscribe(OLD)
    follower = subscriber.follow(lambda staged: None)
    publisher = publish_to(NEW)
    with pytest.raises(dcs.LayoutMismatch):
        follower.wait_for(0, 10)
    subscriber.close()
    publisher.close()
