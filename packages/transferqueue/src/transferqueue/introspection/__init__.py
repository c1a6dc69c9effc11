"""Looking into a running store: its statistics as data, ``transferqueue top``, and Prometheus.

`statistics` is what a store says of itself. `top` shows it to people and `endpoint` to Prometheus; they need
the extras ``top`` and ``metrics``, which are imported when used.
"""

from .statistics import MemoryStats, PartitionStats, StoreStats, TaskStats, UnitStats

__all__ = ["MemoryStats", "PartitionStats", "StoreStats", "TaskStats", "UnitStats"]
