"""Which frames of a video are shown and at what size, by the rules of the two published video processors.

Qwen3-VL spreads frames over the video and bounds the pixels of all of them together; Qwen3-Omni (whose video
processor is Qwen2-VL's) takes a frame every so often and bounds the pixels of each. Equal to transformers'
Qwen3VLVideoProcessor and Qwen2VLVideoProcessor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_processor.errors import ConfigError
from omni_processor.families.patches import PixelRules, patchify, read_rules, resize, target_size
from omni_processor.sample import Budget
from omni_processor.videos import VideoHeader

_TRAINED_SHARE = 0.9  # of the context that Qwen2-VL's cap divides among frames


@dataclass(frozen=True, slots=True)
class ClipRules:
    """How frames are chosen and sized.

    Attributes:
        pixels: how a frame becomes patches; its bounds are those of a frame, or of all frames together.
        fps: frames a second that are shown.
        min_frames, max_frames: bounds of their number.
        cap: whether a frame is bounded by its share of the whole, too (cap_pixels_per_frame).
        max_tokens: what the cap counts with (max_video_tokens).
    """

    pixels: PixelRules
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    cap: bool = False
    max_tokens: int = 768

    def bounded(self, budget: Budget, frames: int) -> tuple[int, int]:
        """Least and most pixels, of as many frames as are bounded together, under a budget."""
        area = self.pixels.factor**2 * frames
        least, most = self.pixels.min_pixels, self.pixels.max_pixels
        if budget.max_frame_tokens is not None:
            most = budget.max_frame_tokens * area
        if budget.min_frame_tokens is not None:
            least = budget.min_frame_tokens * area
        return min(least, most), most


def spread(header: VideoHeader, rules: ClipRules) -> tuple[int, ...]:
    """Numbers of frames, equally far apart from first to last, as Qwen3VLVideoProcessor takes them."""
    total = header.frames
    count = int(total / header.fps * rules.fps)
    count = min(max(count, rules.min_frames), rules.max_frames, total)
    return tuple(np.linspace(0, total - 1, count).round().astype(int).tolist())


def every(header: VideoHeader, rules: ClipRules) -> tuple[int, ...]:
    """Numbers of frames, one every so often from the first on, as Qwen2VLVideoProcessor takes them.

    They are as many as make whole steps in time; a video too short for one step gives its first frame.
    """
    total, step = header.frames, rules.pixels.temporal_patch_size
    most = math.floor(min(rules.max_frames, total) / step) * step
    wanted = min(max(total / header.fps * rules.fps, rules.min_frames), most, total)
    count = math.floor(wanted / step) * step
    if not count:
        return (0,)
    import torch

    # By the published kernel: how it rounds decides about a frame now and then.
    return tuple(torch.arange(0, total, total / count).int().clamp(max=total - 1).tolist())


def size_together(header: VideoHeader, frames: int, rules: ClipRules, budget: Budget) -> tuple[int, int]:
    """(height, width) of each frame where the bounds are of all together, as Qwen3VLVideoProcessor's."""
    pixels, height, width = rules.pixels, header.height, header.width
    factor, step = pixels.factor, pixels.temporal_patch_size
    frames = max(frames, step)  # the last one fills up a step in time
    least, most = rules.bounded(budget, frames)
    if rules.cap:
        share = min(rules.max_tokens * factor * factor, most // frames)
        most = max(share, int(least * 1.05)) * frames
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    filled = round(frames / step) * step
    # The bounds hold for frames x height x width: scaled so, they are bounds of a picture.
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if filled * new_height * new_width > most:
        shrink = math.sqrt((frames * height * width) / most)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif filled * new_height * new_width < least:
        grow = math.sqrt(least / (frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    if max(height, width) > 200 * min(height, width):  # refused by the published processor
        longest = max(factor, most // filled // factor // factor * factor)
        new_height, new_width = min(new_height, longest), min(new_width, longest)
    return new_height, new_width


def size_each(header: VideoHeader, frames: int, rules: ClipRules, budget: Budget) -> tuple[int, int]:
    """(height, width) of each frame where the bounds are of one, as Qwen2VLVideoProcessor's."""
    factor = rules.pixels.factor
    least, most = rules.bounded(budget, 1)
    if rules.cap:
        whole = int(rules.max_tokens * factor * factor * _TRAINED_SHARE)
        share = whole * rules.pixels.temporal_patch_size // frames
        most = max(min(most, share), int(least * 1.05))
    return target_size(header.height, header.width, factor, min(least, most), most)


def frames_to_patches(
    frames: Iterable[np.ndarray], count: int, size: tuple[int, int], rules: PixelRules
) -> np.ndarray:
    """`count` frames, each uint8 [height, width, 3], to float32 [patches, values] at another size.

    They are taken one by one: what is kept of each is its patches.
    """

    def resized() -> Iterator[np.ndarray]:
        for frame in frames:
            pixels = frame.transpose(2, 0, 1)
            yield pixels if pixels.shape[1:] == size else resize(pixels, size, rules.resample)

    return patchify(resized(), count, size, rules)


def read_clip_rules(
    video: Mapping[str, Any], vision: Mapping[str, Any], family: str, defaults: ClipRules
) -> ClipRules:
    """The rules that a video preprocessor config and config.json's vision_config give together.

    Raises:
        ConfigError: they contradict each other, or ask for what is not done here.
    """
    if video.get("num_frames") is not None:
        raise ConfigError(
            f"num_frames is {video['num_frames']} in the video preprocessor config; {family} takes frames by "
            "time: remove it and set fps, min_frames and max_frames"
        )
    numbers = {
        name: type(getattr(defaults, name))(video.get(name) or getattr(defaults, name))
        for name in ("fps", "min_frames", "max_frames")
    }
    rules = ClipRules(
        read_rules(video, vision, family, defaults.pixels),
        **numbers,
        cap=bool(video.get("cap_pixels_per_frame", defaults.cap)),
        max_tokens=int(video.get("max_video_tokens") or defaults.max_tokens),
    )
    if not (rules.fps > 0 and 1 <= rules.min_frames <= rules.max_frames):
        raise ConfigError(
            f"fps, min_frames and max_frames are {rules.fps}, {rules.min_frames} and {rules.max_frames} in "
            "the video preprocessor config; a rate above 0 and a range were expected"
        )
    return rules
