"""Ranks that train in one cut, engines in another: what is moved, over what is needed."""

from dataclasses import dataclass

from claims import at_most, figure, median, print_claim

from .fleet import TCP, Fleet
from .sides import Sides

COUNTED = "bytes that arrived from the ranks and the engines, requests and all, as the kernel counts"


@dataclass(frozen=True)
class Case:
    """From a cut over ranks to one over engines, which keep q, k, v, and gate, up, in one tensor each."""

    name: str
    ranks: int
    ranks_cut: str
    engines: int
    engines_cut: str


CASES = (
    Case("TP2 -> TP4", 2, "tp2", 4, "tp4"),
    Case("TP4 -> TP1", 4, "tp4", 1, "whole"),
    Case("PP2 -> PP1", 2, "pp2", 1, "whole"),
)


def measure(sides: Sides) -> None:
    """Print the claims."""
    for case in CASES:
        reshard(sides, case)


def reshard(sides: Sides, case: Case) -> None:
    """One case."""
    count = sides.rounds(5, quick=2)
    shares: list[float] = []
    seconds: list[float] = []
    with Fleet(
        sides,
        case.engines,
        TCP,
        nbytes=sides.nbytes // 2,
        ranks=case.ranks,
        cut=case.ranks_cut,
        engines={"cut": case.engines_cut, "fused": True},
    ) as fleet:
        needed = fleet.needed()
        for _ in range(count):
            before = fleet.counts()
            fleet.expect(fleet.subscribers)
            published = fleet.publish()
            done = fleet.done(fleet.subscribers)["done"]
            after = fleet.counts()
            fleet.settle(fleet.subscribers, whole=True)
            moved = sum(after[name] - before[name] for name in ("sent", "sent by subscribers"))
            shares.append(moved / needed)
            seconds.append(done - published["frozen"])
    how = (
        f"{needed / 1e6:.0f} MB needed by {case.engines} engines with fused qkv and gate_up, from "
        f"{case.ranks} ranks over tcp; {count} versions, each compared bit by bit in every engine"
    )
    print_claim(
        at_most(
            f"reshard {case.name}: bytes on the wire, over the bytes needed",
            max(shares),
            "x",
            1.05,
            f"{how}; the worst; {COUNTED}",
        )
    )
    print_claim(
        figure(f"reshard {case.name}: time to the last engine", median(seconds), "s", f"{how}; median")
    )
