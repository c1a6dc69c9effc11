"""The weights in a folder that the server reads: `update_weights_from_disk`. The last resort.

It needs a folder that both sides see and room for one more copy. SGLang then gives that folder out as its
model path and served model name, and kills itself when the folder does not fit its model, which is why
everything is checked first.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from dcs.appliers.checkpoint import write
from dcs.appliers.http import EngineServer
from dcs.errors import ApplyFailed


class Disk:
    """See the module; a folder of its own is made in `directory` (default: in memory, `/dev/shm`) and
    removed by `close`.
    """

    in_session = False

    def __init__(self, server: EngineServer, directory: str | os.PathLike[str] | None) -> None:
        self._server = server
        parent = directory or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self._folder = Path(tempfile.mkdtemp(prefix="dcs-sglang-", dir=parent))

    def prepare(self, version: int, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        try:
            write(self._folder / "model.safetensors", tensors)
        except OSError as error:
            raise ApplyFailed(f"version {version} cannot be written to {self._folder}: {error}") from error

        def send() -> None:
            self._server.post(
                "/update_weights_from_disk",
                {
                    "model_path": str(self._folder),
                    "load_format": "safetensors",
                    "flush_cache": False,
                    "weight_version": str(version),
                },
            )

        return send

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
