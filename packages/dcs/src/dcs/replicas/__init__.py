"""Copies of training state in the memory of other processes: what outlives a trainer, without a disk.

A keeper runs on each node, outside of the ranks (`serve_keeper`, `dcs keeper`). Every rank has a `Replicas`,
which freezes a tree of tensors and plain data, and sees to it in the background that some keepers hold it.

What is guaranteed:

- `save` returns when the tree is frozen; whoever called may change its tensors at once. It waits for no
  keeper, only for memory of its own, and at most `block_seconds` (and five more, for a keeper to let go of
  what it maps).
- A step is complete when every rank's shard of it is held by a reachable keeper, whole and of one attempt.
  Only complete steps are restored, the newest one, and by all ranks the same: rank 0 chooses. The last `keep`
  complete steps stay; a step goes only once so many newer ones are complete, and never the last one of which
  all `copies` are made.
- What is restored has the bits, shapes, dtypes and devices that were saved. Each 4 MiB chunk has an xxh3-128,
  and the description of the tree has one: damage on the way is sent again, damage in a keeper's memory is
  found when the shard is restored, and another keeper is asked. Restoring with another number of ranks is
  refused.
- A start of a run (a session) takes over from the ones before it. What an old rank that wakes up saves is
  refused.
- A keeper that is lost, slow, full or refuses costs copies, never a step of training:
  `Saved.degraded` and `Saved.failed` say so, and the next keeper in turn takes the copy.
- Nothing is unpickled. A keeper that listens off loopback demands a token.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dcs.replicas.errors import KeeperFull, KeeperLost, UnsupportedLeaf, WorldSizeMismatch

if TYPE_CHECKING:
    from dcs.replicas.keeper import Keeper
    from dcs.replicas.messages import KeeperStatus
    from dcs.replicas.process import KeeperProcess, serve_keeper
    from dcs.replicas.replicas import Replicas
    from dcs.replicas.restoring import forget, restore, status
    from dcs.replicas.saving import Saved, Saving, Stats

__all__ = [
    "Keeper",
    "KeeperFull",
    "KeeperLost",
    "KeeperProcess",
    "KeeperStatus",
    "Replicas",
    "Saved",
    "Saving",
    "Stats",
    "UnsupportedLeaf",
    "WorldSizeMismatch",
    "forget",
    "restore",
    "serve_keeper",
    "status",
]

# Loaded when first used: a keeper needs no torch.
_HOME = {
    "Keeper": "keeper",
    "KeeperProcess": "process",
    "KeeperStatus": "messages",
    "Replicas": "replicas",
    "Saved": "saving",
    "Saving": "saving",
    "Stats": "saving",
    "forget": "restoring",
    "restore": "restoring",
    "serve_keeper": "process",
    "status": "restoring",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"dcs.replicas.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dcs.replicas' has no attribute {name!r}")
