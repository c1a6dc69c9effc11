"""What it costs a training step to keep its state in the memory of two keepers, and how fast they take it."""

import contextlib
import os
from collections.abc import Sequence

from claims import at_most, figure, load_note, median, print_claim, ratio_of_medians
from dcs.replicas import serve_keeper
from measure.child import Child
from measure.cpu_clock import Meanwhile, cpu_seconds
from measure.rounds import Round, in_turn

from .sides import MEGA, Sides
from .workers import ANSWER_SECONDS

KEEPERS = 2
STEPS, QUICK_STEPS = 7, 5
"""Of a round, after one that is not timed."""
BULK, QUICK_BULK = 400 * MEGA, 64 * MEGA
GIGA = 1e9
NAME = "a step of the quick start with replicas"


def measure(sides: Sides) -> None:
    """Print the claims."""
    if not sides.has("relax", NAME):
        return
    if sides.quick and sides.asked is None:
        sides.skip(NAME, "its imports take many seconds, and this is a quick run")
        return
    others = Meanwhile()
    with contextlib.ExitStack() as exits:
        keepers = [exits.enter_context(serve_keeper(parent=os.getpid())) for _ in range(KEEPERS)]
        addresses = [keeper.address for keeper in keepers]
        child = sides.child(
            "our_trainer.py", folder=str(sides.folder / "tiny"), keepers=addresses, name="actor"
        )
        trainer = exits.enter_context(child)
        pids = [trainer.pid, *(keeper.pid for keeper in keepers)]
        steps, rounds = (QUICK_STEPS if sides.quick else STEPS), sides.rounds(60, quick=4)
        sides_of_it: dict[str, Round] = {
            "alone": stepping(trainer, pids, steps, save=False),
            "saving": stepping(trainer, pids, steps, save=True),
            "again": stepping(trainer, pids, steps, save=False),
        }
        figures = in_turn(sides_of_it, rounds, warm_up=2)
        nbytes = trainer.ask(ANSWER_SECONDS, do="restore")["bytes"]
        size = QUICK_BULK if sides.quick else BULK
        bulk = [trainer.ask(ANSWER_SECONDS, do="bulk", nbytes=size) for _ in range(sides.rounds(6, quick=3))]
    alone, saving, again = figures["alone"], figures["saving"], figures["again"]
    unsaved = {name: alone[name] + again[name] for name in ("seconds", "cpu")}
    how = (
        f"a step of the quick start in one process (105k parameters, 64 samples of 16 tokens: generate, "
        f"train, commit, and copy the state), the state of {nbytes / 1e6:.1f} MB saved after each step to "
        f"{KEEPERS} keepers, processes on this machine, and restored bit for bit; {rounds} rounds in turn of "
        f"{steps} steps saved and twice as many that are not; medians of rounds' median steps; "
        f"{load_note(others.others())}"
    )
    print_claim(
        at_most(
            "replicas: what saving every step adds to the time of a step of the quick start",
            ratio_of_medians(saving["seconds"], unsaved["seconds"]) - 1,
            "1",
            0.03,
            f"wall clock of the trainer, beside the keepers on this machine's {os.cpu_count()} cores; {how}",
        )
    )
    noise = "replicas: how far apart the same measure puts steps that are not saved"
    print_claim(figure(noise, ratio_of_medians(again["seconds"], alone["seconds"]) - 1, "1", how))
    print_claim(figure("replicas: a step alone", median(unsaved["seconds"]), "s", how))
    print_claim(figure("replicas: a step that is saved", median(saving["seconds"]), "s", how))
    print_claim(figure("replicas: of which in save()", median(saving["saving"]), "s", how))
    cpu = "replicas: what saving adds to the CPU-seconds of a step, trainer and keepers"
    print_claim(figure(cpu, ratio_of_medians(saving["cpu"], unsaved["cpu"]) - 1, "1", how))
    how = f"{size / 1e6:.0f} MB saved as one tensor; medians of all but the first of {len(bulk)}; {how}"
    for what, name in (("freeze", "frozen"), ("held", f"held by {KEEPERS} keepers")):
        seconds = median([one[what] for one in bulk[1:]])
        print_claim(figure(f"replicas: {name}", size / GIGA / seconds, "GB/s", how))


def stepping(trainer: Child, pids: Sequence[int], steps: int, *, save: bool) -> Round:
    """So many steps."""

    def once() -> dict[str, float]:
        before = cpu_seconds(pids)
        found = trainer.ask(ANSWER_SECONDS, do="steps", count=steps, save=save)
        return {**found, "cpu": (cpu_seconds(pids) - before) / (steps + 1)}

    return once
