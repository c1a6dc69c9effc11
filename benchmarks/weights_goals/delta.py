"""The difference of two versions: how much smaller, how fast, bit for bit over many steps, and end to end."""

import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from claims import Claim, at_least, at_most, figure, load_note, median, print_claim, ratio_of_medians
from dcs import delta
from measure.cpu_clock import Meanwhile
from measure.rounds import Figures, Round, in_turn

from .fleet import DELTA, TCP, Fleet
from .sides import Sides

CHUNK_BYTES = 4 << 20
"""What a delta is made of on the wire."""
LIMIT = CHUNK_BYTES // 4
UNIT = 2
SPREAD = 0.02
"""Standard deviation of the weights."""
UPDATE = 3.5e-7
"""Standard deviation of a step's update of them, at which 1 to 1.5% of the bfloat16 values change."""
DENSITY = 0.014
STEPS, QUICK_STEPS = 1000, 100
GIGA = 1e9
SPEEDS = {"encode": 1.5, "apply": 15, "bring up and apply": None, "apply in cache": None}
"""GB/s that are the goal."""
NOTES = {
    "encode": "base and new version compared and written down",
    "apply": "to a slot that holds the base, none of it in cache",
    "bring up and apply": "to a slot that holds the version before the base, as the older of two does",
    "apply in cache": "to a slot whose chunk was copied from the base just before",
}


def measure(sides: Sides) -> None:
    """Print the claims of the codec, of many steps, and of whole updates."""
    codec(sides)
    steps(sides)
    end_to_end(sides)


class Drift:
    """Weights in bfloat16 with a master copy in float32, as mixed precision keeps them.

    Args:
        values: how many.
    """

    def __init__(self, values: int) -> None:
        self._random = torch.Generator().manual_seed(3)
        self._master = SPREAD * torch.randn(values, generator=self._random)
        self._update = torch.empty_like(self._master)

    def bytes(self) -> np.ndarray:
        """uint8 ``[2 * values]``, of its own."""
        return self._master.to(torch.bfloat16).view(torch.uint8).numpy()

    def step(self) -> None:
        """Move every weight a little."""
        self._update.normal_(std=UPDATE, generator=self._random)
        self._master += self._update


