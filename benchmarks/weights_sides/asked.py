"""The child's end of `measure.child`, and the folder of the benchmarks on the path for all else.

That folder goes last, as its queue.py would hide the standard one.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from queue_sides.answering import answer, work

__all__ = ["answer", "work"]
