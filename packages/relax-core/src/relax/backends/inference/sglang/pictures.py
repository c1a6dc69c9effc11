"""Pictures of requests, as a server takes them.

A request holds what the run's processor made of a picture, tensors. Over HTTP SGLang takes files only (0.5.23
refuses any other item), which its own processor makes into tensors. But a processed picture is its 8-bit
levels, resized, in another order and on another scale: put back, they are a file of which a processor that
does not resize makes the same tensors again. So a picture travels as PNG, and what trainer and server see is
equal. What a sound or a film was cannot be found in its tensors.
"""

import base64
import io
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from agentic import GenerationRequest
from PIL import Image

from relax.backends.inference.errors import EngineError, InvalidRequest
from relax.backends.inference.sglang.sharing import Shared

FAMILIES = ("qwen3_vl", "qwen3_vl_moe")
"""Model types whose pictures SGLang knows by the bytes of their files, which is what `at_version` needs."""

OFF_LEVEL = 0.05
"""Farthest that a value may lie from a whole level, in levels: float32 leaves it within 1e-4."""

_CHANNELS = 3
_AFTER_HEADER = 8 + 25
"""Bytes of a PNG's signature and its first chunk."""


@dataclass(frozen=True)
class PictureRules:
    """How pictures become tensors and tokens, as a model's folder says.

    Attributes:
        token: the placeholder's id.
        patch, merge, temporal: sides of a patch in pixels, patches a side in one token, frames in a patch.
        mean, std: per channel, on the 0..1 scale.
        rescale: from levels to that scale.
    """

    token: int
    patch: int
    merge: int
    temporal: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> "PictureRules | None":
        """From config.json (given) and the preprocessor's configuration; None for a model of another family.

        Raises:
            EngineError: the latter is missing or damaged.
        """
        if config.get("model_type") not in FAMILIES:
            return None
        said, vision = _preprocessor(folder), config["vision_config"]
        return cls(
            int(config["image_token_id"]),
            int(said.get("patch_size") or vision["patch_size"]),
            int(said.get("merge_size") or vision["spatial_merge_size"]),
            int(said.get("temporal_patch_size") or vision["temporal_patch_size"]),
            tuple(said.get("image_mean") or (0.5,) * _CHANNELS),
            tuple(said.get("image_std") or (0.5,) * _CHANNELS),
            float(said.get("rescale_factor") or 1 / 255),
        )

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request of which one placeholder for each picture would not tell where the others stood.
        It shows pictures only, which its family's reader has checked.

        Raises:
            InvalidRequest: with the runs of placeholders, and those that the pictures take.
        """
        grids = [np.asarray(item["image_grid_thw"]).reshape(-1, 3) for item in request.media]
        sizes = (np.concatenate(grids).prod(1) // self.merge**2).tolist()
        places = np.flatnonzero(request.tokens == self.token)
        runs = [len(run) for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)]
        if runs != sizes or not places[0]:
            raise InvalidRequest(
                f"request {request.id!r} has image placeholder tokens in runs of {runs}, and its pictures "
                f"take {sizes}, each after a token of another kind; tokens and media must come from one "
                f"processor call"
            )

    def collapsed(self, tokens: Sequence[int]) -> list[int]:
        """Tokens with one placeholder for each picture, as a server takes them; see `check`."""
        whole = np.asarray(tokens)
        stays = np.ones(len(whole), bool)
        stays[1:] = (whole[1:] != self.token) | (whole[:-1] != self.token)
        return whole[stays].tolist()

    def levels(self, pixels: np.ndarray, grid: np.ndarray) -> np.ndarray | None:
        """uint8 [height, width, 3]: what `pixels` [patches, values] were made of; None if that is no
        picture of 8 bits.
        """
        _, height, width = (int(side) for side in grid)
        merge, patch = self.merge, self.patch
        parts = pixels.reshape(-1, _CHANNELS, self.temporal, patch * patch)
        if (parts[:, :, 1:] != parts[:, :, :1]).any():
            return None
        scale = np.float32(1 / self.rescale)
        mean, std = (np.asarray(one, np.float32)[:, None] * scale for one in (self.mean, self.std))
        found = parts[:, :, 0] * std + mean
        whole = np.rint(found)
        if not (np.abs(found - whole) <= OFF_LEVEL).all() or whole.min() < 0 or whole.max() > 255:
            return None
        blocks = whole.astype(np.uint8).reshape(
            height // merge, width // merge, merge, merge, _CHANNELS, patch, patch
        )
        return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * patch, width * patch, _CHANNELS)


def normalisation(folder: Path) -> tuple[list[float], list[float]]:
    """Mean and deviation of each channel that pixels are normalised by, on the scale of 8 bits.

    Raises:
        EngineError: the preprocessor's configuration is missing or damaged.
    """
    said = _preprocessor(folder)
    scale = 1 / float(said.get("rescale_factor") or 1 / 255)
    mean, std = (said.get(name) or (0.5,) * _CHANNELS for name in ("image_mean", "image_std"))
    return [scale * each for each in mean], [scale * each for each in std]


class Pictures:
    """The pictures of requests as PNG files; an array that several requests share is made into files once."""

    def __init__(self, rules: PictureRules) -> None:
        self.rules = rules
        self._files: Shared[list[bytes]] = Shared()

    def of(self, request: GenerationRequest) -> list[bytes]:
        """The file of every picture, in order, of a request that `PictureRules.check` let pass.

        Raises:
            InvalidRequest: one that no picture of 8 bits was made into.
        """
        found: list[bytes] = []
        for index, item in enumerate(request.media):
            pixels = np.asarray(item["pixel_values"])
            grids = np.asarray(item["image_grid_thw"])
            found += self._files.of([pixels, grids], partial(self._made, request, index, pixels, grids))
        return found

    def _made(
        self, request: GenerationRequest, index: int, pixels: np.ndarray, grids: np.ndarray
    ) -> list[bytes]:
        files: list[bytes] = []
        grids = grids.reshape(-1, 3)
        ends = grids.prod(1).cumsum()
        for part, grid in zip(np.split(pixels, ends[:-1]), grids, strict=True):
            levels = self.rules.levels(part, grid)
            if levels is None:
                raise InvalidRequest(
                    f"media item {index} of request {request.id!r}: its pixel_values are no picture of 8 "
                    f"bits normalised by mean {self.rules.mean} and std {self.rules.std}, as the model's "
                    f"preprocessor configuration says; was it made by another model's processor?"
                )
            file = io.BytesIO()
            Image.fromarray(levels).save(file, "PNG", compress_level=1)
            files.append(file.getvalue())
        return files


def at_version(file: bytes, version: int) -> str:
    """A PNG in base64 that is another file for each version of the weights.

    A server keeps what its vision tower made of a file, and an update of the weights does not end that.
    """
    text = b"tEXtweights\0" + str(version).encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return base64.b64encode(file[:_AFTER_HEADER] + chunk + file[_AFTER_HEADER:]).decode()


def _preprocessor(folder: Path) -> Mapping[str, Any]:
    for name in ("preprocessor_config.json", "processor_config.json"):
        try:
            said = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise EngineError(f"model folder {str(folder)!r}: {name} cannot be read: {error}") from error
        return said.get("image_processor", said)
    raise EngineError(
        f"model folder {str(folder)!r} has no preprocessor_config.json, and its model sees pictures"
    )
