"""The files of a Hugging Face folder: which tensor goes into which, their names, index and config."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a checkpoint can be told from others without torch
    import torch

PROGRESS = "relax.json"
"""Beside a checkpoint's tensors: what `checkpoint.py` says about them, the mark of such a checkpoint."""

FILE_BYTES = 4 << 30
"""Largest file, unless one tensor alone is larger; what the writing rank holds in memory."""


class Named(Protocol):
    """A tensor that is to be written."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> "torch.dtype": ...

    @property
    def nbytes(self) -> int: ...


def files_of[T: Named](planned: Sequence[T], limit: int = FILE_BYTES) -> list[list[T]]:
    """Tensors dealt to files, in order."""
    files: list[list[T]] = [[]]
    size = 0
    for tensor in planned:
        if files[-1] and size + tensor.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]


def describe(scratch: Path, source: Path, files: Sequence[Sequence[Named]]) -> None:
    """What belongs beside the weights: config.json, and the index of several files."""
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = str(files[0][0].dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)  # its older name
    (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for file in files for tensor in file)},
            "weight_map": {
                tensor.name: name
                for name, file in zip(file_names(len(files)), files, strict=True)
                for tensor in file
            },
        }
        (scratch / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
