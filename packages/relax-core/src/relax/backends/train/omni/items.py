"""The media items of a row as pictures and sounds, in the order of their placeholders.

An item is a mapping of arrays under the names that transformers' Qwen3-Omni processor gives them:

    image     pixel_values [patches, values], image_grid_thw [3] or [n, 3]
    video     pixel_values_videos [patches, values], video_grid_thw [3] or [n, 3],
              video_second_per_grid [] or [n]
    audio     input_features [mel bins, frames] or [n, mel bins, frames], with
              feature_attention_mask [frames] or [n, frames], or audio_feature_lengths [] or [n]
    video with its own sound, whose tokens lie between each other: the arrays of both, equally many
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from relax.backends.train.errors import BatchError
from relax.backends.train.visuals import grids_of

Media = Sequence[Sequence[Mapping[str, Any]]]
"""For each row of a batch its media items, as `Packed.media` has them."""

_IMAGE = frozenset({"pixel_values", "image_grid_thw"})
_VIDEO = frozenset({"pixel_values_videos", "video_grid_thw", "video_second_per_grid"})
_MASKED = frozenset({"input_features", "feature_attention_mask"})
_MEASURED = frozenset({"input_features", "audio_feature_lengths"})
_SOUNDS = (_MASKED, _MEASURED)
_KNOWN = (_IMAGE, _VIDEO, *_SOUNDS, *(_VIDEO | sound for sound in _SOUNDS))


@dataclass(frozen=True, eq=False)
class Picture:
    """One image or video.

    Attributes:
        pixels: float [patches, values].
        grid: (time, height, width) in patches; their product is the number of patches.
        seconds: that a step in time takes; None for an image.
    """

    pixels: NDArray[Any]
    grid: tuple[int, int, int]
    seconds: float | None = None

    @property
    def key(self) -> bytes:
        """The same for pictures that look the same to a tower."""
        return np.asarray(self.grid, np.int64).tobytes() + self.pixels.tobytes()


@dataclass(frozen=True, eq=False)
class Sound:
    """One clip: mel float [mel bins, frames], without padding."""

    mel: NDArray[Any]

    @property
    def frames(self) -> int:
        return self.mel.shape[1]

    @property
    def key(self) -> bytes:
        return np.asarray(self.mel.shape, np.int64).tobytes() + self.mel.tobytes()


@dataclass(frozen=True, eq=False)
class Shown:
    """What stands at one placeholder: an image, a video, a sound, or a video and its sound."""

    picture: Picture | None = None
    sound: Sound | None = None

    @property
    def kind(self) -> Literal["image", "video", "audio", "video with sound"]:
        if self.picture is None:
            return "audio"
        if self.sound is not None:
            return "video with sound"
        return "image" if self.picture.seconds is None else "video"


def shown_in(row: int, items: Sequence[Mapping[str, Any]]) -> list[Shown]:
    """What a row's items show, one entry a placeholder; `row` is for messages.

    Raises:
        BatchError: an item holds other arrays than those of one modality, or they contradict each other.
    """
    return [shown for item in items for shown in _shown(row, item)]


def _shown(row: int, item: Mapping[str, Any]) -> list[Shown]:
    arrays = {name: np.asarray(value) for name, value in item.items() if name != "kind"}
    if arrays.keys() not in _KNOWN:
        raise BatchError(
            f"a media item of row {row} holds {sorted(arrays)}; an Omni thinker is shown images "
            f"{sorted(_IMAGE)}, video {sorted(_VIDEO)}, sound {sorted(_MASKED)} or {sorted(_MEASURED)}, or a "
            "video and its sound in one item"
        )
    if arrays.keys() >= _IMAGE:
        return [Shown(picture) for picture in _pictures(row, arrays, "pixel_values", "image_grid_thw")]
    sounds = _sounds(row, arrays) if "input_features" in arrays else []
    if not arrays.keys() >= _VIDEO:
        return [Shown(sound=sound) for sound in sounds]
    videos = _pictures(row, arrays, "pixel_values_videos", "video_grid_thw", "video_second_per_grid")
    if not sounds:
        return [Shown(video) for video in videos]
    if len(sounds) != len(videos):
        raise BatchError(
            f"a media item of row {row} holds {len(videos)} videos and {len(sounds)} sounds; a video with "
            "its sound has one of each, other sounds are items of their own"
        )
    return [Shown(video, sound) for video, sound in zip(videos, sounds, strict=True)]


def _pictures(
    row: int, arrays: Mapping[str, NDArray[Any]], pixels_name: str, grid_name: str, seconds_name: str = ""
) -> list[Picture]:
    pixels, given = arrays[pixels_name], arrays[grid_name]
    grids = grids_of(row, grid_name, given)
    if (grids < 1).any():
        raise BatchError(
            f"{grid_name} of row {row} is {given.tolist()}; expected (time, height, width) above 0 for each"
        )
    patches = [math.prod(grid) for grid in grids.tolist()]  # of any size, where int64 would begin anew
    if pixels.ndim != 2 or len(pixels) != sum(patches):
        raise BatchError(
            f"{pixels_name} of row {row} has shape {pixels.shape}; {grid_name} {grids.tolist()} means "
            f"{sum(patches)} patches"
        )
    seconds: list[float | None] = [None] * len(grids)
    if seconds_name:
        told = arrays[seconds_name].reshape(-1).astype(np.float64)
        if len(told) != len(grids) or not (np.isfinite(told) & (told > 0)).all():
            raise BatchError(
                f"{seconds_name} of row {row} is {told.tolist()}; expected a number of seconds above 0 for "
                f"each of {len(grids)} videos"
            )
        seconds = list(told.tolist())
    parts = np.split(pixels, np.cumsum(patches)[:-1])
    return [
        Picture(part, (int(t), int(h), int(w)), second)
        for part, (t, h, w), second in zip(parts, grids, seconds, strict=True)
    ]


def _sounds(row: int, arrays: Mapping[str, NDArray[Any]]) -> list[Sound]:
    features = arrays["input_features"]
    features = features[None] if features.ndim == 2 else features
    if features.ndim != 3 or features.dtype.kind not in "fiu":
        raise BatchError(
            f"input_features of row {row} has shape {arrays['input_features'].shape} of {features.dtype}; "
            "expected numbers [mel bins, frames] or [sounds, mel bins, frames]"
        )
    frames = features.shape[2]
    if "feature_attention_mask" in arrays:
        mask = arrays["feature_attention_mask"] != 0
        mask = mask[None] if mask.ndim == 1 else mask
        if mask.shape != (len(features), frames):
            raise BatchError(
                f"feature_attention_mask of row {row} has shape {mask.shape}; input_features has "
                f"{len(features)} sounds of {frames} frames"
            )
        found = [part[:, kept] for part, kept in zip(features, mask, strict=True)]
    else:
        lengths = arrays["audio_feature_lengths"].reshape(-1)
        whole = lengths.dtype.kind in "iu"
        if not whole or len(lengths) != len(features) or (lengths > frames).any():
            raise BatchError(
                f"audio_feature_lengths of row {row} is {lengths.dtype} {lengths.tolist()}; whole numbers "
                f"were expected, as input_features has {len(features)} sounds of at most {frames} frames"
            )
        found = [part[:, : max(0, int(length))] for part, length in zip(features, lengths, strict=True)]
    if any(mel.shape[1] == 0 for mel in found):
        raise BatchError(f"a sound of row {row} has no frame; leave out what is silent from its very start")
    return [Sound(mel) for mel in found]
