"""Four receivers on the trainer's host: mapped, a version costs all of them about one memcpy."""

import time

import numpy as np
from claims import at_most, figure, load_note, median, print_claim, ratio_of_medians
from measure.cpu_clock import Meanwhile
from measure.rounds import Round, in_turn
from queue_sides.buffers import touched

from .fleet import MAPPED, Fleet
from .sides import Sides

RECEIVERS = 4


def measure(sides: Sides) -> None:
    """Print the claims."""
    others = Meanwhile()
    with Fleet(sides, RECEIVERS, MAPPED) as fleet:
        count = sides.rounds(10, quick=4)
        nbytes = fleet.needed() // RECEIVERS
        figures = in_turn({"dcs": fleet.round, "memcpy": memcpy(nbytes)}, count, warm_up=3)
    ours, copies = figures["dcs"], figures["memcpy"]
    how = (
        f"{nbytes / 1e6:.0f} MB from publish() to staged in all {RECEIVERS} receivers, who map what the "
        f"trainer froze; memcpy of the same bytes between two buffers, touched before, in huge pages; "
        f"{count} rounds in turn; medians; {load_note(others.others())}"
    )
    cpu = [moving + freeze for moving, freeze in zip(ours["cpu"], ours["freeze cpu"], strict=True)]
    print_claim(
        at_most(
            "same host, four receivers, mapped: time from publish() to all staged, over one memcpy",
            ratio_of_medians(ours["wall"], copies["wall"]),
            "x",
            1.2,
            how,
        )
    )
    print_claim(
        at_most(
            "same host, four receivers, mapped: CPU of all processes, over one memcpy",
            ratio_of_medians(cpu, copies["cpu"]),
            "x",
            1.2,
            how,
        )
    )
    print_claim(figure("same host: publish() to all staged, dcs", median(ours["wall"]), "s", how))
    print_claim(figure("same host: end of the freeze to all staged, dcs", median(ours["transfer"]), "s", how))
    print_claim(
        figure("same host: CPU of the thread that publishes, dcs", median(ours["freeze cpu"]), "CPU-s", how)
    )
    print_claim(figure("same host: CPU of all else, dcs", median(ours["cpu"]), "CPU-s", how))
    print_claim(figure("same host: memcpy", median(copies["wall"]), "s", how))


def memcpy(nbytes: int) -> Round:
    """Copies so many bytes from one buffer to another."""
    source, target = touched(nbytes), touched(nbytes)

    def copy() -> dict[str, float]:
        begun, cpu = time.perf_counter(), time.thread_time()
        np.copyto(target, source)
        return {"wall": time.perf_counter() - begun, "cpu": time.thread_time() - cpu}

    return copy
