"""Readers who look at every byte of what they were handed, while versions come as fast as they can."""

from claims import at_most, figure, print_claim

from .fleet import MAPPED, TCP, Fleet
from .sides import Sides

UPDATES, QUICK_UPDATES = 1000, 200
NBYTES = 8_000_000
SECONDS = 100.0


def measure(sides: Sides) -> None:
    """Print the claims."""
    updates = QUICK_UPDATES if sides.quick else UPDATES
    for name, options in (("tcp", TCP), ("mapped", MAPPED)):
        with Fleet(sides, 2, options, nbytes=NBYTES, layers=4) as fleet:
            publisher = fleet.publishers[0]
            for reader in fleet.subscribers:
                reader.tell("watch", until=updates, seconds=SECONDS)
            took = publisher.ask("storm", first=1, updates=updates)["seconds"]
            found = [reader.answer() for reader in fleet.subscribers]
        torn = [one for reader in found for one in reader["torn"]]
        how = (
            f"{updates} versions of {NBYTES / 1e6:.0f} MB published without a pause and scribbled over at "
            "once; 2 readers, each reads every byte of each version that it is handed, twice, 2 ms apart"
        )
        print_claim(
            at_most(
                f"sentinel readers, {name}: torn reads, of {updates:,} updates",
                len(torn),
                "reads",
                0,
                f"{how}; torn: {torn[:3]}" if torn else how,
            )
        )
        print_claim(
            figure(
                f"sentinel readers, {name}: versions seen", min(one["seen"] for one in found), "versions", how
            )
        )
        print_claim(figure(f"sentinel readers, {name}: updates published", updates / took, "versions/s", how))
