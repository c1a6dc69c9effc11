"""A rank of a gloo group; rank 0 broadcasts the weights to the others, in place.

Nothing is packed and nothing is verified: the broadcast alone, out of the weights and into the same place.
"""

import datetime
import time

import torch.distributed as dist
from payload import Payload, digest

BUCKET_BYTES = 64 << 20
DEADLINE = datetime.timedelta(seconds=60)


def open_role(store: str, rank: int, size: int, nbytes: int, layers: int) -> "Rank":
    """Join the group that meets at the file `store`; blocks until all are there."""
    return Rank(store, rank, size, Payload(nbytes, layers))


class Rank:
    """One member of the group."""

    def __init__(self, store: str, rank: int, size: int, payload: Payload) -> None:
        self._receives = rank > 0
        self._payload = payload
        self._names = sorted(payload.tensors)
        if self._receives:
            payload.flat.zero_()
        meet = f"file://{store}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size, timeout=DEADLINE)
        self.calls = {"buckets": self.buckets, "tensors": self.tensors, "digest": self.digest}

    def buckets(self) -> dict[str, float]:
        """All of the memory, a bucket at a time."""
        begun = time.monotonic()
        for bucket in self._payload.flat.split(BUCKET_BYTES // 2):
            dist.broadcast(bucket, 0)
        return {"begun": begun, "done": time.monotonic()}

    def tensors(self) -> dict[str, float]:
        """Tensor by tensor."""
        begun = time.monotonic()
        for name in self._names:
            dist.broadcast(self._payload.tensors[name], 0)
        return {"begun": begun, "done": time.monotonic()}

    def digest(self) -> dict[str, str]:
        """Of what is there; a receiver forgets it, so that the next broadcast has to bring it again."""
        found = digest(self._payload.tensors)
        if self._receives:
            self._payload.flat.zero_()
        return {"digest": found}

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
