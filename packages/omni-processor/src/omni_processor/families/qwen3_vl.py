"""Qwen3-VL: images of any size as 16-pixel patches, 2 x 2 of them a token, and 3-axis rotary positions.

Equal to transformers' Qwen3VLProcessor: the same token ids, and pixel values to the rounding of a float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from omni_processor.errors import ConfigError, SpanMismatch
from omni_processor.images import ImageHeader
from omni_processor.sample import Budget, ItemPlan, MediaItem

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


@dataclass(frozen=True, slots=True)
class Qwen3VL:
    """The Qwen3-VL family for one model: its pixel rules and token ids."""

    rules: PixelRules
    image_token_id: int
    reserved_ids: tuple[int, ...]
    name: str = "qwen3_vl"

    @property
    def placeholder_ids(self) -> Mapping[str, int]:
        return {"image": self.image_token_id}

    def placeholder_text(self, kind: str) -> str:
        return "<|vision_start|><|image_pad|><|vision_end|>"

    def plan(self, header: ImageHeader, budget: Budget) -> ItemPlan:
        rules = self.rules
        area = rules.factor**2
        max_pixels = rules.max_pixels if budget.max_item_tokens is None else budget.max_item_tokens * area
        min_pixels = rules.min_pixels if budget.min_item_tokens is None else budget.min_item_tokens * area
        height, width = target_size(
            header.height, header.width, rules.factor, min(min_pixels, max_pixels), max_pixels
        )
        grid = (1, height // rules.patch_size, width // rules.patch_size)
        return ItemPlan(
            kind="image",
            source_size=(header.height, header.width),
            size=(height, width),
            grid=grid,
            patches=grid[1] * grid[2],
            tokens=height * width // area,
        )

    def tensorize(self, image: Image.Image, plan: ItemPlan) -> MediaItem:
        pixels = np.array(image).transpose(2, 0, 1)
        if pixels.shape[1:] != plan.size:
            pixels = resize(pixels, plan.size, self.rules.resample)
        values = patchify(pixels, self.rules)
        grid = np.array([plan.grid], np.int64)
        values.flags.writeable = grid.flags.writeable = False
        return {"kind": "image", "pixel_values": values, "image_grid_thw": grid}

    def item_tokens(self, item: MediaItem) -> int:
        time, height, width = self._grid(item)
        return time * height * width // self.rules.merge_size**2

    def positions(self, length: int, spans: Sequence[tuple[int, int, MediaItem]]) -> np.ndarray:
        positions = np.empty((3, length), np.int64)
        cursor = following = 0  # next token, and the position it gets
        for start, end, item in spans:
            positions[:, cursor:start] = np.arange(following, following + start - cursor)
            following += start - cursor
            time, height, width = self._grid(item)
            height, width = height // self.rules.merge_size, width // self.rules.merge_size
            axes = np.indices((time, height, width), np.int64).reshape(3, -1)
            positions[:, start:end] = axes + following
            following += max(height, width)
            cursor = end
        positions[:, cursor:] = np.arange(following, following + length - cursor)
        return positions

    def _grid(self, item: MediaItem) -> tuple[int, int, int]:
        if item.get("kind") != "image" or "image_grid_thw" not in item:
            raise SpanMismatch(
                f"a {item.get('kind')!r} item with {sorted(item)} is no qwen3_vl image: it needs "
                "image_grid_thw",
                item="media",
            )
        time, height, width = (int(side) for side in np.asarray(item["image_grid_thw"]).reshape(3))
        return time, height, width


def resize(pixels: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    """uint8 [3, height, width] to another size, antialiased, bit for bit as the published processor.

    Torch does it because that processor uses torch's 8-bit kernel: Pillow rounds and clips elsewhere, up to
    24 levels apart on noisy pictures, and takes several times as long. Imported here so that text needs no
    torch.
    """
    import torch
    from torch.nn.functional import interpolate

    batch = torch.from_numpy(pixels)[None]
    return interpolate(batch, size=size, mode=_FILTERS[resample], align_corners=False, antialias=True)[
        0
    ].numpy()


def patchify(pixels: np.ndarray, rules: PixelRules) -> np.ndarray:
    """Normalise and cut uint8 [3, height, width] into float32 [patches, 3 * temporal * patch * patch].

    Patches come merge block by merge block, row by row, so that the patches of one token are neighbours.
    """
    patch, merge, temporal = rules.patch_size, rules.merge_size, rules.temporal_patch_size
    rows, columns = pixels.shape[1] // rules.factor, pixels.shape[2] // rules.factor
    # Levels are normalised as they are stored: (level - mean * 255) / (std * 255), as published.
    scale = np.float32(1 / rules.rescale_factor)
    mean = np.asarray(rules.mean, np.float32)[:, None] * scale
    std = np.asarray(rules.std, np.float32)[:, None] * scale
    out = np.empty((rows, columns * merge * merge, 3, temporal, patch * patch), np.float32)
    bands = pixels.reshape(3, rows, merge, patch, columns, merge, patch).swapaxes(0, 1)
    # A band of merge blocks at a time stays in the cache; reordering single bytes is cheaper than floats.
    for band, target in zip(bands, out, strict=True):
        patches = np.ascontiguousarray(band.transpose(3, 1, 4, 0, 2, 5)).reshape(-1, 3, patch * patch)
        first = target[:, :, 0]
        np.subtract(patches, mean, out=first)
        first /= std
        target[:, :, 1:] = first[:, :, None]
    return out.reshape(rows * columns * merge * merge, 3 * temporal * patch * patch)


def create(tokenizer: Any, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Qwen3VL:
    """From the model's config.json and image preprocessor config.

    Raises:
        ConfigError: the tokenizer lacks the vision tokens, the configs disagree, or a step is switched off.
    """
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in _VISION_TOKENS if token not in vocabulary]
    if missing:
        raise ConfigError(
            f"the tokenizer lacks {', '.join(missing)}, which qwen3_vl needs: is it this model's tokenizer?"
        )
    image_token_id = vocabulary["<|image_pad|>"]
    configured = config.get("image_token_id", image_token_id)
    if configured != image_token_id:
        raise ConfigError(
            f"image_token_id is {configured} in config.json, but the tokenizer's <|image_pad|> is "
            f"{image_token_id}: "
            "model and tokenizer do not belong together"
        )
    reserved = [*_VISION_TOKENS, *(token for token in ("<|video_pad|>",) if token in vocabulary)]
    return Qwen3VL(
        rules=_pixel_rules(preprocessor, config.get("vision_config", {})),
        image_token_id=image_token_id,
        reserved_ids=tuple(sorted(vocabulary[token] for token in reserved)),
    )


_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


def _pixel_rules(preprocessor: Mapping[str, Any], vision: Mapping[str, Any]) -> PixelRules:
    for step in ("do_resize", "do_rescale", "do_normalize"):
        if preprocessor.get(step) is False:
            raise ConfigError(
                f"{step} is false in the preprocessor config; qwen3_vl images are resized, rescaled and "
                "normalised"
            )
    sides = {}
    for name, vision_name in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        value = preprocessor.get(name, vision.get(vision_name, getattr(_DEFAULTS, name)))
        if vision.get(vision_name, value) != value:
            raise ConfigError(
                f"{name} is {value} in the preprocessor config but {vision[vision_name]} in config.json's "
                f"vision_config.{vision_name}: they must agree"
            )
        sides[name] = int(value)
    size = preprocessor.get("size") or {}
    rules = PixelRules(
        **sides,
        min_pixels=int(preprocessor.get("min_pixels") or size.get("shortest_edge") or _DEFAULTS.min_pixels),
        max_pixels=int(preprocessor.get("max_pixels") or size.get("longest_edge") or _DEFAULTS.max_pixels),
        mean=_channels(preprocessor, "image_mean", _DEFAULTS.mean),
        std=_channels(preprocessor, "image_std", _DEFAULTS.std),
        rescale_factor=float(preprocessor.get("rescale_factor") or _DEFAULTS.rescale_factor),
        resample=int(preprocessor.get("resample") or _DEFAULTS.resample),
    )
    if rules.resample not in _FILTERS:
        raise ConfigError(
            f"resample is {rules.resample} in the preprocessor config; 2 (bilinear) and 3 (bicubic) are known"
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


_DEFAULTS = PixelRules()
