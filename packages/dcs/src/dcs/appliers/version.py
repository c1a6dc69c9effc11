"""What appliers are given, what they check before they touch anything, and what they report."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch

from dcs.errors import LayoutMismatch
from dcs.layout import Layout, spec_of


class Version(Protocol):
    """The part of `Staged` that an applier reads."""

    @property
    def version(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Applied:
    """What the newest version cost.

    Attributes:
        version, epoch: which one.
        nbytes: bytes of its tensors.
        seconds: of the whole call: checks, preparation, pause.
        pause_seconds: for how long of it the engine could not compute.
    """

    version: int
    epoch: int
    nbytes: int
    seconds: float
    pause_seconds: float


def check(version: Version, layout: Layout, engine: str) -> int:
    """Compare the tensors of a version with what an engine takes; returns their bytes.

    Raises `LayoutMismatch` for the first tensor (in name order) that is missing, not expected, or of
    another shape or dtype. Nothing is read but names, shapes and dtypes.
    """
    expected = {spec.name: spec for spec in layout.tensors}
    for name in sorted(expected.keys() | version.tensors.keys()):
        tensor, spec = version.tensors.get(name), expected.get(name)
        got = "absent" if tensor is None else str(spec_of(name, tensor))
        wanted = "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"
        if got != wanted:
            raise LayoutMismatch(
                f"tensor {name!r} of version {version.version} is {got}, but {engine} takes {wanted}; nothing"
                " was touched",
                name,
                got,
                wanted,
            )
    return sum(tensor.nbytes for tensor in version.tensors.values())


def in_dtype(layout: Layout, dtype: torch.dtype | None) -> Layout:
    """The layout with its floating tensors in `dtype`; the layout itself for None."""
    if dtype is None:
        return layout
    name = str(dtype).removeprefix("torch.")
    return Layout(
        tuple(
            msgspec.structs.replace(spec, dtype=name)
            if getattr(torch, spec.dtype).is_floating_point
            else spec
            for spec in layout.tensors
        )
    )
