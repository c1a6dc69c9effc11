"""From many arrays or tensors into one place, each byte once, and back to torch without a copy."""

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

_is_cpu = attrgetter("is_cpu")
_CHUNK = 64 << 20  # bytes joined on a device before they come to the host


def torch_if_loaded() -> Any:
    """The torch module if the program has imported it, else None: nothing here imports it for itself where
    numpy does.
    """
    return sys.modules.get("torch")


def copy_parts(parts: Sequence[Any], out: np.ndarray) -> None:
    """Copies numpy arrays or torch tensors (that need no gradient), end to end, into `out` (contiguous, as
    many elements). Their strides are free; a copy of much holds no GIL.
    """
    if not parts:
        return
    if not isinstance(parts[0], np.ndarray):
        _copy_tensors(parts, out)
    elif len(parts) == 1:
        out.reshape(parts[0].shape)[...] = parts[0]
    else:
        np.concatenate(parts, out=out)


def _copy_tensors(parts: Sequence[Any], out: np.ndarray) -> None:
    torch = sys.modules["torch"]
    first = parts[0]
    target = torch.from_numpy(out)
    if target.dtype != first.dtype:
        target = target.view(first.dtype)
    if len(parts) == 1:
        target.view(first.shape).copy_(first)
    elif all(map(_is_cpu, parts)):
        torch.cat(parts, out=target)
    else:  # many copies to the host cost far more than one on the device
        at = 0
        for chunk in _chunks(parts):
            joined = torch.cat(chunk) if len(chunk) > 1 else chunk[0]
            target[at : at + len(joined)].copy_(joined)
            at += len(joined)


def _chunks(parts: Sequence[Any]) -> list[list[Any]]:
    """The parts in runs of one device and of at most `_CHUNK` bytes, if they are more than one."""
    chunks: list[list[Any]] = []
    room = 0
    for part in parts:
        nbytes = part.numel() * part.element_size()
        if not chunks or nbytes > room or part.device != chunks[-1][-1].device:
            chunks.append([])
            room = _CHUNK
        chunks[-1].append(part)
        room -= nbytes
    return chunks


class _Alias:
    """Another name for an array's memory that does not say whether it is read-only; keeps the array alive."""

    __slots__ = ("__array_interface__", "base")

    def __init__(self, array: np.ndarray) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.base = array


def tensor_on(array: np.ndarray, dtype: str) -> Any:
    """A torch tensor on the memory of `array`, even a read-only one, without torch's warning about it.

    Whoever writes to the tensor of a read-only mapping is killed by the system.

    Args:
        array: of a numeric dtype; contiguous where `dtype` has no numpy name.
        dtype: the name of the torch dtype the bytes stand for.
    """
    import torch

    tensor = torch.from_numpy(array if array.flags.writeable else np.asarray(_Alias(array)))
    wanted = getattr(torch, dtype)
    return tensor if tensor.dtype == wanted else tensor.view(wanted)
