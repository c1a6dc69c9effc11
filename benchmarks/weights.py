"""The goals of dcs (its design's table), each with what it is held against measured in turn.

    python benchmarks/weights.py [--quick] [--only NAME] [--megabytes N]

A side that cannot be measured here is skipped with a line that says so: {"skipped": "...", "why": "..."}.
"""

# `claims` first: it moves this folder, whose queue.py would hide the standard one, behind everything else.
from claims import print_machine  # isort: split

import argparse
import os

import torch
from weights_goals import (
    against_gloo,
    delta,
    egress,
    kills,
    one_to_many,
    pause,
    replicas,
    reshard,
    same_host,
    stock_pause,
    through_files,
    torn,
)
from weights_goals.sides import Sides

GOALS = {
    "tcp": one_to_many.measure,
    "gloo": against_gloo.measure,
    "files": through_files.measure,
    "egress": egress.measure,
    "reshard": reshard.measure,
    "same-host": same_host.measure,
    "delta": delta.measure,
    "pause": pause.measure,
    "stock-pause": stock_pause.measure,
    "kills": kills.measure,
    "torn": torn.measure,
    "replicas": replicas.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: about a minute")
    parser.add_argument("--only", choices=GOALS, action="append", help="this one; may be given again")
    parser.add_argument("--megabytes", type=int, help="of the weights that are moved; 400, quick: 64")
    arguments = parser.parse_args()
    # Without bytecode every process compiles the packages again, which no user's does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    torch.set_num_threads(1)
    print_machine()
    with Sides(arguments.quick, arguments.megabytes) as sides:
        for name in arguments.only or GOALS:
            GOALS[name](sides)


if __name__ == "__main__":
    main()
