"""Weights through a file: who saves it, or one of those who load it.

Formats: `torch` (torch.save and torch.load) and `safetensors`.
"""

import time
from pathlib import Path

import torch
from payload import Payload, bits, stamps
from safetensors.torch import load_file, save_file


def open_role(nbytes: int) -> "FileUser":
    """With weights of that size, of which each tensor is an allocation of its own, as a model's are."""
    return FileUser({name: one.clone() for name, one in Payload(nbytes).tensors.items()})


class FileUser:
    """What one process does."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights
        self.calls = {"save": self.save, "load": self.load}

    def save(self, path: str, kind: str, version: int) -> dict[str, float]:
        """Save the weights, stamped."""
        for tensor in self._weights.values():
            bits(tensor)[0] = version
        begun = time.monotonic()
        if kind == "torch":
            torch.save(self._weights, path)
        else:
            save_file(self._weights, path)
        return {"begun": begun, "done": time.monotonic()}

    def load(self, path: str, kind: str, version: int) -> dict[str, float]:
        """Have all of them in memory; raises for others than were saved."""
        if kind == "torch":
            loaded = torch.load(path, weights_only=True)
        else:
            loaded = self._weights
            for name, mapped in load_file(path).items():  # views of the mapped file: reading them is copying
                loaded[name].copy_(mapped)
        done = time.monotonic()
        if stamps(loaded) != {version}:
            raise RuntimeError(f"{Path(path).name} holds versions {stamps(loaded)}, {version} was saved")
        return {"done": done}

    def close(self) -> None:
        """Let go of the weights."""
        self._weights = {}
