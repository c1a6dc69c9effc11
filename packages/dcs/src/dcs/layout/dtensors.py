"""DTensors (FSDP2, tensor parallel by `parallelize_module`): which box of the global tensor a rank holds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dcs.errors import LayoutMismatch
from dcs.layout.pieces import Piece, boxed, chunk

if TYPE_CHECKING:
    import torch


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a `torch.distributed.tensor.DTensor`; never imports that module (it takes a second)."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a DTensor, without communication; any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def pieces_of(name: str, tensor: Any) -> tuple[Piece, ...]:
    """The box of the global tensor that this rank's part of a DTensor is; `()` when it has all of it.

    Raises `LayoutMismatch` for a pending reduction (`Partial`), for a placement that is no box, and on a rank
    outside of the tensor's mesh.
    """
    shape = tuple(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise LayoutMismatch(
            f"tensor {name!r} lies on a device mesh that this rank is not part of; leave it out here", name
        )
    start, extent = [0] * len(shape), list(shape)
    for placement, rank, size in _in_order_of_cutting(
        tensor.placements, coordinate, tensor.device_mesh.shape
    ):
        if placement.is_partial():
            raise LayoutMismatch(
                f"tensor {name!r} is a DTensor with a pending reduction ({placement}); redistribute it to"
                " Shard or Replicate before it is published",
                name,
                str(placement),
                "Shard or Replicate",
            )
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise LayoutMismatch(
                f"tensor {name!r} is a DTensor placed as {placement}; dcs knows Shard and Replicate",
                name,
                str(placement),
                "Shard or Replicate",
            )
        first, extent[dim] = chunk(extent[dim], rank, size)
        start[dim] += first
    held = tuple(tensor.to_local().shape)
    if held != tuple(extent):
        raise LayoutMismatch(
            f"tensor {name!r} is a DTensor of {list(shape)} placed as {list(tensor.placements)}: this rank's"
            f" part should be {extent}, but is {list(held)}; give its pieces with dcs.layout.of(...,"
            f" pieces=...)",
            name,
            str(list(held)),
            str(extent),
        )
    return () if held == shape else boxed(name, shape, start, extent)


def _in_order_of_cutting(placements: Any, coordinate: Any, sizes: Any) -> list[tuple[Any, int, int]]:
    """Placements with this rank's place and the mesh's size along each, in the order in which they cut.

    Mesh dimensions cut from left to right. FSDP2 over tensor parallelism is the exception: the data-parallel
    dimension is on the left and cuts last, what it says with a shard of its own kind (`split_factor`).
    """
    found = list(zip(placements, coordinate, sizes, strict=True))
    late = [entry for entry in found if getattr(entry[0], "split_factor", 1) > 1]
    return [entry for entry in found if entry not in late] + late[::-1]
