"""What tensors are called between trainers and engines: as most published folders name them, experts one by
one.

    X.experts.gate_up_proj [experts, 2 x inner, hidden]   X.experts.N.gate_proj.weight, .N.up_proj.weight
    X.experts.down_proj    [experts, hidden, inner]       X.experts.N.down_proj.weight

Who holds the experts of a layer in two tensors, as transformers does, says so with pieces: those tensors stay
what they are on both sides, nothing is copied. So a rank of Megatron, which holds single experts or parts of
them, and an engine that holds them together speak of the same tensors.
"""

from collections.abc import Iterator

import dcs
import msgspec
from dcs.layout import Piece, TensorSpec, whole

_HALVES = {
    ".experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".experts.down_proj": ("down_proj",),
}
"""What is stacked in a tensor of all experts, from top to bottom."""


def as_published(layout: dcs.Layout) -> dcs.Layout:
    """The same tensors, with all experts of a layer as pieces of single experts; others as they are."""
    return dcs.Layout(tuple(_spec(spec) for spec in layout.tensors))


def _spec(spec: TensorSpec) -> TensorSpec:
    pieces = spec.pieces or whole(spec.name, spec.shape)
    if not any(_parts(piece) for piece in pieces):
        return spec
    return msgspec.structs.replace(spec, pieces=tuple(one for piece in pieces for one in _apart(piece)))


def _parts(piece: Piece) -> tuple[str, ...]:
    """The names of what is stacked in its source; none where that is no tensor of all experts."""
    name = next((end for end in _HALVES if piece.source.endswith(end)), "")
    parts = _HALVES.get(name, ())
    fits = parts and len(piece.shape) == 3 and piece.size and piece.shape[1] % len(parts) == 0
    return parts if fits else ()


def _apart(piece: Piece) -> Iterator[Piece]:
    """A box of a tensor of all experts, as boxes of those of single experts."""
    parts = _parts(piece)
    if not parts:
        yield piece
        return
    layer = piece.source.rpartition(".")[0]
    (expert, row, column), (experts, rows, columns) = piece.start, piece.extent
    *outer, at_expert, at_row, at_column = piece.at
    height = piece.shape[1] // len(parts)
    for index in range(experts):
        for place, part in enumerate(parts):
            low, high = max(row, place * height), min(row + rows, (place + 1) * height)
            if low < high:
                yield Piece(
                    f"{layer}.{expert + index}.{part}.weight",
                    (height, piece.shape[2]),
                    (low - place * height, column),
                    (*outer, at_expert + index, at_row + low - row, at_column),
                    (high - low, columns),
                )
