"""A rank of ours that trains: publishes its part of the weights."""

import time
from typing import Any

import dcs
import numpy as np
import torch
from members import Part
from payload import LAYERS, digest
from socket_bytes import SentBytes


def open_role(
    address: str,
    run: str,
    nbytes: int,
    layers: int = LAYERS,
    cut: str = "whole",
    rank: int = 0,
    ranks: int = 1,
    options: dict[str, Any] | None = None,
) -> "Rank":
    """Join a run as one of its ranks; `options` go to `dcs.Publisher`."""
    part = Part(nbytes, layers, cut, rank, fused=False)
    publisher = dcs.Publisher(
        address, run, rank=rank, world_size=ranks, session=run, layout=part.layout, **(options or {})
    )
    return Rank(publisher, part)


class Rank:
    """What one process does."""

    def __init__(self, publisher: dcs.Publisher, part: Part) -> None:
        self._publisher = publisher
        self._part = part
        self._payload = part.payload()
        self._random = np.random.default_rng(8)
        self._sent = SentBytes(publisher.endpoint.port)
        self._ticket: dcs.Ticket | None = None
        self.calls = {
            "publish": self.publish,
            "settle": self.settle,
            "sent": self.sent,
            "digest": self.digest,
            "drift": self.drift,
            "storm": self.storm,
        }

    def publish(self, version: int) -> dict[str, float]:
        """Stamp and publish. `freeze_cpu`: CPU-seconds of this thread in the call: copy and hash."""
        self._payload.stamp(version)
        tensors = self._part.tensors(self._payload)
        begun, cpu = time.monotonic(), time.thread_time()
        self._ticket = self._publisher.publish(version, tensors)
        spent, stats = time.thread_time() - cpu, self._ticket.stats()
        frozen = begun + stats.wait_seconds + stats.freeze_seconds
        return {"begun": begun, "frozen": frozen, "freeze_cpu": spent}

    def settle(self, seconds: float) -> dict[str, Any]:
        """Wait until the newest version has been acknowledged by all who live."""
        assert self._ticket is not None, "publish first"
        stats = self._ticket.wait(seconds)
        return {"acked": sorted(stats.acked), "gone": stats.gone}

    def sent(self) -> dict[str, int]:
        """Bytes sent to all who pulled from here."""
        return {"bytes": self._sent.read()}

    def drift(self, density: float) -> dict[str, float]:
        """Change so large a share of the weights, chosen at random, to the next larger or smaller number."""
        values = self._payload.flat.view(torch.int16).numpy()
        where = self._random.integers(0, len(values), int(density * len(values)))
        values[where] += self._random.choice(np.array([-1, 1], np.int16), len(where))
        return {}

    def digest(self) -> dict[str, str]:
        """Of all weights as they are now."""
        return {"digest": digest(self._payload.tensors)}

    def storm(self, first: int, updates: int) -> dict[str, float]:
        """Publish so many versions, each all its own number, as fast as it goes; as soon as each call returns
        the tensors are scribbled over, as training does.
        """
        flat = self._payload.flat.view(torch.int16)
        begun = time.monotonic()
        for version in range(first, first + updates):
            flat.fill_(version)
            self._publisher.publish(version, self._payload.tensors)
            flat.fill_(-1)
        return {"seconds": time.monotonic() - begun}

    def close(self) -> None:
        """Leave the run."""
        self._publisher.close()
