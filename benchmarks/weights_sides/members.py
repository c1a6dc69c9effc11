"""What a member of ours has of the weights: its tensors, and their layout."""

import dcs
import torch
from payload import Payload, shapes
from shards import build, cut, local_shape


class Part:
    """A member's part of the weights.

    Args:
        nbytes, layers: of the whole.
        how: the cut (see `shards`).
        index: of this member among those the whole is cut over.
        fused: whether it keeps q, k, v, and gate, up, in one tensor each.

    Attributes:
        layout: of this part.
        nbytes: of its tensors.
    """

    def __init__(self, nbytes: int, layers: int, how: str, index: int, fused: bool) -> None:
        self._size = nbytes, layers
        whole = shapes(*self._size)
        self._parts = cut(whole, how, index, fused=fused)
        self._is_all = {name: local_shape(made_of) for name, made_of in self._parts.items()} == whole
        like = {
            name: torch.empty(local_shape(made_of), dtype=torch.bfloat16, device="meta")
            for name, made_of in self._parts.items()
        }
        pieces = {
            name: [dcs.layout.Piece(one.source, one.shape, one.start, one.at, one.extent) for one in made_of]
            for name, made_of in self._parts.items()
        }
        self.layout = dcs.layout.of(like) if self._is_all else dcs.layout.of(like, pieces=pieces)
        self.nbytes = sum(tensor.nbytes for tensor in like.values())

    def payload(self) -> Payload:
        """The whole weights, in memory of their own."""
        return Payload(*self._size)

    def tensors(self, payload: Payload) -> dict[str, torch.Tensor]:
        """This part of them: views when it is all, copies when it is not."""
        return payload.tensors if self._is_all else build(payload.tensors, self._parts)
