"""How long a stock SGLang stands still for a version: it receives through its own calls while it is "
"paused."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from claims import figure, load_note, median, print_claim
from dcs.appliers import SglangApplier, StateDictApplier
from measure.cpu_clock import Meanwhile
from measure.rounds import Round, in_turn
from weights_sides.payload import Payload

from .sides import BENCHMARKS, MEGA, Sides

PYTHON = BENCHMARKS.parent / ".engines" / "sglang" / "bin" / "python"
NBYTES = 100 * MEGA
START_SECONDS = 240.0
GIGA = 1e9
NAME = "SGLang's stock calls"


@dataclass(frozen=True)
class Version:
    """What an applier is given."""

    version: int
    epoch: int
    tensors: Mapping[str, torch.Tensor]


def measure(sides: Sides) -> None:
    """Print the figures."""
    if not PYTHON.exists():
        sides.skip(NAME, "there is no .engines/sglang; `make engines` makes it")
        return
    if sides.quick:
        sides.skip(NAME, "its start takes half a minute, and this is a quick run")
        return
    others = Meanwhile()
    payload, count = Payload(NBYTES), sides.rounds(5)
    words = {"python": str(PYTHON), "folder": str(sides.folder / "model"), "nbytes": NBYTES}
    with (
        sides.child("sglang_server.py", seconds=START_SECONDS, **words) as server,
        SglangApplier(server.ready["url"], mode="tensor") as by_http,
        SglangApplier(server.ready["url"], mode="distributed") as by_gloo,
    ):
        here = StateDictApplier({name: torch.ones_like(one) for name, one in payload.tensors.items()})
        appliers = {"inside HTTP calls": by_http, "by gloo": by_gloo, "StateDictApplier": here}
        rounds = {name: applying(applier, payload) for name, applier in appliers.items()}
        figures = in_turn(rounds, count, warm_up=1)
    how = (
        f"{payload.nbytes / 1e6:.0f} MB of bfloat16, a Qwen3 of 398 tensors, SGLang on CPUs, without "
        f"requests; pause, receive and load, flush, continue; {count} rounds in turn; medians; "
        f"{load_note(others.others())}"
    )
    for name, found in figures.items():
        seconds = median(found["pause"]) / (payload.nbytes / GIGA)
        where = "in this process, staged" if name == "StateDictApplier" else "SGLang, stock calls"
        print_claim(figure(f"pause for a GB: {where}, {name}", seconds, "s/GB", how))


def applying(applier: SglangApplier | StateDictApplier, payload: Payload) -> Round:
    """A version more, by this applier."""
    version = 0

    def once() -> dict[str, float]:
        nonlocal version
        version += 1
        payload.stamp(version)
        applier(Version(version, 1, payload.tensors))
        assert applier.last is not None
        return {"pause": applier.last.pause_seconds}

    return once
