"""TCP against torch.distributed's broadcast over gloo: in buckets, and tensor by tensor."""

from claims import at_least, figure, load_note, median, print_claim, ratio_of_medians
from measure.cpu_clock import Meanwhile
from measure.rounds import in_turn
from weights_sides.payload import MANY_LAYERS

from .fleet import MAPPED, TCP, Fleet
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
        Fleet(sides, RECEIVERS, MAPPED, nbytes=nbytes, layers=MANY_LAYERS) as mapping,
        gloo(sides, RECEIVERS, nbytes, MANY_LAYERS) as rounds,
    ):
        count = sides.rounds(6, quick=1)
        fleet.warm_up()
        mapping.warm_up()
        ours = {"dcs": fleet.round, "dcs, mapped": mapping.round}
        figures = in_turn({**ours, **rounds}, count, warm_up=0 if sides.quick else 1)
        nbytes = fleet.needed() // RECEIVERS
    delivered = nbytes * RECEIVERS / GIGA
    how = (
        f"{nbytes / 1e6:.0f} MB of bfloat16 in {11 * MANY_LAYERS + 2:,} tensors to {RECEIVERS} receivers "
        f"on 127.0.0.1; {count} rounds in turn; medians; gloo broadcasts in place, packs nothing and "
        f"verifies nothing; {load_note(others.others())}"
    )
    names = {
        "buckets": ("bucketed broadcast (64 MiB)", 1.1),
        "tensors": ("a broadcast a tensor", 3.5),
    }
    mapped, tcp = figures["dcs, mapped"], figures["dcs"]
    both = [moving + freeze for moving, freeze in zip(mapped["cpu"], mapped["freeze cpu"], strict=True)]
    ways = {
        "dcs as it moves weights on one machine, by mapping": (
            {"CPU": both, "time to the last": mapped["wall"]},
            "dcs from publish(), its freeze included; receivers map what the trainer froze",
        ),
        "dcs over tcp": (
            {"CPU": tcp["cpu"], "time to the last": tcp["transfer"]},
            "dcs verifies every chunk, and is measured from the end of its freeze on, without the thread "
            "that publishes",
        ),
    }
    for way, (found, note) in ways.items():
        for side, (name, goal) in names.items():
            for (what, mine), unit in zip(found.items(), ("cpu", "wall"), strict=True):
                value = ratio_of_medians(figures[side][unit], mine)
                claim = f"against gloo, {name}: times the {what} of {way}"
                print_claim(at_least(claim, value, "x", goal, f"{how}; {note}"))
    for side, found in figures.items():
        name = f"gloo, {names[side][0]}" if side in names else side
        seconds = median(found["transfer" if side == "dcs" else "wall"])
        cpu = median(both if side == "dcs, mapped" else found["cpu"]) / delivered
        print_claim(figure(f"against gloo: CPU per GB delivered, {name}", cpu, "CPU-s/GB", how))
        print_claim(figure(f"against gloo: time to the last, {name}", seconds, "s", how))
