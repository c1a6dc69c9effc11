"""The frame of the benchmarks, which is no package: its folder goes on the path."""

import sys
from pathlib import Path

sys.path.append(
    str(Path(__file__).parents[2] / "benchmarks")
)  # first, its queue.py would hide the standard one
