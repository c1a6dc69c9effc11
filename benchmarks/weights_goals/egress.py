"""What leaves the trainer: with relays one payload, however many receive; for a late joiner nothing."""

from claims import at_most, figure, median, print_claim

from .fleet import TCP, Fleet
from .sides import Sides

RECEIVERS = (2, 4, 8)
QUICK_RECEIVERS = (2, 4)
COUNTED = "bytes that arrived from the connections of the trainer that serve weights, as the kernel counts"


def measure(sides: Sides) -> None:
    """Print the claims of relays, and of the joiner."""
    for receivers in QUICK_RECEIVERS if sides.quick else RECEIVERS:
        relays(sides, receivers)
    joiner(sides)


def relays(sides: Sides, receivers: int) -> None:
    """Publish to so many."""
    count = sides.rounds(5, quick=3)
    with Fleet(sides, receivers, TCP, nbytes=_size(sides)) as fleet:
        nbytes = fleet.needed() // receivers
        rounds = [fleet.round() for _ in range(count)]
    # The larger of what the kernel counted and what dcs says, so that no connection is overlooked.
    shares = [max(one["sent"], one["from ranks"]) / nbytes for one in rounds]
    print_claim(
        at_most(
            f"root egress with relays, {receivers} receivers: bytes sent by the trainer, over the payload",
            max(shares),
            "x",
            1.05,
            f"{nbytes / 1e6:.0f} MB over tcp; the worst of {count} versions, the first included; {COUNTED}",
        )
    )


def joiner(sides: Sides) -> None:
    """Let one join when two hold a version."""
    count = sides.rounds(5, quick=3)
    seconds: list[float] = []
    weights: list[float] = []
    sent: list[float] = []
    with Fleet(sides, 2, TCP, nbytes=_size(sides)) as fleet:
        for _ in range(count):
            fleet.round()
            late = fleet.join(2, join=False)
            before = fleet.counts()["sent"]
            begun = late.ask("join")["begun"]
            found = fleet.catch_up(late)
            seconds.append(found["done"] - begun)
            weights.append(found["from ranks"])
            sent.append(fleet.counts()["sent"] - before)
            late.ask("leave")
        nbytes = fleet.needed() // 2
    how = (
        f"{nbytes / 1e6:.0f} MB over tcp, two subscribers hold the newest version; {count} joiners; bit-exact"
    )
    print_claim(
        at_most(
            "joiner with two live peers: bytes of weights from the trainer",
            max(weights),
            "bytes",
            0,
            f"{how}; the worst; as dcs says; what the kernel counted is the next figure",
        )
    )
    print_claim(
        figure(
            "joiner with two live peers: all that the trainer's connections sent meanwhile",
            max(sent),
            "bytes",
            f"{how}; the worst; {COUNTED}",
        )
    )
    print_claim(
        figure("joiner with two live peers: from joining to staged", median(seconds), "s", f"{how}; median")
    )


def _size(sides: Sides) -> int:
    # Bytes are counted here, not seconds: a quarter of the weights shows the same.
    return sides.nbytes // 4
