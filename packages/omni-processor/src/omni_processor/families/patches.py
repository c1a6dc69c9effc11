"""Pixels to patches as the Qwen vision towers take them: sizes, the resize, normalisation and cutting.

Equal to transformers' Qwen2VL image processor and to the pixel part of its video processors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_processor.errors import ConfigError

_FILTERS = {2: "bilinear", 3: "bicubic"}
_MAX_ASPECT = 200  # the published processor refuses thinner images; see target_size


@dataclass(frozen=True, slots=True)
class PixelRules:
    """How pixels become patches; the defaults are those published with Qwen3-VL.

    Attributes:
        patch_size: side of a patch, in pixels.
        merge_size: patches a side that are merged into one token.
        temporal_patch_size: frames in a patch; a still image is repeated this often.
        min_pixels, max_pixels: area bounds of the resized image, in pixels.
        mean, std: per channel, on the 0..1 scale.
        rescale_factor: from stored levels to the 0..1 scale.
        resample: Pillow's number of the resize filter: 3 is bicubic, 2 bilinear.
    """

    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    resample: int = 3

    @property
    def factor(self) -> int:
        """Side of the square of pixels behind one token."""
        return self.patch_size * self.merge_size


def target_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size an image is resized to: multiples of `factor`, area within bounds, shape nearly kept.

    Up to an aspect ratio of 200 this is the published rule to the pixel (which may pass max_pixels for a very
    thin image, since no side goes below `factor`). Thinner images, which the published processor refuses,
    follow the same rule with the long side cut to the bound.
    """
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    if max(height, width) > _MAX_ASPECT * min(height, width):
        longest = max(factor, max_pixels // factor // factor * factor)
        new_height, new_width = min(new_height, longest), min(new_width, longest)
    return new_height, new_width


def resize(pixels: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    """uint8 [..., 3, height, width] to another size, antialiased, bit for bit as the published processor.

    Torch does it because that processor uses torch's 8-bit kernel: Pillow rounds and clips elsewhere, up to
    24 levels apart on noisy pictures, and takes several times as long. Imported here so that text needs no
    torch.
    """
    import torch
    from torch.nn.functional import interpolate

    batch = torch.from_numpy(np.ascontiguousarray(pixels).reshape(-1, *pixels.shape[-3:]))
    made = interpolate(batch, size=size, mode=_FILTERS[resample], align_corners=False, antialias=True)
    return made.numpy().reshape(*pixels.shape[:-2], *size)


def patchify(
    frames: Iterable[np.ndarray], count: int, size: tuple[int, int], rules: PixelRules
) -> np.ndarray:
    """Normalise and cut `count` frames, each uint8 [3, height, width] of a size, to float32 [patches, 3 *
    temporal * patch * patch].

    As many frames as the model takes together make a step in time; the last frame fills up the last step, so
    that one frame is a still image. Patches come step by step and merge block by merge block, row by row, so
    that the patches of one token are neighbours.
    """
    patch, merge, temporal = rules.patch_size, rules.merge_size, rules.temporal_patch_size
    steps = -(-count // temporal)
    rows, columns = size[0] // rules.factor, size[1] // rules.factor
    # Levels are normalised as they are stored: (level - mean * 255) / (std * 255), as published.
    scale = np.float32(1 / rules.rescale_factor)
    mean = np.asarray(rules.mean, np.float32)[:, None] * scale
    std = np.asarray(rules.std, np.float32)[:, None] * scale
    out = np.empty((steps, rows, columns * merge * merge, 3, temporal, patch * patch), np.float32)
    for number, pixels in enumerate(frames):
        step, slot = divmod(number, temporal)
        # The last frame stands for those that are missing behind it.
        until = slot + 1 if number + 1 < count else temporal
        bands = pixels.reshape(3, rows, merge, patch, columns, merge, patch).swapaxes(0, 1)
        # A band of merge blocks at a time stays in the cache; reordering single bytes is cheaper than floats.
        for band, target in zip(bands, out[step], strict=True):
            patches = np.ascontiguousarray(band.transpose(3, 1, 4, 0, 2, 5)).reshape(-1, 3, patch * patch)
            first = target[:, :, slot]
            np.subtract(patches, mean, out=first)
            first /= std
            target[:, :, slot + 1 : until] = first[:, :, None]
    return out.reshape(steps * rows * columns * merge * merge, 3 * temporal * patch * patch)


def read_rules(
    preprocessor: Mapping[str, Any], vision: Mapping[str, Any], family: str, defaults: PixelRules
) -> PixelRules:
    """The rules that a preprocessor config and config.json's vision_config give together.

    Raises:
        ConfigError: they contradict each other, ask for what is not done here, or a step is switched off.
    """
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if preprocessor.get(step) is False:
            raise ConfigError(
                f"{step} is false in the preprocessor config; {family} media are resized, rescaled and "
                "normalised"
            )
    sides = {}
    for name, vision_name in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        value = preprocessor.get(name, vision.get(vision_name, getattr(defaults, name)))
        if vision.get(vision_name, value) != value:
            raise ConfigError(
                f"{name} is {value} in the preprocessor config but {vision[vision_name]} in config.json's "
                f"vision_config.{vision_name}: they must agree"
            )
        sides[name] = int(value)
    size = preprocessor.get("size") or {}
    rules = PixelRules(
        **sides,
        min_pixels=int(preprocessor.get("min_pixels") or size.get("shortest_edge") or defaults.min_pixels),
        max_pixels=int(preprocessor.get("max_pixels") or size.get("longest_edge") or defaults.max_pixels),
        mean=_channels(preprocessor, "image_mean", defaults.mean),
        std=_channels(preprocessor, "image_std", defaults.std),
        rescale_factor=float(preprocessor.get("rescale_factor") or defaults.rescale_factor),
        resample=int(preprocessor.get("resample") or defaults.resample),
    )
    if rules.resample not in _FILTERS:
        raise ConfigError(
            f"resample is {rules.resample} in the preprocessor config; 2 (bilinear) and 3 (bicubic) are known"
        )
    if not (rules.rescale_factor > 0 and math.isfinite(1 / rules.rescale_factor)):
        raise ConfigError(
            f"rescale_factor is {rules.rescale_factor} in the preprocessor config; a number above 0 was "
            "expected"
        )
    if not all(math.isfinite(mean) for mean in rules.mean) or not all(
        0 < std < math.inf for std in rules.std
    ):
        raise ConfigError(
            f"image_mean and image_std are {rules.mean} and {rules.std} in the preprocessor config; numbers "
            "were expected, and deviations above 0: pixels are divided by them"
        )
    if not 0 < rules.min_pixels <= rules.max_pixels:
        raise ConfigError(
            f"the pixel bounds {rules.min_pixels}..{rules.max_pixels} of the preprocessor config are no range"
        )
    return rules


def _channels(
    preprocessor: Mapping[str, Any], name: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    values = preprocessor.get(name, default)
    if len(values) != 3:
        raise ConfigError(f"{name} is {values!r}; one number for each of three channels was expected")
    return (float(values[0]), float(values[1]), float(values[2]))
