"""An engine of ours: takes versions, looks at them, and acknowledges them."""

import time
from typing import Any

import dcs
import numpy as np
import torch
from dcs.appliers import StateDictApplier
from members import Part
from payload import LAYERS, bits, digest, stamps
from socket_bytes import SentBytes
from verifying import Verifying

_LOOK_AGAIN_SECONDS = 0.002
_verifying = Verifying()
"""From the first role of this kind on."""


def open_role(
    address: str,
    run: str,
    name: str,
    nbytes: int,
    layers: int = LAYERS,
    cut: str = "whole",
    index: int = 0,
    fused: bool = False,
    join: bool = True,
    options: dict[str, Any] | None = None,
) -> "Engine":
    """Join a run, now or when told to; `options` go to `dcs.Subscriber`."""
    engine = Engine(Part(nbytes, layers, cut, index, fused), address, run, name, options or {})
    if join:
        engine.join()
    return engine


class Engine:
    """What one process does."""

    def __init__(self, part: Part, address: str, run: str, name: str, options: dict[str, Any]) -> None:
        self._part = part
        self._membership = address, run
        self._name = name
        self._options = options
        self._subscriber: dcs.Subscriber | None = None
        self._staged: dcs.Staged | None = None
        self._applier: StateDictApplier | None = None
        self._own: dict[str, torch.Tensor] = {}
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self.calls = {
            "join": self.join,
            "needs": self.needs,
            "take": self.take,
            "check": self.check,
            "digest": self.digest,
            "ack": self.ack,
            "apply": self.apply,
            "copy": self.copy,
            "watch": self.watch,
            "counts": self.counts,
            "measure": self.measure,
            "leave": self.leave,
        }

    @property
    def subscriber(self) -> dcs.Subscriber:
        """Of the run; an engine that has not joined has none."""
        assert self._subscriber is not None, "join first"
        return self._subscriber

    @property
    def staged(self) -> dcs.Staged:
        """The version that was taken."""
        assert self._staged is not None, "take a version first"
        return self._staged

    def join(self) -> dict[str, float]:
        """Become a member."""
        begun = time.monotonic()
        self._subscriber = dcs.Subscriber(
            *self._membership, name=self._name, layout=self._part.layout, **self._options
        )
        self._sent = SentBytes()
        return {"begun": begun}

    def needs(self) -> dict[str, int]:
        """Bytes of its tensors."""
        return {"bytes": self._part.nbytes}

    def take(self, after: int, seconds: float) -> dict[str, Any]:
        """Wait until a version above `after` is staged; `wire`, and bytes `from_ranks`, as dcs says it "
        "came."""
        self._staged = self.subscriber.next(after, seconds)
        done = time.monotonic()
        if self._staged is None:
            raise RuntimeError(f"nothing above version {after} in {seconds:g} s: {self.subscriber.health()}")
        return {
            "done": done,
            "version": self._staged.version,
            "wire": self._staged.wire,
            "from_ranks": self._staged.from_ranks,
        }

    def check(self, whole: bool) -> dict[str, float]:
        """Raise unless what is staged is what was published: by its stamps, or bit by bit."""
        version, tensors = self.staged.version, dict(self.staged.tensors)
        if not whole:
            if stamps(tensors) != {version}:
                raise RuntimeError(f"version {version} is staged with the stamps {stamps(tensors)}")
            return {}
        payload = self._part.payload()
        payload.stamp(version)
        expected = self._part.tensors(payload)
        names = sorted(expected.keys() | tensors.keys())
        wrong = [name for name in names if not _same(expected.get(name), tensors.get(name))]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {len(names)} tensors are not version {version}: {wrong[:4]}")
        return {}

    def digest(self) -> dict[str, str]:
        """Of what is staged."""
        return {"digest": digest(dict(self.staged.tensors))}

    def ack(self) -> dict[str, float]:
        """Commit what is staged."""
        self.staged.ack()
        self._staged = None
        return {}

    def apply(self) -> dict[str, float]:
        """Copy what is staged into tensors to compute with; raises unless it is there then."""
        if self._applier is None:
            self._own = {name: torch.ones_like(tensor) for name, tensor in self.staged.tensors.items()}
            self._applier = StateDictApplier(self._own)
        self._applier(self.staged)
        if stamps(self._own) != {self.staged.version}:
            raise RuntimeError(f"version {self.staged.version} was applied, {stamps(self._own)} is there")
        assert self._applier.last is not None
        return {"pause": self._applier.last.pause_seconds}

    def copy(self) -> dict[str, float]:
        """Copy as many bytes from one tensor to another: seconds by `torch`, and by `memcpy`."""
        if self._buffers is None:  # ordinary memory, as an engine's tensors are
            size = self._part.nbytes
            self._buffers = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        source, target = self._buffers
        begun = time.perf_counter()
        target.copy_(source)
        copied = time.perf_counter()
        np.copyto(target.numpy(), source.numpy())
        return {"torch": copied - begun, "memcpy": time.perf_counter() - copied}

    def watch(self, until: int, seconds: float) -> dict[str, Any]:
        """Take versions until number `until`; each is read whole, twice, while newer ones are published.

        Returns:
            How many were `seen`, and for each that was `torn` its number, the values found, and how it came.
        """
        deadline, after, seen = time.monotonic() + seconds, -1, 0
        torn: list[dict[str, Any]] = []
        while after < until:
            staged = self.subscriber.next(after, deadline - time.monotonic())
            if staged is None:
                health = self.subscriber.health()
                raise RuntimeError(f"only versions up to {after} of {until} came in {seconds:g} s: {health}")
            for _ in range(2):
                wrong = {n: bits(t) for n, t in staged.tensors.items() if (bits(t) != staged.version).any()}
                if wrong:
                    values = sorted({int(value) for t in wrong.values() for value in t.unique()})
                    torn.append(
                        {
                            "version": staged.version,
                            "values": values,
                            "tensors": len(wrong),
                            "wire": staged.wire,
                        }
                    )
                time.sleep(_LOOK_AGAIN_SECONDS)
            after, seen = staged.version, seen + 1
            staged.ack()
        return {"seen": seen, "torn": torn}

    def measure(self, on: bool) -> dict[str, float]:
        """Whether hashes are measured from now on."""
        _verifying.on = on
        return {}

    def counts(self) -> dict[str, float]:
        """CPU-seconds that verifying has cost while it was measured, and bytes sent to others."""
        return {"verify_cpu": _verifying.seconds, "sent": self._sent.read()}

    def leave(self) -> dict[str, float]:
        """Be no member any more."""
        subscriber, self._subscriber = self._subscriber, None
        if subscriber is not None:
            subscriber.close()
        return {}

    def close(self) -> None:
        """Leave the run."""
        self.leave()


def _same(expected: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    if expected is None or found is None or expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    return torch.equal(bits(expected), bits(found))
