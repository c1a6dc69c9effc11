"""The safetensors of a Hugging Face folder, read in boxes: only the bytes that are asked for."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax.backends.train.errors import UntrainableModelError


class SafetensorsFolder:
    """A folder's tensors by name, in one file or indexed.

    Args:
        prefix: that the files put before the names; tensors without it are none of these.

    Attributes:
        bytes_read: of all boxes so far.

    Raises:
        UntrainableModelError: a file is missing or cannot be read.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder, self._prefix = folder, prefix
        self._open: dict[str, safe_open] = {}
        self.bytes_read = 0
        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                self._files: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            else:
                file = "model.safetensors"
                self._files = dict.fromkeys(self._file(file).keys(), file)
        except (ValueError, LookupError) as error:
            raise UntrainableModelError(f"{index} cannot be read: {error!r}") from error

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._files

    def names(self) -> list[str]:
        """All tensors there are."""
        return [name.removeprefix(self._prefix) for name in self._files if name.startswith(self._prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor; nothing of it is read."""
        name = self._prefix + name
        return tuple(self._file(self._files[name]).get_slice(name).get_shape())

    def box(self, name: str, start: Sequence[int], extent: Sequence[int]) -> Tensor:
        """A box of a tensor, in the dtype of the file."""
        name = self._prefix + name
        part = self._file(self._files[name])
        if not extent:
            found = part.get_tensor(name)
        else:
            found = part.get_slice(name)[
                tuple(slice(first, first + length) for first, length in zip(start, extent, strict=True))
            ]
        self.bytes_read += found.nbytes
        return found

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            path = self._folder / name
            try:
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise UntrainableModelError(f"{path} cannot be read: {error}") from error
        return self._open[name]
