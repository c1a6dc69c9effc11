"""The goals of transferqueue (its design's table), each with what it is held against measured in turn.

    python benchmarks/queue.py [--quick] [--only NAME]

Peers live in an environment of their own: `make bench-peers`. One that is not there is skipped with a line
that says so: {"skipped": "...", "why": "..."}.
"""

# `claims` first: it moves this folder, where this file would hide the standard library's `queue`, behind it.
from claims import print_machine  # isort: split

import argparse
import os

from queue_goals import depth, encoding, footprint, large, network, small, streaming
from queue_goals.sides import Sides

GOALS = {
    "encode": encoding.measure,
    "memory": footprint.memory,
    "idle": footprint.idle,
    "start": footprint.start,
    "depth": depth.measure,
    "network": network.measure,
    "small": small.measure,
    "large": large.measure,
    "streaming": streaming.measure,
}
"""In an order that starts the peers, which keep cores busy even when nobody asks them anything, last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: under a minute")
    parser.add_argument("--only", choices=GOALS, action="append", help="this one; may be given again")
    arguments = parser.parse_args()
    # Without bytecode every process of a store compiles the package again, which no user's does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    print_machine()
    with Sides(arguments.quick) as sides:
        for name in arguments.only or GOALS:
            GOALS[name](sides)


if __name__ == "__main__":
    main()
