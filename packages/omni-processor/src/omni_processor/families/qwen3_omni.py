"""Qwen3-Omni's thinker: images, sound, videos, and videos with their own sound, token by token by time.

Equal to transformers' Qwen3OmniMoeProcessor on each item: the same token ids, pixel values to the rounding
of a float32, mel features to 1e-5. Two of its ways are its own alone: it pads the sounds of a call to the
longest, so that the last window of a shorter one is heard against silence, where here each is heard for
itself; and it puts its own bounds of a video's pixels over those of a folder, which hold here if the folder
has a video preprocessor config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from omni_processor.errors import SpanMismatch
from omni_processor.families.base import Decoded, Header
from omni_processor.families.clips import ClipRules, every, read_clip_rules, size_each
from omni_processor.families.mel import MelRules, log_mel, read_mel_rules
from omni_processor.families.patches import PixelRules, read_rules
from omni_processor.families.qwen3_vl import (
    check_tokens,
    grid_of,
    image_item,
    plan_image,
    plan_video,
    video_item,
)
from omni_processor.images import ImageHeader
from omni_processor.sample import Budget, ItemPlan, MediaItem
from omni_processor.sounds import SoundHeader
from omni_processor.videos import Clip, VideoHeader

_VIDEO_DEFAULTS = ClipRules(
    PixelRules(min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32), max_tokens=128_000
)
_BOUNDS = ("size", "min_pixels", "max_pixels")

_ARRAYS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw", "video_second_per_grid"),
    "audio": ("input_features", "feature_attention_mask"),
}


@dataclass(frozen=True, slots=True)
class Qwen3Omni:
    """The thinker of one Qwen3-Omni model: its rules and token ids.

    Attributes:
        positions_per_second: rotary positions that a second of video takes.
    """

    rules: PixelRules
    clips: ClipRules
    mel: MelRules
    placeholder_ids: Mapping[str, int]
    audio_start_id: int
    audio_end_id: int
    positions_per_second: float
    reserved_ids: tuple[int, ...]
    name: str = "qwen3_omni"
    hears_videos: bool = True

    @property
    def sampling_rate(self) -> int:
        return self.mel.rate

    @property
    def fps(self) -> float:
        return self.clips.fps

    def placeholder_text(self, kind: str) -> str:
        around = "audio" if kind == "audio" else "vision"
        return f"<|{around}_start|><|{kind}_pad|><|{around}_end|>"

    def plan(self, header: Header, budget: Budget, sound: SoundHeader | None = None) -> ItemPlan:
        match header:
            case ImageHeader():
                return plan_image(header, self.rules, budget)
            case SoundHeader():
                tokens = self._sound_tokens(header)
                return ItemPlan(kind="audio", tokens=tokens, sound_tokens=tokens)
            case VideoHeader():
                frames = every(header, self.clips)
                size = size_each(header, len(frames), self.clips, budget)
                plan = plan_video(header, frames, size, self.clips.pixels)
                heard = 0 if sound is None else self._sound_tokens(sound)
                return replace(plan, tokens=plan.tokens + heard, sound_tokens=heard)

    def tensorize(self, decoded: Decoded, plan: ItemPlan, item: str) -> MediaItem:
        match decoded:
            case Image.Image():
                return image_item(decoded, plan, self.rules)
            case Clip():
                seconds = np.array([self._step], np.float32)
                seconds.flags.writeable = False
                made = video_item(decoded, plan, self.clips.pixels) | {"video_second_per_grid": seconds}
                return made if decoded.sound is None else made | self._heard(decoded.sound, item)
            case _:
                return {"kind": "audio", **self._heard(decoded, item)}

    def placeholders(self, item: MediaItem) -> np.ndarray:
        kind, ids = self._kind(item), self.placeholder_ids
        sound = self._mel_tokens(item) if "input_features" in item else 0
        if kind == "audio":
            return np.full(sound, ids["audio"], np.int32)
        time, frame = self._steps(item, kind)
        if not sound:
            return np.full(time * frame, ids[kind], np.int32)
        # By time, what is seen before what is heard at the same moment.
        moments = np.repeat(np.arange(time), frame) * self._step * self.positions_per_second
        seen = np.arange(len(moments)) + np.searchsorted(np.arange(sound), moments, side="left")
        found = np.full(len(moments) + sound, ids["audio"], np.int32)
        found[seen] = ids["video"]
        return found

    def runs(self, item: MediaItem) -> Sequence[int]:
        return [len(self.placeholders(item))]

    def expansion(self, item: MediaItem) -> np.ndarray:
        inner = self.placeholders(item)
        if item["kind"] == "video" and "input_features" in item:
            return np.concatenate([[self.audio_start_id], inner, [self.audio_end_id]]).astype(np.int32)
        return inner

    def positions(self, length: int, shown: Sequence[tuple[np.ndarray, MediaItem]]) -> np.ndarray:
        positions = np.empty((3, length), np.float32)
        cursor, following = 0, np.float32(0)  # next token, and the position it gets
        for places, item in shown:
            start = int(places[0])
            positions[:, cursor:start] = np.arange(start - cursor, dtype=np.float32) + following
            following = np.float32(following + (start - cursor))
            cursor = start + len(places)
            positions[:, start:cursor], following = self._item_positions(item, following)
        positions[:, cursor:] = np.arange(length - cursor, dtype=np.float32) + following
        return positions

    def _item_positions(self, item: MediaItem, first: np.float32) -> tuple[np.ndarray, np.float32]:
        """float32 [3, placeholders] of an item that begins at `first`, and where what follows it begins."""
        kind = self._kind(item)
        sound = self._mel_tokens(item) if "input_features" in item else 0
        heard = np.arange(sound, dtype=np.float32) + first
        if kind == "audio":
            return np.broadcast_to(heard, (3, sound)), np.float32(heard[-1] + 1)
        time, height, width = grid_of(item, kind)
        height, width = height // self.rules.merge_size, width // self.rules.merge_size
        step = np.float32(1 if kind == "image" else np.asarray(item["video_second_per_grid"]).reshape(-1)[0])
        moments = np.arange(time, dtype=np.float32) * step * np.float32(self.positions_per_second)
        axes = np.meshgrid(moments, np.arange(height), np.arange(width), indexing="ij")
        seen = np.stack([axis.ravel() for axis in axes]).astype(np.float32) + first
        if not sound:
            return seen, np.float32(seen.max() + 1)
        found = np.empty((3, seen.shape[1] + sound), np.float32)
        is_seen = np.zeros(found.shape[1], np.bool_)
        is_seen[np.arange(seen.shape[1]) + np.searchsorted(heard, seen[0], side="left")] = True
        found[:, is_seen], found[:, ~is_seen] = seen, heard
        # What follows begins behind what is left of the one when the other is over, as the model has it.
        left = np.flatnonzero(is_seen != is_seen[-1])[-1] + 1
        return found, np.float32(found[:, left:].max() + 1)

    @property
    def _step(self) -> float:
        """Seconds that a step in time takes."""
        return self.clips.pixels.temporal_patch_size / self.clips.fps

    def _steps(self, item: MediaItem, kind: str) -> tuple[int, int]:
        """Steps in time, and tokens of each."""
        time, height, width = grid_of(item, kind)
        return time, height * width // self.rules.merge_size**2

    def _heard(self, samples: np.ndarray, item: str) -> dict[str, np.ndarray]:
        features = log_mel(samples, self.mel, item)[None]
        mask = np.ones((1, features.shape[2]), np.int64)
        features.flags.writeable = mask.flags.writeable = False
        return {"input_features": features, "feature_attention_mask": mask}

    def _sound_tokens(self, header: SoundHeader) -> int:
        return self.mel.tokens(self.mel.frames(round(header.seconds * self.mel.rate)))

    def _mel_tokens(self, item: MediaItem) -> int:
        return self.mel.tokens(int(np.asarray(item["feature_attention_mask"]).sum()))

    def _kind(self, item: MediaItem) -> str:
        kind = item.get("kind")
        if kind not in _ARRAYS or any(name not in item for name in _ARRAYS[kind]):
            raise SpanMismatch(
                f"a {kind!r} item with {sorted(item)} is nothing that qwen3_omni is shown: expected "
                + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in _ARRAYS.items()),
                item="media",
            )
        return str(kind)


def create(
    tokenizer: Any, config: Mapping[str, Any], preprocessor: Mapping[str, Any], video: Mapping[str, Any]
) -> Qwen3Omni:
    """From config.json (of the thinker, or of the whole model), and the preprocessor configs.

    Raises:
        ConfigError: the tokenizer lacks the media tokens, the configs disagree, or a step is switched off.
    """
    config = config.get("thinker_config", config)
    vocabulary = tokenizer.get_vocab()
    check_tokens(vocabulary, _TOKENS, config, "qwen3_omni")
    vision = config.get("vision_config", {})
    # A folder without a video config of its own has the images' read for it, but for the bounds.
    video = video or {name: value for name, value in preprocessor.items() if name not in _BOUNDS}
    return Qwen3Omni(
        rules=read_rules(preprocessor, vision, "qwen3_omni", PixelRules()),
        clips=read_clip_rules(video, vision, "qwen3_omni", _VIDEO_DEFAULTS),
        mel=read_mel_rules(preprocessor, config.get("audio_config", {})),
        placeholder_ids={kind: vocabulary[f"<|{kind}_pad|>"] for kind in _ARRAYS},
        audio_start_id=vocabulary["<|audio_start|>"],
        audio_end_id=vocabulary["<|audio_end|>"],
        positions_per_second=float(config.get("position_id_per_seconds") or 13),
        reserved_ids=tuple(sorted(vocabulary[token] for token in _TOKENS)),
    )


_TOKENS = (
    *("<|vision_start|>", "<|vision_end|>", "<|audio_start|>", "<|audio_end|>"),
    *("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"),
)
