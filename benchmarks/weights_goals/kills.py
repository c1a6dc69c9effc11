"""One process is killed in the middle of a transfer: when the others are done, against a normal transfer."""

import time

from claims import at_most, figure, load_note, median, print_claim
from measure.child import ChildError
from measure.cpu_clock import Meanwhile

from .fleet import TCP, Fleet
from .sides import Sides
from .workers import Worker, together

RECEIVERS = 4
EXTRA_SECONDS = 2.0
WHEN = (0.4, 0.2, 0.0)
"""Of a normal transfer, when the kill comes; the next one where the victim was done before."""


def measure(sides: Sides) -> None:
    """Print the claims: for a relay, which others pull from, and for a receiver, which nobody does."""
    others = Meanwhile()
    with Fleet(sides, RECEIVERS, TCP) as fleet:
        for _ in range(2):
            fleet.round()
        sent = _sent(fleet)
        normal = median([fleet.round()["transfer"] for _ in range(sides.rounds(5, quick=3))])
        served = [after - before for before, after in zip(sent, _sent(fleet), strict=True)]
        order = sorted(range(RECEIVERS), key=lambda at: served[at])
        for name, victim in (("receiver", order[0]), ("relay", order[-1])):
            seconds = [killed(fleet, victim, normal) for _ in range(sides.rounds(3, quick=1))]
            report(name, fleet.needed() // RECEIVERS, normal, seconds, load_note(others.others()))


def killed(fleet: Fleet, at: int, normal: float) -> float:
    """Seconds from the end of the freeze until all but one have the version, that one killed on the way.

    Its place is taken by a new process afterwards. One that was already done is killed earlier next time.
    """
    for when in WHEN:
        victim = fleet.subscribers[at]
        survivors = [one for one in fleet.subscribers if one is not victim]
        fleet.expect(fleet.subscribers)
        published = fleet.publish()
        time.sleep(max(published["frozen"] + when * normal - time.monotonic(), 0.0))
        victim.kill()
        done = fleet.done(survivors)["done"]
        was_done = _answered(victim)
        fleet.subscribers[at] = fleet.join(
            at
        )  # of the same name: nobody waits for the victim's lease to lapse
        fleet.catch_up(fleet.subscribers[at])
        fleet.settle(survivors, whole=True)
        if not was_done:
            return done - published["frozen"]
    raise RuntimeError(
        f"transfers of {normal:.3f} s are too short to be killed in the middle: give more weights"
    )


def _answered(victim: Worker) -> bool:
    try:
        victim.answer()
    except ChildError:
        return False
    return True


def report(name: str, nbytes: int, normal: float, seconds: list[float], load: str) -> None:
    """The claim of one kind of victim."""
    how = (
        f"{nbytes / 1e6:.0f} MB over tcp to {RECEIVERS} receivers; kill -9 at {WHEN[0]:.0%} of a normal "
        f"transfer ({normal:.2f} s, median), earlier where the victim was done by then; the worst of "
        f"{len(seconds)}; survivors compared bit by bit; {load}"
    )
    print_claim(
        at_most(
            f"kill -9 of a {name}: survivors are done, less 1.1 x a normal transfer",
            max(seconds) - 1.1 * normal,
            "s",
            EXTRA_SECONDS,
            how,
        )
    )
    print_claim(figure(f"kill -9 of a {name}: survivors are done", max(seconds), "s", how))


def _sent(fleet: Fleet) -> list[float]:
    return [counts["sent"] for counts in together(fleet.subscribers, "counts")]
