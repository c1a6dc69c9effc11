"""How long an engine stands still for a version that is staged: the bytes over what a copy moves in a "
"second."""

from claims import at_most, figure, load_note, median, print_claim, ratio_of_medians
from measure.cpu_clock import Meanwhile
from measure.rounds import Round, in_turn

from .fleet import MAPPED, TCP, Fleet
from .sides import Sides

STAGED = {"in its own slot": TCP, "in the trainer's memory, mapped": MAPPED}


def measure(sides: Sides) -> None:
    """Print the claims."""
    for where, options in STAGED.items():
        others = Meanwhile()
        with Fleet(sides, 1, options) as fleet:
            engine = fleet.subscribers[0]
            count = sides.rounds(10, quick=4)
            bandwidth: Round = lambda engine=engine: engine.ask("copy")  # noqa: E731
            figures = in_turn({"apply": applied(fleet), "copy": bandwidth}, count, warm_up=3)
            nbytes = fleet.needed()
        how = (
            f"{nbytes / 1e6:.0f} MB staged {where}, copied in place into 398 tensors of an engine by "
            f"StateDictApplier; {count} rounds in turn; medians; {load_note(others.others())}"
        )
        pauses, copies = figures["apply"]["pause"], figures["copy"]
        print_claim(
            at_most(
                f"pause, staged {where}: over the bytes by copy bandwidth",
                ratio_of_medians(pauses, copies["torch"]),
                "x",
                1.2,
                f"against torch's copy of one tensor of as many bytes in the same process; {how}",
            )
        )
        memcpy = f"pause, staged {where}: over one memcpy of as many bytes"
        note = "which writes past the cache, as copies of single tensors do not"
        print_claim(figure(memcpy, ratio_of_medians(pauses, copies["memcpy"]), "x", f"{note}; {how}"))
        print_claim(figure(f"pause, staged {where}", median(pauses), "s", how))
        for name, seconds in copies.items():
            claim = f"pause, staged {where}: copy of as many bytes, {name}"
            print_claim(figure(claim, median(seconds), "s", how))


def applied(fleet: Fleet) -> Round:
    """A version is staged, then applied; `pause` as the applier reports it."""

    def once() -> dict[str, float]:
        engine = fleet.subscribers[0]
        fleet.expect([engine])
        fleet.publish()
        fleet.done([engine])
        answer = engine.ask("apply")
        fleet.settle([engine], whole=False)
        return answer

    return once