def codec(sides: Sides) -> None:
    """Sizes, and GB of weights a second of one core."""
    others = Meanwhile()
    drift = Drift(sides.nbytes // 4 // UNIT)
    versions = [drift.bytes()]
    for _ in range(2):
        drift.step()
        versions.append(drift.bytes())
    _, base, new = versions
    changed = float((base.view(np.int16) != new.view(np.int16)).mean())
    count = sides.rounds(5, quick=3)
    figures = in_turn(
        {"plain": Coded(versions, compress=False).round, "zstd": Coded(versions, compress=True).round},
        count,
        warm_up=1,
    )
    how = (
        f"{len(base) / 1e6:.0f} MB of bfloat16 weights, of which one step changed {changed:.2%}, in chunks "
        f"of 4 MiB; applied by: {delta.implementation()}; one thread, by its clock; {count} rounds in turn; "
        f"medians; {load_note(others.others())}"
    )
    print_claim(figure("delta: values that the step changed", changed, "1", how))
    for name, smaller in (("plain", 45), ("zstd", 65)):
        size = f"delta, {name}: times smaller than the weights"
        print_claim(at_least(size, len(base) / median(figures[name]["bytes"]), "x", smaller, how))
        speed = {what: len(base) / GIGA / median(figures[name][what]) for what in SPEEDS}
        for what, goal in SPEEDS.items():
            claim = f"delta, {name}: {what}, weights a second of a core"
            value = speed[what]
            note = f"{NOTES[what]}; {how}"
            print_claim(
                at_least(claim, value, "GB/s", goal, note) if goal else figure(claim, value, "GB/s", note)
            )


class Coded:
    """A step's difference, encoded, and applied to two slots as a subscriber has them.

    Args:
        versions: three in a row, of which the last two are the base and the new one.
        compress: with zstd.
    """

    def __init__(self, versions: Sequence[np.ndarray], *, compress: bool) -> None:
        self._oldest, self._base, self._new = versions
        self._compress = compress
        self._older, self._slot = self._oldest.copy(), self._oldest.copy()
        starts = range(0, len(self._base), CHUNK_BYTES)
        self._chunks = [slice(start, start + CHUNK_BYTES) for start in starts]
        self._changed = [self._change(chunk) for chunk in self._chunks]

    def _change(self, chunk: slice) -> delta.Changed:
        payload = delta.encode(self._oldest[chunk], self._base[chunk], UNIT, LIMIT)
        changed = None if payload is None else delta.apply(payload, self._slot[chunk])
        if changed is None:
            raise RuntimeError("a chunk was found too dense for a delta, so nothing counts")
        return changed

    def round(self) -> dict[str, float]:
        """CPU-seconds of each of `SPEEDS`; `bytes` of the deltas."""
        spent = dict.fromkeys([*SPEEDS, "bytes"], 0.0)
        for chunk, changed in zip(self._chunks, self._changed, strict=True):
            base, slot, older = self._base[chunk], self._slot[chunk], self._older[chunk]
            clock = [time.thread_time()]
            payload = delta.encode(base, self._new[chunk], UNIT, LIMIT, compress=self._compress)
            clock.append(time.thread_time())
            if payload is None:
                raise RuntimeError("a chunk was found too dense for a delta, so nothing counts")
            delta.apply(payload, slot)
            clock.append(time.thread_time())
            delta.apply(payload, older, behind=changed)
            clock.append(time.thread_time())
            for what, (begun, ended) in zip(SPEEDS, itertools.pairwise(clock), strict=False):
                spent[what] += ended - begun
            slot[:] = base
            begun = time.thread_time()
            delta.apply(payload, slot)
            spent["apply in cache"] += time.thread_time() - begun
            spent["bytes"] += len(payload)
        if not (np.array_equal(self._slot, self._new) and np.array_equal(self._older, self._new)):
            raise RuntimeError("a delta did not give the new bits, so nothing counts")
        self._slot[:], self._older[:] = self._base, self._oldest
        return spent


def steps(sides: Sides) -> None:
    """Many steps in a row, in two slots as a subscriber has them."""
    count = QUICK_STEPS if sides.quick else STEPS
    drift = Drift(CHUNK_BYTES // UNIT)
    base = drift.bytes()
    slots = [base.copy(), base.copy()]
    changed: delta.Changed | None = None
    wrong = 0
    for step in range(count):
        drift.step()
        new = drift.bytes()
        payload = delta.encode(base, new, UNIT, LIMIT)
        if payload is None:
            raise RuntimeError(f"step {step} was found too dense for a delta, so nothing counts")
        slot = slots[step % 2]
        changed = delta.apply(payload, slot, behind=changed)
        if changed is None:
            raise RuntimeError(f"step {step} was too dense to bring the other slot up, so nothing counts")
        wrong += not np.array_equal(slot, new)
        base = new
    print_claim(
        at_most(
            f"delta: steps of {count:,} after which a bit differs",
            wrong,
            "steps",
            0,
            "4 MiB of weights, each step's delta against the one before, applied in two slots in turn; every "
            "byte compared after every step",
        )
    )


def end_to_end(sides: Sides) -> None:
    """Whole versions by TCP, with and without."""
    others = Meanwhile()
    receivers, count = 2, sides.rounds(6, quick=3)
    with Fleet(sides, receivers, DELTA) as small, Fleet(sides, receivers, TCP) as full:
        figures = in_turn({"delta": drifted(small), "full": drifted(full)}, count, warm_up=2)
        nbytes = full.needed() // receivers
    how = (
        f"{nbytes / 1e6:.0f} MB of bfloat16 to {receivers} receivers over tcp on 127.0.0.1, {DENSITY:.1%} of "
        f"the values changed by one step of bfloat16; {count} rounds in turn; medians; bits compared by "
        f"their hash; {load_note(others.others())}"
    )
    for claim in _end_to_end(figures, nbytes, receivers, how):
        print_claim(claim)


def drifted(fleet: Fleet) -> Round:
    """A version that differs in `DENSITY` of its values from the one before."""

    def once() -> dict[str, float]:
        fleet.publishers[0].ask("drift", density=DENSITY)
        return fleet.round(same_bits=True)

    return once


def _end_to_end(figures: dict[str, Figures], nbytes: int, receivers: int, how: str) -> Iterator[Claim]:
    small, full = figures["delta"], figures["full"]
    for what, name in (("wall", "publish() to all staged"), ("transfer", "end of the freeze to all staged")):
        yield figure(
            f"delta, end to end: {name}, over full", ratio_of_medians(small[what], full[what]), "x", how
        )
        for side, found in figures.items():
            yield figure(f"delta, end to end: {name}, {side}", median(found[what]), "s", how)
    sent = [a + b for a, b in zip(small["sent"], small["sent by subscribers"], strict=True)]
    yield figure(
        "delta, end to end: bytes on the wire, times smaller", receivers * nbytes / median(sent), "x", how
    )
    for side, found in figures.items():
        yield figure(
            f"delta, end to end: CPU of all but the freeze, {side}", median(found["cpu"]), "CPU-s", how
        )
