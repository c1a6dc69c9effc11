"""Qwen3-VL: images and videos as 16-pixel patches, 2 x 2 of them a token, 3-axis rotary positions.

Equal to transformers' Qwen3VLProcessor: the same token ids, and pixel values to the rounding of a float32. A
step in time of a video is two frames; the text ``<0.5 seconds>`` before it says when they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from omni_processor.errors import ConfigError, SpanMismatch
from omni_processor.families.base import Decoded, Header
from omni_processor.families.clips import (
    ClipRules,
    frames_to_patches,
    read_clip_rules,
    size_together,
    spread,
)
from omni_processor.families.patches import PixelRules, patchify, read_rules, resize, target_size
from omni_processor.images import ImageHeader
from omni_processor.sample import Budget, ItemPlan, MediaItem
from omni_processor.sounds import SoundHeader
from omni_processor.videos import Clip, VideoHeader

_VIDEO_DEFAULTS = ClipRules(PixelRules(min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32))


@dataclass(frozen=True, slots=True)
class Qwen3VL:
    """The Qwen3-VL family for one model: its pixel rules and token ids.

    A tokenizer without ``<|video_pad|>`` makes one that takes images only.
    """

    rules: PixelRules
    clips: ClipRules
    image_token_id: int
    video_token_id: int | None
    start_token_id: int
    end_token_id: int
    reserved_ids: tuple[int, ...]
    tokenizer: Any = field(repr=False, compare=False)
    name: str = "qwen3_vl"
    sampling_rate: int = 0
    hears_videos: bool = False

    @property
    def fps(self) -> float:
        return self.clips.fps

    @property
    def placeholder_ids(self) -> Mapping[str, int]:
        ids = {"image": self.image_token_id}
        return ids if self.video_token_id is None else {**ids, "video": self.video_token_id}

    def placeholder_text(self, kind: str) -> str:
        return f"<|vision_start|><|{kind}_pad|><|vision_end|>"

    def plan(self, header: Header, budget: Budget, sound: SoundHeader | None = None) -> ItemPlan:
        match header:
            case ImageHeader():
                return plan_image(header, self.rules, budget)
            case VideoHeader():
                frames = spread(header, self.clips)
                size = size_together(header, len(frames), self.clips, budget)
                return plan_video(header, frames, size, self.clips.pixels)
        raise TypeError(f"qwen3_vl makes no plan for a {type(header).__name__}")

    def tensorize(self, decoded: Decoded, plan: ItemPlan, item: str) -> MediaItem:
        match decoded:
            case Image.Image():
                return image_item(decoded, plan, self.rules)
            case Clip():
                made = video_item(decoded, plan, self.clips.pixels)
                made["timestamps"] = _moments(plan.frames, decoded.fps, self.clips.pixels)
                made["timestamps"].flags.writeable = False
                return made
        raise TypeError(f"qwen3_vl makes no item of a {type(decoded).__name__}")

    def placeholders(self, item: MediaItem) -> np.ndarray:
        kind = self._kind(item)
        token = self.image_token_id if kind == "image" else self.video_token_id
        return np.full(sum(self.runs(item)), token, np.int32)

    def runs(self, item: MediaItem) -> Sequence[int]:
        time, height, width = grid_of(item, self._kind(item))
        frame = height * width // self.rules.merge_size**2
        return [time * frame] if item["kind"] == "image" else [frame] * time

    def expansion(self, item: MediaItem) -> np.ndarray:
        if self._kind(item) == "image":
            return self.placeholders(item)
        moments = item.get("timestamps")
        if moments is None:
            raise SpanMismatch(
                "a qwen3_vl video is expanded with the times of its frames, and this item has no timestamps: "
                "keep the item as the processor made it",
                item="video",
            )
        frame = self.runs(item)[0]
        whole = np.array([self.start_token_id, *[self.video_token_id] * frame, self.end_token_id], np.int32)
        parts: list[np.ndarray] = []
        for moment in np.asarray(moments):
            # With double precision, in which the published processor rounds to a tenth.
            said = self.tokenizer(f"<{float(moment):.1f} seconds>", add_special_tokens=False)["input_ids"]
            parts += [np.asarray(said, np.int32), whole]
        return np.concatenate(parts)

    def positions(self, length: int, shown: Sequence[tuple[np.ndarray, MediaItem]]) -> np.ndarray:
        positions = np.empty((3, length), np.int64)
        cursor = following = 0  # next token, and the position it gets
        for places, item in shown:
            _, height, width = grid_of(item, self._kind(item))
            height, width = height // self.rules.merge_size, width // self.rules.merge_size
            for run in np.split(places, np.cumsum(self.runs(item))[:-1]):
                start = int(run[0])
                positions[:, cursor:start] = np.arange(following, following + start - cursor)
                following += start - cursor
                cursor = start + len(run)
                # A frame of a video is placed like an image of its own.
                axes = np.indices((len(run) // (height * width), height, width), np.int64).reshape(3, -1)
                positions[:, start:cursor] = axes + following
                following += max(height, width)
        positions[:, cursor:] = np.arange(following, following + length - cursor)
        return positions

    def _kind(self, item: MediaItem) -> str:
        kind = item.get("kind")
        if kind not in self.placeholder_ids or f"{kind}_grid_thw" not in item:
            raise SpanMismatch(
                f"a {kind!r} item with {sorted(item)} is no qwen3_vl image or video: it needs "
                "image_grid_thw or video_grid_thw",
                item="media",
            )
        return str(kind)


def plan_image(header: ImageHeader, rules: PixelRules, budget: Budget) -> ItemPlan:
    """What an image becomes under the rules and a budget."""
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


def plan_video(
    header: VideoHeader, frames: tuple[int, ...], size: tuple[int, int], rules: PixelRules
) -> ItemPlan:
    """What the chosen frames of a video become at a size."""
    steps = -(-len(frames) // rules.temporal_patch_size)
    grid = (steps, size[0] // rules.patch_size, size[1] // rules.patch_size)
    patches = grid[0] * grid[1] * grid[2]
    return ItemPlan(
        kind="video",
        source_size=(header.height, header.width),
        size=size,
        grid=grid,
        patches=patches,
        tokens=patches // rules.merge_size**2,
        frames=frames,
    )


def image_item(image: Image.Image, plan: ItemPlan, rules: PixelRules) -> MediaItem:
    """The arrays of an image."""
    assert plan.size is not None
    pixels = np.array(image).transpose(2, 0, 1)
    if pixels.shape[1:] != plan.size:
        pixels = resize(pixels, plan.size, rules.resample)
    values, grid = patchify([pixels], 1, plan.size, rules), np.array([plan.grid], np.int64)
    values.flags.writeable = grid.flags.writeable = False
    return {"kind": "image", "pixel_values": values, "image_grid_thw": grid}


def video_item(clip: Clip, plan: ItemPlan, rules: PixelRules) -> MediaItem:
    """The arrays of a video without sound and times."""
    assert plan.size is not None
    values = frames_to_patches(clip.frames, len(plan.frames), plan.size, rules)
    grid = np.array([plan.grid], np.int64)
    values.flags.writeable = grid.flags.writeable = False
    return {"kind": "video", "pixel_values_videos": values, "video_grid_thw": grid}


def grid_of(item: MediaItem, kind: str) -> tuple[int, int, int]:
    """(time, height, width) of an item in patches."""
    time, height, width = (int(side) for side in np.asarray(item[f"{kind}_grid_thw"]).reshape(3))
    return time, height, width


def _moments(frames: Sequence[int], fps: float, rules: PixelRules) -> np.ndarray:
    """Seconds of each step in time: the middle of its first and last frame, the last one filling up."""
    step = rules.temporal_patch_size
    filled = [*frames, *[frames[-1]] * (-len(frames) % step)]
    times = [number / fps for number in filled]
    return np.array([(times[at] + times[at + step - 1]) / 2 for at in range(0, len(times), step)])


def create(
    tokenizer: Any, config: Mapping[str, Any], preprocessor: Mapping[str, Any], video: Mapping[str, Any]
) -> Qwen3VL:
    """From the model's config.json, image preprocessor config and video preprocessor config.

    Raises:
        ConfigError: the tokenizer lacks the vision tokens, the configs disagree, or a step is switched off.
    """
    vocabulary = tokenizer.get_vocab()
    check_tokens(vocabulary, _VISION_TOKENS, config, "qwen3_vl")
    vision = config.get("vision_config", {})
    reserved = [*_VISION_TOKENS, *(token for token in ("<|video_pad|>",) if token in vocabulary)]
    return Qwen3VL(
        rules=read_rules(preprocessor, vision, "qwen3_vl", PixelRules()),
        # Without one of its own, the images' config is also the videos', as transformers reads a folder.
        clips=read_clip_rules(video or preprocessor, vision, "qwen3_vl", _VIDEO_DEFAULTS),
        image_token_id=vocabulary["<|image_pad|>"],
        video_token_id=vocabulary.get("<|video_pad|>"),
        start_token_id=vocabulary["<|vision_start|>"],
        end_token_id=vocabulary["<|vision_end|>"],
        reserved_ids=tuple(sorted(vocabulary[token] for token in reserved)),
        tokenizer=tokenizer,
    )


def check_tokens(
    vocabulary: Mapping[str, int], needed: Sequence[str], config: Mapping[str, Any], family: str
) -> None:
    """Raise ConfigError where a tokenizer lacks tokens, or has other numbers for them than config.json."""
    missing = [token for token in needed if token not in vocabulary]
    if missing:
        raise ConfigError(
            f"the tokenizer lacks {', '.join(missing)}, which {family} needs: is it this model's tokenizer?"
        )
    for kind in ("image", "video", "audio"):
        token, key = f"<|{kind}_pad|>", f"{kind}_token_id"
        configured = config.get(key)
        if token in vocabulary and configured is not None and configured != vocabulary[token]:
            raise ConfigError(
                f"{key} is {configured} in config.json, but the tokenizer's {token} is {vocabulary[token]}: "
                "model and tokenizer do not belong together"
            )


_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
