"""TCP against torch.distributed's broadcast over gloo: in buckets, and tensor by tensor."""

from claims import at_least, figure, load_note, median, print_claim, ratio_of_medians
from measure.cpu_clock import Meanwhile
from measure.rounds import in_turn
from weights_sides.payload import MANY_LAYERS

from .fleet import TCP, Fleet
from .peers import gloo
from .sides import WHOLE, Sides

RECEIVERS = 2
GIGA = 1e9


def measure(sides: Sides) -> None:
    """Print the claims."""
    others = Meanwhile()
    # Not as small as the rest of a quick run: what a tensor costs is the same however small it is.
    nbytes = sides.asked or (WHOLE // 2 if sides.quick else WHOLE)
    with (
        Fleet(sides, RECEIVERS, TCP, nbytes=nbytes, layers=MANY_LAYERS) as fleet,
        gloo(sides, RECEIVERS, nbytes, MANY_LAYERS) as rounds,
    ):
        count = sides.rounds(6, quick=1)
        fleet.warm_up()
        figures = in_turn({"dcs": fleet.round, **rounds}, count, warm_up=0 if sides.quick else 1)
        nbytes = fleet.needed() // RECEIVERS
    delivered = nbytes * RECEIVERS / GIGA
    how = (
        f"{nbytes / 1e6:.0f} MB of bfloat16 in {11 * MANY_LAYERS + 2:,} tensors to {RECEIVERS} receivers "
        f"on 127.0.0.1; {count} rounds in turn; medians; gloo broadcasts in place, packs nothing and "
        f"verifies nothing; dcs verifies every chunk, and is measured from the end of its freeze on, without "
        f"the thread that publishes; {load_note(others.others())}"
    )
    ours = figures["dcs"]
    names = {
        "buckets": ("bucketed broadcast (64 MiB)", 1.1),
        "tensors": ("a broadcast a tensor", 3.5),
    }
    for side, (name, goal) in names.items():
        for what, mine, unit in (("CPU", "cpu", "cpu"), ("time to the last", "transfer", "wall")):
            value = ratio_of_medians(figures[side][unit], ours[mine])
            print_claim(at_least(f"against gloo, {name}: times the {what} of dcs", value, "x", goal, how))
    moving = [cpu - verify for cpu, verify in zip(ours["cpu"], ours["verify cpu"], strict=True)]
    for side, (name, _) in names.items():
        claim = f"against gloo, {name}: times the CPU of dcs without its verifying"
        print_claim(figure(claim, ratio_of_medians(figures[side]["cpu"], moving), "x", how))
    for side, found in figures.items():
        name = side if side == "dcs" else f"gloo, {names[side][0]}"
        seconds = median(found["transfer" if side == "dcs" else "wall"])
        cpu = median(found["cpu"]) / delivered
        print_claim(figure(f"against gloo: CPU per GB delivered, {name}", cpu, "CPU-s/GB", how))
        print_claim(figure(f"against gloo: time to the last, {name}", seconds, "s", how))
