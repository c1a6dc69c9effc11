"""Model folders in the safetensors format: what tensors one holds, and writing one that an engine loads.

The format (a length, a JSON header, the tensors' bytes) is small enough to be read here, so that dcs needs
no package for it. Nothing is unpickled; headers are bounded.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dcs.errors import LayoutMismatch
from dcs.layout import Layout, TensorSpec

_MOST_HEADER_BYTES = 100_000_000  # what the format itself allows
_DTYPE_OF = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}
_CODE_OF = {dtype: code for code, dtype in _DTYPE_OF.items()}


def layout_of_folder(folder: str | os.PathLike[str]) -> Layout:
    """What the `*.safetensors` of a model folder hold, read from their headers alone.

    Raises `LayoutMismatch` when there is none, or one is damaged.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise LayoutMismatch(f"{os.fspath(folder)!r} has no *.safetensors to read names and shapes from")
    specs: dict[str, TensorSpec] = {}
    for file in files:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                specs[name] = _spec(file, name, entry)
    return Layout(tuple(specs[name] for name in sorted(specs)))


def ties_output_to_input(folder: str | os.PathLike[str]) -> bool:
    """Whether `config.json` says that `lm_head.weight` is the embedding, so that the files may leave it
    out.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise LayoutMismatch(f"the config.json of {os.fspath(folder)!r} cannot be read: {error}") from error
    return bool(config.get("tie_word_embeddings") or config.get("text_config", {}).get("tie_word_embeddings"))


def write(file: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors of any device as one safetensors file; a half-written one is never seen under this
    name.
    """
    header: dict[str, object] = {}
    end = 0
    # The widest dtypes first keeps every tensor aligned to its own size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": _CODE_OF[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target = Path(file)
    part = target.with_name(target.name + ".part")
    with part.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            flat = tensors[name].detach().contiguous().reshape(-1)
            if flat.numel():
                out.write(memoryview(flat.view(torch.uint8).cpu().numpy()))
    part.replace(target)


def read(file: str | os.PathLike[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one safetensors file, by name, each a read-write private copy; raises `LayoutMismatch`
    as above.
    """
    path = Path(file)
    header = _header(path)
    with path.open("rb") as source:
        (length,) = struct.unpack("<Q", source.read(8))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            spec = _spec(path, name, entry)
            flat = torch.empty(spec.nbytes, dtype=torch.uint8)
            source.seek(8 + length + _start(path, name, entry))
            if spec.nbytes and source.readinto(memoryview(flat.numpy())) != spec.nbytes:
                raise LayoutMismatch(f"{path} ends within tensor {name!r}", name)
            yield name, flat.view(getattr(torch, spec.dtype)).view(spec.shape)


def _start(file: Path, name: str, entry: Any) -> int:
    try:
        return int(entry["data_offsets"][0])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise LayoutMismatch(f"{file}: tensor {name!r} has no place in the file: {entry!r}") from error


def _header(file: Path) -> dict[str, object]:
    try:
        with file.open("rb") as source:
            (length,) = struct.unpack("<Q", source.read(8))
            if length > _MOST_HEADER_BYTES:
                raise LayoutMismatch(f"{file} is no safetensors file: its header would have {length} bytes")
            header = json.loads(source.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise LayoutMismatch(f"{file} cannot be read as a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise LayoutMismatch(f"{file} is no safetensors file: its header is no JSON object")
    return header


def _spec(file: Path, name: str, entry: Any) -> TensorSpec:
    try:
        dtype, shape = _DTYPE_OF[entry["dtype"]], tuple(int(extent) for extent in entry["shape"])
        if any(extent < 0 for extent in shape):
            raise ValueError("a negative extent")
        return TensorSpec(name, shape, dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise LayoutMismatch(
            f"{file}: tensor {name!r} is described as {entry!r}, which dcs cannot carry"
        ) from error
