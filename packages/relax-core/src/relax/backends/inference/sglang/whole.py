"""A folder of the Qwen3-Omni that a thinker belongs to, as SGLang serves no thinker alone.

It holds no weights, as the first version brings them; only what they are called, and how large they are.
"""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax.backends.inference.sglang.experts import apart
from relax.backends.models import THINKER

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def copy_around(folder: Path, to: Path) -> None:
    """Copy the files beside the weights that are not there yet: tokenizer and processor."""
    to.mkdir(parents=True, exist_ok=True)
    for other in folder.iterdir():
        weights = other.suffix == ".safetensors" or other.name.endswith(".safetensors.index.json")
        if other.is_file() and not weights and not (to / other.name).exists():
            shutil.copyfile(other, to / other.name)


def whole_folder(folder: Path, thinker: Mapping[str, Any], to: Path, weights: Mapping[str, Tensor]) -> Path:
    """Write it.

    Args:
        folder: the thinker's.
        thinker: its config.json.
        to: where.
        weights: the thinker's, as a trainer names them; shapes and dtypes.

    Returns:
        `to`.
    """
    copy_around(folder, to)
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "enable_audio_output": False,
        "thinker_config": dict(thinker),
    }
    (to / "config.json").write_text(json.dumps(config, indent=2))
    _write_names(to / "model.safetensors", apart(weights))
    return to


def _write_names(file: Path, weights: Mapping[str, Tensor]) -> None:
    """A safetensors file of zeros, which takes no room on disk."""
    head: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        head[THINKER + name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)
