"""A Hugging Face folder written by all ranks together: a file each, and an index of which tensor is where."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from relax.backends.train.ranks import Coordinates

distributed: Any = torch.distributed


def write_together(
    folder: Path, model: PreTrainedModel, tensors: Iterator[tuple[str, Tensor]], at: Coordinates
) -> None:
    """Write config and weights; a rank keeps only what it writes.

    Args:
        folder: is there, and empty but for what stands beside weights.
        model: whose config and names these are.
        tensors: whole ones by name, the same on every rank; made one at a time, perhaps by a collective.
        at: where this rank stands.
    """
    loads = [0] * at.world_size
    own: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for name, tensor in tensors:
        rank = loads.index(min(loads))
        loads[rank] += tensor.nbytes
        if rank == at.rank:
            # As transformers does when it saves: some families name or cut tensors otherwise in files.
            for own_name, part in revert_weight_conversion(model, {name: tensor}).items():
                own[own_name] = part.detach().cpu().contiguous().clone()
    file = f"model-{at.rank + 1:05d}-of-{at.world_size:05d}.safetensors"
    save_file(own, folder / file, metadata={"format": "pt"})
    index = folder / f".index-{at.rank}.json"
    index.write_text(json.dumps({name: file for name in own}))
    distributed.barrier()
    if at.rank == 0:
        for rank in range(at.world_size):
            part = folder / f".index-{rank}.json"
            places |= json.loads(part.read_text())
            part.unlink()
        told = {"metadata": {"total_size": sum(loads)}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(told, indent=1, sort_keys=True))
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    distributed.barrier()
