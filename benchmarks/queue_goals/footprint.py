"""What a store costs that does nothing, and how soon one is there."""

import time
from pathlib import Path

import transferqueue
from claims import at_most, figure, load_note, median, print_claim
from measure.cpu_clock import Meanwhile, cpu_seconds
from queue_sides.batches import rows

from .sides import Sides
from .store import Store

SETTLE_SECONDS = 1.0
"""From the last call to the idle time."""


def memory(sides: Sides) -> None:
    """Print what an empty store holds."""
    with transferqueue.serve(storage_units=2) as server, transferqueue.connect(server) as queue:
        queue.partition("train", tasks={"train": ["tokens"]})
        controller, *units = (process.pid for process in server.processes)
        held = {pid: proportional_set_size(pid) for pid in (controller, *units)}
        how = (
            "PSS, which counts a page that n processes share as 1/n of a page, after the start of a store of "
            "two storage units and one client's first partition, no sample put; with shared pages whole: "
        )
        for name, pids in (("controller", [controller]), ("storage unit, the larger", units)):
            most = max(pids, key=lambda pid: held[pid])
            resident = field(most, "status", "VmRSS")
            print_claim(at_most(f"empty memory of a {name}", held[most], "MB", 60, f"{how}{resident:.1f} MB"))


def idle(sides: Sides) -> None:
    """Print the CPU of a store that nobody calls."""
    seconds = 2.0 if sides.quick else 8.0
    others = Meanwhile()
    with Store() as store:
        store.round(rows(8))
        time.sleep(SETTLE_SECONDS)
        begun, before = time.monotonic(), [cpu_seconds([pid]) for pid in store.pids]
        time.sleep(seconds)
        wall = time.monotonic() - begun
        spent = [cpu_seconds([pid]) - until for pid, until in zip(store.pids, before, strict=True)]
    client, controller, *units = (100 * one / wall for one in spent)
    how = (
        f"{seconds:g} s with a partition open and nobody calling; controller {controller:.2f}, storage units "
        f"{', '.join(f'{unit:.2f}' for unit in units)}, a process with two clients {client:.2f}; "
        f"{load_note(others.others())}"
    )
    print_claim(at_most("idle CPU of all parts", client + controller + sum(units), "% of a core", 2, how))


def start(sides: Sides) -> None:
    """Print the time from nothing to the first put."""
    times = 3 if sides.quick else 9
    others = Meanwhile()
    seconds: list[float] = []
    for _ in range(times):
        begun = time.monotonic()
        with sides.child("our_start.py") as child:
            seconds.append(child.ready["put"] - begun)
    how = (
        f"median of {times}: from starting a Python process that serves a store, connects to it and puts, to "
        f"the put's acknowledgement, imports included; {load_note(others.others())}"
    )
    print_claim(at_most("start to first put", median(seconds), "s", 1, how))
    print_claim(figure("start to first put, the slowest", max(seconds), "s", how))


def proportional_set_size(pid: int) -> float:
    """PSS in MB."""
    return field(pid, "smaps_rollup", "Pss")


def field(pid: int, file: str, name: str) -> float:
    """A number of kB from a file of /proc, in MB (1e6 bytes)."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/{pid}/{file} has no {name}")
