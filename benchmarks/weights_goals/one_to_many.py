"""TCP from one to many: CPU-seconds per GB delivered and time to the last, against sockets in C."""

from claims import at_most, figure, load_note, median, print_claim, ratio_of_medians
from measure.cpu_clock import Meanwhile
from measure.rounds import Figures, in_turn

from .fleet import TCP, Fleet
from .peers import c_sockets
from .sides import Sides

GIGA = 1e9
MEASURED = "dcs, hashes measured"
"""Rounds of their own: reading a thread's clock costs as much as a third of a hash."""


def measure(sides: Sides) -> None:
    """Print the claims."""
    for receivers in sides.receivers:
        others = Meanwhile()
        with c_sockets(sides, receivers) as rounds, Fleet(sides, receivers, TCP) as fleet:
            count = sides.rounds(6)
            fleet.warm_up()
            ours = {"dcs": fleet.round, MEASURED: lambda fleet=fleet: fleet.round(hashes=True)}
            figures = in_turn({**ours, **rounds}, count, warm_up=0 if sides.quick else 1)
            nbytes = fleet.needed() // receivers
        report(receivers, count, nbytes, sides.nbytes, figures, load_note(others.others()))


def report(
    receivers: int, rounds: int, nbytes: int, c_nbytes: int, figures: dict[str, Figures], load: str
) -> None:
    """The claims for one number of receivers."""
    to = f"tcp, one to {receivers}"
    how = (
        f"{nbytes / 1e6:.0f} MB of bfloat16, 398 tensors, {receivers} receivers, every side a process, on "
        f"127.0.0.1; {rounds} rounds in turn, after others to warm up; medians; CPU-seconds user and system "
        "of all processes"
    )
    ours = figures["dcs"]
    delivered = nbytes * receivers / GIGA
    c_delivered = c_nbytes * receivers / GIGA
    whole = [cpu / delivered for cpu in ours["cpu"]]
    verifying = [cpu / delivered for cpu in figures[MEASURED]["verify cpu"]]
    moving = [cpu - median(verifying) for cpu in whole]
    apart = (
        "dcs without the thread that publishes, whose copy into the frozen arena is no part of sending (a "
        "figure of its own), its coordinator included, with its relays"
    )
    per_gb = {
        side: [cpu / c_delivered for cpu in found["cpu"]]
        for side, found in figures.items()
        if side not in ("dcs", MEASURED)
    }
    if "C" in per_gb:
        print_claim(
            at_most(
                f"{to}: CPU per GB of moving, against C",
                ratio_of_medians(moving, per_gb["C"]),
                "x",
                1.15,
                f"{how}; {apart}; what verifying costs (next line) is taken off; C: blocking sockets, a "
                f"thread a receiver, 4 MiB writes out of one buffer, receives into reused huge pages; {load}",
            )
        )
    print_claim(
        at_most(
            f"{to}: what verifying every chunk adds",
            ratio_of_medians(verifying, moving),
            "1",
            0.2,
            f"{how}; dcs always verifies, so each hash of a chunk in the receivers is measured where it is "
            f"made, by its thread's clock, in rounds of their own, over all else that dcs spends; {load}",
        )
    )
    notes = {
        "C": "C that does not verify",
        "C, verifying": "C that hashes each 4 MiB as it is whole, by the same xxh3",
    }
    for side, note in notes.items():
        if side in per_gb:
            print_claim(
                figure(
                    f"{to}: CPU per GB of moving and verifying, against {side}",
                    ratio_of_medians(whole, per_gb[side]),
                    "x",
                    f"{how}; {apart}; {note}; {load}",
                )
            )
    print_claim(
        figure(f"{to}: CPU per GB delivered, dcs", median(whole), "CPU-s/GB", f"{how}; {apart}; {load}")
    )
    frozen = [cpu / (nbytes / GIGA) for cpu in ours["freeze cpu"]]
    print_claim(
        figure(f"{to}: CPU per GB frozen, dcs", median(frozen), "CPU-s/GB", f"{how}; copy and hash; {load}")
    )
    for side, values in per_gb.items():
        print_claim(
            figure(f"{to}: CPU per GB delivered, {side}", median(values), "CPU-s/GB", f"{how}; {load}")
        )
    last = f"{to}: time to the last receiver"
    print_claim(
        figure(f"{last}, dcs", median(ours["transfer"]), "s", f"{how}; from the end of the freeze; {load}")
    )
    print_claim(
        figure(f"{last}, dcs with the freeze", median(ours["wall"]), "s", f"{how}; from publish(); {load}")
    )
    for side in per_gb:
        print_claim(figure(f"{last}, {side}", median(figures[side]["wall"]), "s", f"{how}; {load}"))
