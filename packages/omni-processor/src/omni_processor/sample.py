"""The nouns: what an item will cost, what an item became, and a processed sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from omni_processor.errors import ConfigError

MediaItem = dict[str, Any]
"""One item as plain data: ``"kind"`` (``"image"``, ``"video"`` or ``"audio"``) and its named numpy arrays,
with the names and types of the model's Hugging Face processor: exactly what the model is fed.

    image   pixel_values float32 [patches, channels * temporal * patch * patch],
            image_grid_thw int64 [1, 3] in patches
    video   pixel_values_videos and video_grid_thw alike, and for qwen3_omni video_second_per_grid float32
            [1]: seconds that a step in time takes
    audio   input_features float32 [1, mel bins, frames], feature_attention_mask int64 [1, frames]
    video with its own sound (qwen3_omni): the arrays of both in one item, of kind ``"video"``

Beside those an item may carry what no model is fed (`OPAQUE`). The arrays are read-only and may be shared
between samples.
"""

OPAQUE = ("file", "timestamps")
"""Arrays of an item that no model is fed; `collate` leaves them out.

``file``, uint8 [bytes], of sound and video: the encoded original, for an engine that takes files. What came
as numbers is written losslessly: a waveform as WAV, frames as video. ``timestamps``, float64 [steps in time],
of qwen3_vl's videos: the seconds that are written as text before its frames, which `expand` needs.
"""


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What one item will become, known from its header alone.

    Attributes:
        kind: the modality: ``"image"``, ``"video"`` or ``"audio"``.
        tokens: placeholder tokens it takes in the sequence, those of a video's own sound included. Of a sound
            whose length its header only estimates, as some compressed formats do, an estimate.
        source_size: (height, width) in pixels, upright (EXIF orientation and rotation applied); None for
            sound, as the next three.
        size: (height, width) in pixels after the resize.
        grid: (time, height, width) in patches.
        patches: rows of `pixel_values` or `pixel_values_videos`.
        frames: numbers of a video's frames that are shown, in order.
        sound_tokens: of `tokens`, those that stand for sound.
    """

    kind: str
    tokens: int
    source_size: tuple[int, int] | None = None
    size: tuple[int, int] | None = None
    grid: tuple[int, int, int] | None = None
    patches: int = 0
    frames: tuple[int, ...] = ()
    sound_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Where an item sits: tokens[start:end] reach from its first placeholder to its last, `item` is its index
    in the media.

    Between the placeholders of a qwen3_vl video stand the times of its frames, between those of a video with
    its own sound nothing but placeholders of both kinds.
    """

    kind: str
    start: int
    end: int
    item: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits in tokens, on top of what the model's own preprocessor config says.

    Attributes:
        min_item_tokens: an image is enlarged to at least this many tokens; None = the model's own minimum.
        max_item_tokens: an image is shrunk to at most this many tokens; None = the model's own maximum.
        min_frame_tokens, max_frame_tokens: the same for a frame of a video, which is a step in time: as many
            stored frames as the model takes together.
        max_sample_tokens: all media items of a sample together, else `BudgetExceeded`; None = no limit.
    """

    min_item_tokens: int | None = None
    max_item_tokens: int | None = None
    min_frame_tokens: int | None = None
    max_frame_tokens: int | None = None
    max_sample_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused from the header, before decoding.

    Attributes:
        max_bytes: encoded size of one image, in bytes.
        max_pixels: width * height of one image or frame as stored.
        max_stream_bytes: encoded size of one sound or video, in bytes; an item keeps its file.
        max_seconds: length of one sound or video.
        max_frames: stored frames of one video.
    """

    max_bytes: int = 64 * 2**20
    max_pixels: int = 64_000_000
    max_stream_bytes: int = 512 * 2**20
    max_seconds: float = 3600.0
    max_frames: int = 432_000

    def __post_init__(self) -> None:
        _check_positive(self)


def _check_positive(limits: Budget | Limits) -> None:
    for field in fields(limits):
        value = getattr(limits, field.name)
        if value is not None and value < 1:
            raise ConfigError(f"{field.name} is {value}; at least 1 was expected")


@dataclass(frozen=True, slots=True)
class Sample:
    """A processed conversation (or a piece of one).

    Attributes:
        tokens: int32 [n], placeholders already expanded: exactly the ids the model sees.
        media: the items in the order of their spans.
        spans: one a media item, positions in `tokens`.
        token_counts: tokens by modality: ``{"text": ..., "image": ...}``; they add up to n. What stands for
            the sound of a video counts as ``"audio"``.
    """

    tokens: np.ndarray
    media: list[MediaItem]
    spans: list[Span]
    token_counts: Mapping[str, int]


def collate(items: Sequence[MediaItem | Sample]) -> dict[str, np.ndarray]:
    """Concatenate the arrays of media items by name, in order, into the tensors of one batch.

    Args:
        items: media items, or samples whose items are taken in order.

    Returns:
        Every array joined along its first axis, such as ``pixel_values`` float32 [sum of patches, width] and
        ``image_grid_thw`` int64 [images, 3]. Sounds of different length are padded behind with zeros, where
        ``feature_attention_mask`` is 0. An empty dict when there is no media. The arrays are fresh copies.

    Raises:
        ValueError: items whose arrays differ in dtype or trailing shape (they come from different models).
    """
    flat: list[MediaItem] = []
    for item in items:
        flat.extend(item.media if isinstance(item, Sample) else [item])
    columns: dict[str, list[np.ndarray]] = {}
    for index, item in enumerate(flat):
        for name, value in item.items():
            if name == "kind" or name in OPAQUE:
                continue
            column = columns.setdefault(name, [])
            fixed = slice(1, -1) if name in _RAGGED else slice(1, None)
            if column and (column[0].shape[fixed] != value.shape[fixed] or column[0].dtype != value.dtype):
                raise ValueError(
                    f"media item {index}: {name} is {value.dtype} {value.shape}, the items before it "
                    f"{column[0].dtype} {column[0].shape}: collate items of one model only"
                )
            column.append(value)
    return {
        name: np.concatenate(_padded(values) if name in _RAGGED else values, axis=0)
        for name, values in columns.items()
    }


_RAGGED = ("input_features", "feature_attention_mask")


def _padded(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    longest = max(value.shape[-1] for value in values)
    return [np.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, longest - value.shape[-1])]) for value in values]
