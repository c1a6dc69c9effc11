"""TCP against weights that are saved to a file and loaded by every receiver."""

from pathlib import Path

from claims import figure, load_note, median, print_claim
from measure.cpu_clock import Meanwhile
from measure.rounds import in_turn

from .fleet import MAPPED, TCP, Fleet
from .peers import files
from .sides import Sides, memory_folder

RECEIVERS = 2
GIGA = 1e9


def measure(sides: Sides) -> None:
    """Print the figures."""
    if not sides.has("safetensors", "safetensors on disk"):
        return
    others = Meanwhile()
    with (
        memory_folder() as memory,
        Fleet(sides, RECEIVERS, TCP) as over_tcp,
        Fleet(sides, RECEIVERS, MAPPED) as mapped,
        files(sides, RECEIVERS, {"torch": Path(memory), "safetensors": sides.folder}) as rounds,
    ):
        count = sides.rounds(5)
        over_tcp.warm_up()
        mapped.warm_up()
        figures = in_turn(
            {"dcs, tcp": over_tcp.round, "dcs, mapped": mapped.round, **rounds}, count, warm_up=1
        )
        nbytes = over_tcp.needed() // RECEIVERS
    delivered = nbytes * RECEIVERS / GIGA
    how = (
        f"{nbytes / 1e6:.0f} MB of bfloat16, 398 tensors, from one process to {RECEIVERS}; {count} rounds in "
        f"turn; medians; {load_note(others.others())}"
    )
    names = {
        "dcs, tcp": "publish() to staged, freeze and verification included",
        "dcs, mapped": "publish() to staged, freeze included",
        "torch": "torch.save to /dev/shm and torch.load by each",
        "safetensors": "save_file to disk, no fsync, and load_file by each, copied into tensors there",
    }
    for side, note in names.items():
        found = figures[side]
        cpu = [a + b for a, b in zip(found["cpu"], found.get("freeze cpu", [0.0] * count), strict=True)]
        print_claim(
            figure(
                f"against files: CPU per GB delivered, {side}",
                median(cpu) / delivered,
                "CPU-s/GB",
                f"{note}; {how}",
            )
        )
        print_claim(
            figure(f"against files: time to the last, {side}", median(found["wall"]), "s", f"{note}; {how}")
        )
