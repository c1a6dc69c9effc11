"""Experts of a layer in the files of a folder: three tensors an expert, or two for all of them.

    X.experts.N.gate_proj.weight and .up_proj.weight [inner, hidden], .down_proj.weight [hidden, inner]
    X.experts.gate_up_proj [experts, 2 x inner, hidden], X.experts.down_proj [experts, hidden, inner]

The two for all may also lie input by output, [experts, hidden, 2 x inner] and [experts, inner, hidden], as in
the published Qwen3-VL mixtures. A layout names experts one by one; a folder is written as its source is.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from dcs.layout import Piece
from torch import Tensor

from relax.backends.train.megatron.files import Named

_ONE = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


class Shapes(Protocol):
    """Tensors of a folder by name."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Box:
    """A box of a tensor in a folder; `transposed`: its last two dimensions are the wanted ones the other way
    round.
    """

    name: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    transposed: bool = False


def stored_box(piece: Piece, source: Shapes) -> Box:
    """Where the box of a piece lies in a folder."""
    found = _ONE.fullmatch(piece.source)
    if piece.source in source or found is None:
        return Box(piece.source, piece.start, piece.extent)
    name = f"{found['layer']}.{_FUSED[found['part']]}"
    if name not in source:
        return Box(piece.source, piece.start, piece.extent)
    height, width = piece.shape
    rows = height if found["part"] == "down_proj" else 2 * height
    (row, column), (tall, wide) = piece.start, piece.extent
    row += height if found["part"] == "up_proj" else 0
    number = int(found["number"])
    if source.shape(name)[1:] == (rows, width):
        return Box(name, (number, row, column), (1, tall, wide))
    return Box(name, (number, column, row), (1, wide, tall), transposed=True)


@dataclass(frozen=True)
class Stored[T: Named]:
    """A tensor of a file, and what it is made of.

    Attributes:
        name: in the file.
        members: one, or those of all experts of a layer: gate and up of each in turn, or down of each.
        transposed: see above.
    """

    name: str
    members: tuple[T, ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        if self.name == self.members[0].name:
            return self.members[0].shape
        height, width = self.members[0].shape
        pairs = self.name.endswith("gate_up_proj")
        own = (2 * height, width) if pairs else (height, width)
        experts = len(self.members) // (2 if pairs else 1)
        return (experts, *(reversed(own) if self.transposed else own))

    @property
    def dtype(self) -> torch.dtype:
        return self.members[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(member.nbytes for member in self.members)

    def assembled(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensor of the file, from those of the members."""
        if len(self.members) == 1 and self.name == self.members[0].name:
            return tensors[0]
        if self.name.endswith("gate_up_proj"):
            pairs = zip(tensors[::2], tensors[1::2], strict=True)
            tensors = [torch.cat(pair) for pair in pairs]
        whole = torch.stack(list(tensors))
        return whole.transpose(1, 2).contiguous() if self.transposed else whole


def stored[T: Named](planned: Sequence[T], source: Shapes | None, *, fused: bool) -> list[Stored[T]]:
    """How a folder holds tensors that a layout names; in name order.

    Args:
        planned: all tensors of a model.
        source: the folder they came from; None where that has no weights.
        fused: how the family holds experts, for a source without weights.
    """
    together: dict[str, dict[tuple[int, str], T]] = {}
    found: list[Stored[T]] = []
    for tensor in planned:
        one = _ONE.fullmatch(tensor.name)
        name = "" if one is None else f"{one['layer']}.{_FUSED[one['part']]}"
        if one is None or not (fused if source is None else name in source):
            found.append(Stored(tensor.name, (tensor,)))
        else:
            together.setdefault(name, {})[int(one["number"]), one["part"]] = tensor
    for name, members in together.items():
        found.append(Stored(name, tuple(_in_order(members)), _is_transposed(name, members, source)))
    return sorted(found, key=lambda one: one.name)


def _in_order[T: Named](members: Mapping[tuple[int, str], T]) -> list[T]:
    return [members[key] for key in sorted(members)]  # gate_proj comes before up_proj


def _is_transposed[T: Named](name: str, members: Mapping[tuple[int, str], T], source: Shapes | None) -> bool:
    if source is None:
        return False
    height, width = next(iter(members.values())).shape
    rows = 2 * height if name.endswith("gate_up_proj") else height
    return source.shape(name)[1:] != (rows, width)
